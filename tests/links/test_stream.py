"""The deltas of one stream: in order and once, whichever way they go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.links.client import DeltaStream
from disagg.messages import TokenDelta
from disagg.token_fast_path import Taken

HOWS = st.sampled_from(["taken", "refused", "taken, with a rest"])


@given(st.lists(st.tuples(HOWS, st.integers(0, 3)), min_size=1, max_size=30))
async def test_deltas_keep_their_order(deltas: Sequence[tuple[str, int]]) -> None:
    """Each is offered to `on_token` in another way, after so many turns of the loop."""
    seen: list[int] = []
    num_rests = 0

    async def rest() -> None:
        nonlocal num_rests
        for _ in range(2):
            await asyncio.sleep(0)
        num_rests -= 1

    def on_token(delta: TokenDelta) -> Taken:
        nonlocal num_rests
        assert not num_rests, "the rest of the one before comes first"
        (token_id,) = delta.token_ids
        how = deltas[token_id][0]
        if how == "refused":
            return False
        seen.append(token_id)
        if how == "taken":
            return True
        num_rests += 1
        return rest()

    stream = DeltaStream(asyncio.get_running_loop(), on_token)

    async def read() -> None:
        while len(seen) < len(deltas):
            if not stream.deltas:
                await stream.wait()
            assert not num_rests
            seen.extend(stream.take().token_ids)

    reading = asyncio.create_task(read())
    for token_id, (_, num_turns) in enumerate(deltas):
        for _ in range(num_turns):
            await asyncio.sleep(0)
        stream.put(TokenDelta(0, (token_id,)))
    for _ in range(8 * len(deltas)):
        await asyncio.sleep(0)
    reading.cancel()
    assert seen == list(range(len(deltas)))


async def test_nothing_is_offered_unless_the_reader_waits() -> None:
    offered: list[TokenDelta] = []

    def on_token(delta: TokenDelta) -> Taken:
        offered.append(delta)
        return True

    stream = DeltaStream(asyncio.get_running_loop(), on_token)
    stream.put(TokenDelta(0, (1,)))
    assert stream.take().token_ids == (1,)
    assert not offered


@pytest.mark.parametrize("following", [[], [TokenDelta(0, (2,), "stop")]])
async def test_a_failure_ends_its_stream_alone(following: list[TokenDelta]) -> None:
    """One that arrives with the lost delta must not end the answer as if it were complete."""

    def on_token(delta: TokenDelta) -> Taken:
        raise ValueError("planted")

    stream = DeltaStream(asyncio.get_running_loop(), on_token)
    reading = asyncio.create_task(stream.wait())
    await asyncio.sleep(0)
    for delta in [TokenDelta(0, (1,)), *following]:
        stream.put(delta)
    with pytest.raises(ValueError, match="planted"):
        await reading
    assert not stream.deltas
