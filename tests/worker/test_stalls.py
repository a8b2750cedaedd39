"""A worker that stands still loses its streams to others, and is welcome when it moves again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager

import psutil
import pytest

from disagg.errors import EngineFailed, WorkerLost
from disagg.links.client import NUM_CHECKS, SILENCE_S, Link
from disagg.messages import decode_worker_record
from disagg.worker import liveness
from disagg.worker import worker as worker_module
from tests.deltas import open_stream
from tests.links.fakes import RecordingObserver, linked, until
from tests.worker.rig import KEY, rig
from tests.worker.test_worker import answer_to, make_request, tokens

LIFETIME = 900  # tokens of an answer that takes long


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is stalled after a second, if its step should be short."""
    monkeypatch.setattr(worker_module, "LOOK_S", 0.01)
    monkeypatch.setattr(liveness, "LOOK_S", 0.01)
    monkeypatch.setattr(liveness, "TURN_S", 1.0)


@pytest.mark.usefixtures("short_looks")
async def test_the_streams_of_an_engine_that_hangs_end_and_it_comes_back() -> None:
    async with rig("decode") as r:
        runner, observer = r.runners["decode"], r.observer
        runner.num_runs_left = 4
        request = make_request(max_tokens=100)
        stream = open_stream(r.links["decode"], request)
        had: list[int] = []
        with pytest.raises(WorkerLost):
            async with aclosing(stream):
                async for delta in stream:
                    had += delta.token_ids
        assert had == answer_to(request)[:3], "what was computed before it hung"
        await until(lambda: r.links["decode"].is_up)
        assert "decode" not in observer.held, "routable without a sign of life"
        with pytest.raises(EngineFailed, match="has not finished a step"):
            while True:
                r.workers["decode"].check_health()
                await asyncio.sleep(0.01)
        runner.gate.set()
        await until(lambda: "decode" in observer.held)
        await r.until_empty("decode")
        await until(lambda: not r.workers["decode"]._liveness.is_stalled)
        r.workers["decode"].check_health()
        assert tokens(await r.all("decode", make_request())) == answer_to(make_request())


@pytest.mark.usefixtures("short_looks")
async def test_an_engine_in_a_long_step_keeps_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "STEP_FACTOR", 1e6)
    async with rig("decode") as r:
        r.runners["decode"].gate.clear()
        task = asyncio.create_task(r.all("decode", make_request()))
        looks = r.workers["decode"]._liveness
        await until(lambda: looks.still_s > 2 * liveness.TURN_S)
        r.workers["decode"].check_health()
        r.runners["decode"].gate.set()
        assert tokens(await task) == answer_to(make_request())
        assert ("lost", "decode") not in r.observer.calls


async def test_a_broken_engine_is_not_routed_to() -> None:
    async with rig("decode") as r:
        r.runners["decode"].breaks = True
        (last,) = await r.all("decode", make_request())
        assert last.error is not None and last.error.code == "engine_failed"
        await until(lambda: not r.observer.statuses["decode"].accepting)
        (refusal,) = await r.all("decode", make_request())
        assert refusal.error is not None and refusal.error.code == "unavailable"


def test_silence_is_noticed_within_the_promised_time() -> None:
    """Five seconds from the freeze, which comes after the last frame."""
    assert SILENCE_S * (1 + 1 / NUM_CHECKS) < 5.0


@contextmanager
def _process() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.worker.worker_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


@asynccontextmanager
async def _linked(line: str, observer: RecordingObserver) -> AsyncIterator[Link]:
    record = decode_worker_record(bytes.fromhex(line))
    async with linked(record, observer, KEY.encode()) as link:
        await until(lambda: "decode" in observer.held)
        yield link


async def test_a_frozen_process_is_left_and_comes_back_without_old_tokens() -> None:
    observer = RecordingObserver()
    loop = asyncio.get_running_loop()
    with _process() as process:
        assert process.stdin is not None and process.stdout is not None
        line = await loop.run_in_executor(None, process.stdout.readline)
        async with _linked(line, observer) as link:
            request = make_request(max_tokens=LIFETIME)
            had: list[int] = []
            stream = open_stream(link, request)
            with pytest.raises(WorkerLost, match="silent"):
                async with aclosing(stream):
                    async for delta in stream:
                        if not had:
                            process.send_signal(signal.SIGSTOP)
                        had += delta.token_ids
            assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            assert 0 < len(had) < LIFETIME and had == answer_to(request)[: len(had)]
            assert "decode" not in observer.held
            process.send_signal(signal.SIGCONT)
            await until(lambda: "decode" in observer.held, timeout_s=30)
            answer = [delta async for delta in open_stream(link, make_request(max_tokens=50))]
            assert tokens(answer) == answer_to(make_request(max_tokens=50))
            process.stdin.write("\n")
            process.stdin.flush()
            message = await loop.run_in_executor(None, process.stdout.readline)
            assert message == "empty\n", "the old stream runs on"
