"""`disagg batch`, against a server and with a model of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from disagg.cli.main import main
from disagg.config import EngineConfig, HttpConfig, ServeConfig, TierConfig
from tests.behind_uvicorn import served_port
from tests.tiny_model import tiny_parts

KEY = "key-of-a-test"


def config_of(model: Path) -> ServeConfig:
    engine = EngineConfig(dtype="float32", num_threads=1, max_model_len=512, max_num_seqs=8)
    tier = TierConfig(model=str(model), engine=engine, ttft_slo_s=None)
    http = HttpConfig(api_key=KEY)
    return ServeConfig(tiers=(tier,), transport="local", cluster_key="key", http=http)


def write(file: Path, number: int) -> None:
    paths: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
    ]
    with file.open("w") as lines:
        for each in range(number):
            url, body = paths[each % 3]
            limit = "max_output_tokens" if "input" in body else "max_tokens"
            body = {limit: 16 + each % 4, "temperature": 0, **body}
            print(json.dumps({"custom_id": str(each), "url": url, "body": body}), file=lines)


def answers(output: Path) -> dict[str, Any]:
    """What was said to each request, without ids and times."""
    lines = [json.loads(each) for each in output.read_text().splitlines()]
    names = Counter(each["custom_id"] for each in lines)
    assert set(names.values()) == {1}
    said = {}
    for each in lines:
        body = each["response"]["body"]
        said[each["custom_id"]] = (
            [item["content"][0]["text"] for item in body["output"]]
            if "output" in body
            else [choice.get("text") or choice.get("message") for choice in body["choices"]]
        )
    return said


async def test_a_server_and_a_model_here_answer_alike(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after the command was killed in the middle."""
    source, output, own = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "own.jsonl"))
    write(source, 60)
    async with served_port(config_of(model), tiny_parts()) as port:
        words = ["batch", str(source), "-o", str(output), "--url", f"http://127.0.0.1:{port}/v1"]
        words += ["--api-key", KEY, "--concurrency", "2"]
        command = [sys.executable, "-m", "disagg.cli.main", *words]
        process = subprocess.Popen(command)  # noqa: ASYNC220 - it runs beside the server
        while not output.exists() or output.read_text().count("\n") < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        process.kill()
        process.wait()
        num_kept = output.read_text().count("\n")
        assert await asyncio.to_thread(main, words) == 0
        assert capsys.readouterr().out == (
            f"60 of 60 requests are answered, {num_kept} of them by an earlier run.\n"
        )
    local = ["--model", str(model), "--dtype", "float32", "--max-model-len", "512"]
    local += ["--num-threads", "1", "--max-num-seqs", "8"]
    assert await asyncio.to_thread(main, ["batch", str(source), "-o", str(own), *local]) == 0
    assert answers(own) == answers(output) and len(answers(own)) == 60


async def test_a_request_that_fails_is_the_status(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, 2)
    with source.open("a") as file:
        file.write('nothing\n{"custom_id": "x", "url": "/v1/completions", "body": {}}\n')
    async with served_port(config_of(model), tiny_parts()) as port:
        words = ["batch", str(source), "-o", str(output), "--url", f"127.0.0.1:{port}"]
        assert await asyncio.to_thread(main, words) == 2
        assert "does not accept the API key. (--api-key)" in capsys.readouterr().err
        assert await asyncio.to_thread(main, [*words, "--api-key", KEY]) == 1
    errors = tmp_path / "out.errors.jsonl"
    assert capsys.readouterr().out == f"2 of 4 requests are answered; 2 failed: see {errors}.\n"
    bad, refused = (json.loads(each) for each in errors.read_text().splitlines())
    assert bad["error"]["code"] == "invalid_line"
    assert refused["response"]["body"]["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:1"], "Cannot reach http://127.0.0.1:1"),
        (["--url", "ftp://here"], "(--url)"),
        ([], "Give either the URL of a server (--url) or models"),
        (["--url", "x", "--model", "y"], "Give either the URL of a server (--url) or models"),
        (["--model", "no-such-model"], "demo-small"),
        (["--url", "x", "--errors", "in.jsonl"], "must be different files"),
    ],
)
def test_what_cannot_begin_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), 1)
    assert main(["batch", "in.jsonl", "-o", "out.jsonl", *words]) == 2
    assert said in capsys.readouterr().err
    assert main(["batch", "absent.jsonl", "-o", "out.jsonl", "--url", "x"]) == 2
    assert "There is no file absent.jsonl." in capsys.readouterr().err
