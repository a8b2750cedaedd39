"""Lines of our processes name their request and its trace."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg import logs

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    logger = logging.getLogger("disagg")
    before = logger.handlers, logger.propagate, logger.level
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.propagate, logger.level = before


def lines(directory: Path) -> list[dict[str, str]]:
    (file,) = directory.iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_line_names_the_request_that_its_task_works_on(tmp_path: Path) -> None:
    logs.setup("ingress-a", {logs.DIRECTORY: str(tmp_path)})
    logger = logging.getLogger("disagg.api")

    async def work(request_id: str, traceparent: str) -> None:
        logs.set_request(request_id, traceparent)
        await asyncio.sleep(0)
        await asyncio.create_task(later())

    async def later() -> None:
        logger.info("done")

    await asyncio.gather(work("r1", f"00-{TRACE}-b7ad6b7169203331-01"), work("r2", ""))
    logger.info("nobody's")
    logger.info("of another", extra={"request_id": "r3"})
    found = [(each["request_id"], each["trace_id"]) for each in lines(tmp_path)]
    assert found == [("r1", TRACE), ("r2", ""), ("", ""), ("r3", "")]
    assert {each["process"] for each in lines(tmp_path)} == {"ingress-a"}


def test_an_error_is_one_line_with_its_traceback(tmp_path: Path) -> None:
    logs.setup("worker", {logs.DIRECTORY: str(tmp_path)})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("disagg.worker").exception("It failed.")
    (line,) = lines(tmp_path)
    assert line["message"] == "It failed." and "ValueError: two" in line["error"]


def test_a_directory_that_is_not_there_is_no_reason_to_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup("worker", {logs.DIRECTORY: str(tmp_path / "gone"), logs.LEVEL: "warning"})
    logging.getLogger("disagg.worker").info("not this")
    logging.getLogger("disagg.worker").warning("but this")
    assert "but this" in capsys.readouterr().err


def test_the_last_error_of_a_process_is_found(tmp_path: Path) -> None:
    environment = {logs.DIRECTORY: str(tmp_path)}
    assert logs.last_error(os.getpid(), {}) == logs.last_error(os.getpid(), environment) == ""
    logs.setup("worker", environment)
    logger = logging.getLogger("disagg.worker")
    for message in ("The first.", "x" * logs.TAIL_NBYTES, "The engine failed."):
        logger.error(message)
    logger.info("not an error")
    (tmp_path / "server.log").write_text('no JSON\n5\n{"pid": 1}\n')
    (tmp_path / "ray").mkdir()
    assert logs.last_error(os.getpid(), environment) == "The engine failed."
    assert logs.last_error(1, environment) == ""


def test_an_old_error_is_not_why_a_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {logs.DIRECTORY: str(tmp_path)}
    logs.setup("worker", environment)
    logging.getLogger("disagg.worker").error("A link broke.")
    monkeypatch.setattr(logs, "RECENT_S", -1.0)
    assert logs.last_error(os.getpid(), environment) == ""
