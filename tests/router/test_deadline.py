"""Time that runs out is told from a cancellation, and only time that is waited for counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from disagg.errors import DeadlineExceeded
from disagg.router.deadline import Deadline


async def numbers(pause_s: float) -> AsyncGenerator[int, None]:
    for number in range(3):
        await asyncio.sleep(pause_s)
        yield number


def in_s(seconds: float) -> Deadline:
    return Deadline(asyncio.get_running_loop().time() + seconds)


async def test_what_comes_in_time_is_handed_on() -> None:
    stream = numbers(0)
    with in_s(60) as deadline:
        assert [await deadline.next(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(StopAsyncIteration):
            await deadline.next(stream)


async def test_a_wait_ends_at_the_deadline_and_leaves_no_cancellation_behind() -> None:
    task = asyncio.current_task()
    assert task is not None
    with in_s(0.02) as deadline:
        with pytest.raises(DeadlineExceeded):
            await deadline.next(numbers(60))
        with pytest.raises(DeadlineExceeded):
            await deadline.next(numbers(0))
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_time_that_passes_between_waits_cancels_nobody() -> None:
    stream = numbers(0)
    with in_s(0.01) as deadline:
        await deadline.next(stream)
        await asyncio.sleep(0.03)
        with pytest.raises(DeadlineExceeded):
            await deadline.next(stream)


async def test_nothing_is_left_of_a_deadline_after_its_block() -> None:
    with in_s(60) as deadline:
        pass
    assert deadline._timer.cancelled()


@pytest.mark.parametrize("is_first", [True, False])
async def test_somebody_elses_cancellation_stays_one(is_first: bool) -> None:
    async def wait() -> None:
        with in_s(60) as deadline:
            waiting.append(deadline)
            await deadline.next(numbers(60))

    waiting: list[Deadline] = []
    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    if is_first:
        task.cancel()
        waiting[0]._expire()
    else:
        waiting[0]._expire()
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
