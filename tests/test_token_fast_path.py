"""Coroutines that begin outside of a task, and end in one if they have to wait."""

from __future__ import annotations

import asyncio

import pytest

from disagg.token_fast_path import begun


async def test_what_need_not_wait_is_done_at_once() -> None:
    steps: list[str] = []

    async def write() -> None:
        steps.append("written")

    assert begun(write()) is True
    assert steps == ["written"]


async def test_a_task_awaits_the_rest() -> None:
    first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    steps: list[str] = []

    async def write() -> None:
        steps.append("begun")
        steps.append(await first)
        await asyncio.sleep(0)
        steps.append("ended")

    rest = begun(write())
    assert not isinstance(rest, bool)
    assert steps == ["begun"]
    asyncio.get_running_loop().call_soon(first.set_result, "told")
    await rest
    assert steps == ["begun", "told", "ended"]


@pytest.mark.parametrize("error", [OSError("gone"), asyncio.CancelledError()])
async def test_the_rest_hears_of_errors(error: BaseException) -> None:
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    heard: list[BaseException] = []

    async def write() -> None:
        try:
            await first
        except BaseException as known:
            heard.append(known)
            raise

    rest = begun(write())
    assert not isinstance(rest, bool)

    async def finish() -> None:
        await rest

    task = asyncio.create_task(finish())
    await asyncio.sleep(0)
    if isinstance(error, OSError):
        first.set_exception(error)
    else:
        task.cancel()
    with pytest.raises(type(error)):
        await task
    assert [type(each) for each in heard] == [type(error)]
