from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.tools.sim.shared_bandwidth import Port, Transfer
from disagg.tools.sim.virtual_time import run
from tests.grids import examples

RATE = 1e9  # bytes a second of each card
NUM_WORKERS = 5

# When a transfer begins, in ms; its source and its reader; its bytes.
Planned = tuple[int, int, int, int]
worker = st.integers(0, NUM_WORKERS - 1)
planned = st.tuples(st.integers(0, 8), worker, worker, st.integers(1, 4_000_000))


def play(transfers: Sequence[Planned]) -> list[float]:
    """When each ends, in seconds. Checks the rates of all whenever one begins or ends."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        sends, reads = ([Port(RATE) for _ in range(NUM_WORKERS)] for _ in range(2))
        ends = [0.0] * len(transfers)

        def ended(number: int) -> None:
            ends[number] = loop.time()
            check([*sends, *reads])

        def begin(number: int) -> None:
            _, source, reader, nbytes = transfers[number]
            ports = sends[source], reads[reader]
            Transfer(loop, nbytes, ports, lambda: ended(number))
            check([*sends, *reads])

        for number, (at_ms, *_) in enumerate(transfers):
            loop.call_at(1e-3 * at_ms, begin, number)
        await asyncio.sleep(1.0)  # more than all of their bytes through one card
        assert not any(port.transfers for port in [*sends, *reads])
        return ends

    return run(main())


def check(ports: Sequence[Port]) -> None:
    """Each transfer has an even share of its fuller port, so no port is over its rate."""
    for port in ports:
        assert sum(each.bytes_per_s for each in port.transfers) <= port.bytes_per_s * (1 + 1e-9)
        for transfer in port.transfers:
            shares = [each.bytes_per_s / len(each.transfers) for each in transfer.ports]
            assert transfer.bytes_per_s == min(shares)


@examples(20)
@given(st.lists(planned, min_size=1, max_size=12))
def test_no_card_is_over_its_rate_and_transfers_share_it_evenly(
    transfers: list[Planned],
) -> None:
    for (at_ms, _, _, nbytes), end_s in zip(transfers, play(transfers), strict=True):
        assert end_s - 1e-3 * at_ms >= nbytes / RATE * (1 - 1e-9)


@examples(10)
@given(st.lists(st.tuples(worker, st.integers(1, 4_000_000)), min_size=1, max_size=8))
def test_a_reader_is_busy_until_its_last_byte(pulled: list[tuple[int, int]]) -> None:
    ends = play([(0, source, 0, nbytes) for source, nbytes in pulled])
    assert max(ends) == pytest.approx(sum(nbytes for _, nbytes in pulled) / RATE)


def test_the_fuller_card_decides() -> None:
    # Two readers of one source, 1 ms each alone; the second is half as long.
    assert play([(0, 0, 1, 1_000_000), (0, 0, 2, 500_000)]) == pytest.approx([1.5e-3, 1e-3])
    # Worker 1 reads from worker 0, as two others do, and half as fast from worker 4, which is free.
    crowd = [(0, 0, reader, 1_000_000) for reader in (1, 2, 3)]
    *_, free = play([*crowd, (0, 4, 1, 500_000)])
    assert free == pytest.approx(1e-3)


def test_a_cancelled_transfer_leaves_its_share_to_the_others() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        port, ends = Port(RATE), []
        Transfer(loop, 1_000_000, (port,), lambda: ends.append(loop.time()))
        other = Transfer(loop, 1_000_000, (port,), lambda: ends.append(loop.time()))
        loop.call_at(1e-3, other.cancel)
        await asyncio.sleep(1.0)
        (end,) = ends
        return end

    assert run(main()) == pytest.approx(1.5e-3)  # half a share for 1 ms, then all
