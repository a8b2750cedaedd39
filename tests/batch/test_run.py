"""Batches from files: every request is answered once, whatever happens to the run or the server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from disagg.batch.ask import GIVE_UP_S, Ask, Patience
from disagg.batch.lines import PATHS, BatchReply
from disagg.batch.run import AnswerFiles, BatchIsRunning, Counts, run_batch
from disagg.errors import StartupError, Unavailable

GOOD = BatchReply(200, {"x-request-id": "abc"}, b'{\n"text": "yes"}')


def line(custom_id: str, url: str = PATHS[0], **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in file.read_text().splitlines()]


class Batch:
    """The files of a batch in a directory, and runs of it."""

    def __init__(self, directory: Path, lines: list[str]) -> None:
        self.source = directory / "in.jsonl"
        self.output, self.errors = directory / "out.jsonl", directory / "errors.jsonl"
        self.source.write_text("".join(f"{each}\n" for each in lines))

    async def run(self, ask: Ask, num_at_once: int = 4, only: str | None = None) -> Counts:
        with closing(AnswerFiles(self.output, self.errors)) as files:
            return await run_batch(self.source, files, ask, num_at_once, only=only)


class FakeServer:
    """Gives scripted replies to each request, then `GOOD`; an exception is raised."""

    def __init__(self, *script: BatchReply | Exception) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.num_at_once = self.most_at_once = 0
        self._script = list(script)

    async def __call__(self, path: str, body: bytes) -> BatchReply:
        self.asked.append((path, json.loads(body)))
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(0.001)
        self.num_at_once -= 1
        answer = self._script.pop(0) if self._script else GOOD
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_answers_and_failures_have_files_of_their_own(tmp_path: Path) -> None:
    bad = BatchReply(400, {"x-request-id": "r"}, b'{"error": {"code": "invalid_value"}}')
    batch = Batch(tmp_path, [line("a", n=1), line("b", PATHS[2], input="x"), line("c", PATHS[1])])
    server = FakeServer(GOOD, bad, BatchReply(500, {}, b"<html>"))
    counts = await batch.run(server, num_at_once=1)
    assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)
    assert server.asked == [(PATHS[0], {"n": 1}), (PATHS[2], {"input": "x"}), (PATHS[1], {})]
    (answer,) = read(batch.output)
    response = {"status_code": 200, "request_id": "abc", "body": {"text": "yes"}}
    assert answer.pop("id").startswith("batch_req_")
    assert answer == {"custom_id": "a", "response": response, "error": None}
    failed = read(batch.errors)
    assert [(each["custom_id"], each["response"]["status_code"]) for each in failed] == [
        ("b", 400),
        ("c", 500),
    ]
    assert failed[0]["response"]["body"] == {"error": {"code": "invalid_value"}}
    assert failed[1]["response"]["body"] == "<html>"


@pytest.mark.parametrize(
    ("wrong", "custom_id", "code", "words"),
    [
        ("not json", None, "invalid_line", "Line 2 "),
        ("[1]", None, "invalid_line", "Line 2 "),
        ('{"custom_id": "x", "url": "/v1/completions"}', "x", "invalid_line", "`body`"),
        ('{"custom_id": 3, "url": "/v1/completions", "body": {}}', None, "invalid_line", "`str`"),
        (line("", "/v1/completions"), "", "invalid_line", "custom_id"),
        (line("x", "/v1/embeddings"), "x", "invalid_value", "/v1/embeddings"),
        (line("x", stream=True), "x", "invalid_value", "body.stream"),
        (line("x").replace("POST", "GET"), "x", "invalid_value", "GET"),
        (line("first"), "first", "duplicate_custom_id", "of line 1"),
        ("\x00" + line("x"), None, "invalid_line", "Line 2 "),
    ],
)
async def test_a_bad_line_is_named_and_the_rest_runs(
    tmp_path: Path, wrong: str, custom_id: str | None, code: str, words: str
) -> None:
    batch = Batch(tmp_path, [line("first"), wrong, "", line("last")])
    counts = await batch.run(FakeServer())
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert {each["custom_id"] for each in read(batch.output)} == {"first", "last"}
    (failed,) = read(batch.errors)
    assert (failed["custom_id"], failed["response"]) == (custom_id, None)
    assert failed["error"]["code"] == code and words in failed["error"]["message"]


async def test_a_line_that_is_too_long_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.batch.run.MAX_LINE_NBYTES", 200)
    batch = Batch(tmp_path, [line("a"), line("b", text="x" * 1000), line("c")])
    await batch.run(FakeServer())
    assert {each["custom_id"] for each in read(batch.output)} == {"a", "c"}
    assert "Line 2 " in read(batch.errors)[0]["error"]["message"]


async def test_only_so_many_requests_run_at_a_time(tmp_path: Path) -> None:
    server = FakeServer()
    await Batch(tmp_path, [line(f"{number}") for number in range(50)]).run(server, 7)
    assert server.most_at_once == 7 and len(server.asked) == 50


class Killed(Exception):
    """Ends a run as a signal would."""


@pytest.mark.parametrize("torn", ["", '{"id": "batch_req_1", "custom_id": "9'])
async def test_a_killed_run_goes_on_with_what_is_not_answered(tmp_path: Path, torn: str) -> None:
    batch = Batch(tmp_path, [line(f"{number}", number=number) for number in range(20)])
    refused = BatchReply(400, {}, b"{}")
    first = FakeServer(refused, *[GOOD] * 8, Killed())
    with pytest.raises(Killed):
        await batch.run(first, num_at_once=1)
    assert len(read(batch.output)) == 8
    with batch.output.open("a") as file:
        file.write(torn)
    second = FakeServer()
    counts = await batch.run(second)
    assert (counts.completed, counts.num_kept, counts.failed) == (20, 8, 0)
    asked = sorted(body["number"] for _, body in second.asked)
    assert asked == [0, *range(9, 20)], "those that failed or had no answer, and no others"
    names = Counter(each["custom_id"] for each in read(batch.output))
    assert names == Counter({f"{number}": 1 for number in range(20)})
    assert read(batch.errors) == []


async def test_answers_of_another_batch_are_kept(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line("a")])
    await batch.run(FakeServer())
    before = batch.output.read_bytes()
    server = FakeServer()
    with pytest.raises(StartupError, match="'a'"):
        await Batch(tmp_path, [line("b")]).run(server)
    assert batch.output.read_bytes() == before and not server.asked
    batch.output.write_text("A text of somebody else.\nIts end")
    with pytest.raises(StartupError, match="name another file"):
        await batch.run(server)
    assert batch.output.read_text() == "A text of somebody else.\nIts end" and not server.asked


async def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line("a")])
    files = AnswerFiles(batch.output, batch.errors)
    with closing(files), pytest.raises(BatchIsRunning, match=r"out\.jsonl"):
        await batch.run(FakeServer())
    assert (await batch.run(FakeServer())).completed == 1


class Pauses(list[float]):
    """How long requests wait before they are tried again; here they do not."""

    async def sleep(self, pause_s: float) -> None:
        self.append(pause_s)

    def now(self) -> float:
        return sum(self)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    monkeypatch.setattr("disagg.batch.ask.random.uniform", lambda low, high: low)
    return Pauses()


FULL = BatchReply(429, {"retry-after": "7"}, b"{}")
LATE = BatchReply(504, {}, b"{}")


@pytest.mark.parametrize(
    ("script", "status", "waited"),
    [
        ([FULL] * 500, 200, [7.0] * 500),
        ([BatchReply(503, {"retry-after": "900"}, b"")], 200, [30.0]),
        ([BatchReply(429, {"retry-after": "soon"}, b"")], 200, [1.0]),
        ([BatchReply(429, {"x-should-retry": "false"}, b"")], 429, []),
        ([LATE, LATE], 200, [1.0, 1.0]),
        ([LATE, LATE, LATE], 504, [1.0, 1.0]),
        ([BatchReply(400, {}, b"")], 400, []),
        ([BatchReply(500, {}, b"")], 500, []),
        ([Unavailable("gone")] * 7, 200, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
    ],
)
async def test_it_waits_while_a_server_is_full_or_gone(
    pauses: Pauses, script: list[Any], status: int, waited: list[float]
) -> None:
    patience = Patience(FakeServer(*script), pauses.now, pauses.sleep)
    assert (await patience(PATHS[0], b"{}")).status == status
    assert pauses == waited and patience.num_waiting == 0


async def test_it_gives_up_when_a_server_stays_away(pauses: Pauses) -> None:
    gone = FakeServer(*[Unavailable("gone")] * 1000)
    with pytest.raises(Unavailable, match="gone"):
        await Patience(gone, pauses.now, pauses.sleep)(PATHS[0], b"{}")
    assert sum(pauses) > GIVE_UP_S >= sum(pauses[:-1])
