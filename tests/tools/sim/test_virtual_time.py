from __future__ import annotations

import asyncio

import pytest

from disagg.tools.sim.virtual_time import NothingWillHappen, run


def test_time_jumps_from_timer_to_timer() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def sleeper(name: str, seconds: float) -> None:
            for _ in range(2):
                await asyncio.sleep(seconds)
                seen.append((name, loop.time()))

        await asyncio.gather(sleeper("day", 86_400.0), sleeper("week", 7 * 86_400.0))
        return seen

    days = [("day", 1), ("day", 2), ("week", 7), ("week", 14)]
    names, times = zip(*run(main()), strict=True)
    assert names == tuple(name for name, _ in days)
    assert times == pytest.approx([n * 86_400.0 for _, n in days])


def test_waiting_for_nothing_is_an_error_and_not_for_ever() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingWillHappen):
        run(main())


def test_what_is_due_at_the_same_time_happens_in_the_order_in_which_it_was_scheduled() -> None:
    """Also where sums of the same times differ in their last digits."""

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        for number in range(20):
            parts = (0.1, 0.2, 0.3) if number % 3 else (0.3, 0.2, 0.1)
            loop.call_at(parts[0] + parts[1] + parts[2], seen.append, number)
        await asyncio.sleep(1.0)
        return seen

    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    assert run(main()) == list(range(20))
