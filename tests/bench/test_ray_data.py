"""A job of Ray Data, examples/ray_data.py, that is killed in the middle and started again."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet  # type: ignore[import-untyped]

from tests.e2e.command import until

pytestmark = pytest.mark.timeout(900)  # it starts Ray twice

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "ray_data.py"
NUM_ROWS, NUM_FIRST = 256, 128  # of the job, and of those that are answered before it is killed
QUIET_S = 5.0  # a killed job whose actor has not asked for so long has ended


class StandInFleet(http.server.ThreadingHTTPServer):
    """Answers each question with itself; it is full for the first one that asks, and for rows from
    `NUM_FIRST` on until it has `room`.

    Attributes:
        answered: rows, as often as they were answered.
        num_refused: how often it was full.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), AnswerOfStandIn)
        self.answered: Counter[int] = Counter()
        self.num_refused = 0
        self.room = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class AnswerOfStandIn(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][0]["content"]
        row = int(question.split()[2])  # What is ROW + 1?
        if not server.num_refused or (row >= NUM_FIRST and not server.room.is_set()):
            server.num_refused += 1
            return self.reply(429, {"error": {"message": "full"}})
        server.answered[row] += 1
        choice = {"message": {"content": question}, "finish_reason": "stop", "token_ids": [1]}
        self.reply(
            200, {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        )

    def reply(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.send_header("retry-after", "0.2")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_job_goes_on_after_a_kill(tmp_path: Path) -> None:
    """While its fleet is full it waits; afterwards no row that is written is asked for again."""

    def written() -> list[int]:
        files = sorted((tmp_path / "answers").glob("*.parquet"))
        return [row["id"] for file in files for row in parquet.read_table(file).to_pylist()]

    with StandInFleet() as fleet:
        words = [sys.executable, str(EXAMPLE), str(NUM_ROWS), fleet.url]
        own = {
            **{name: each for name, each in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_MODE": "disabled",
            "RAY_raylet_start_wait_time_s": "180",
            "PYTHONPATH": str(ROOT),
        }
        with (tmp_path / "log").open("wb") as log:
            job = subprocess.Popen(words, cwd=tmp_path, env=own, stdout=log, stderr=log)
        until(lambda: len(written()) >= NUM_FIRST or job.poll() is not None)
        assert job.poll() is None, (tmp_path / "log").read_text()
        job.kill()
        job.wait()
        num_refused = -1
        while num_refused != fleet.num_refused:
            num_refused = fleet.num_refused
            time.sleep(QUIET_S)
        kept = written()
        assert sorted(kept) == list(range(NUM_FIRST)) and num_refused > 1
        assert fleet.answered == Counter(kept)
        fleet.room.set()
        done = subprocess.run(words, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{NUM_ROWS} of {NUM_ROWS} rows are answered."
    assert sorted(written()) == list(range(NUM_ROWS))
    assert fleet.answered == Counter(range(NUM_ROWS))
