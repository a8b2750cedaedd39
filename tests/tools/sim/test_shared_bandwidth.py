from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.tools.sim.shared_bandwidth import Port, Transfer, fair_rates
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
    """No port is over its rate, and each transfer has the highest rate of some full port."""
    used = {port: sum(each.bytes_per_s for each in port.transfers) for port in ports}
    for port in ports:
        assert used[port] <= port.bytes_per_s * (1 + 1e-9)
        for transfer in port.transfers:
            assert any(
                used[each] >= each.bytes_per_s * (1 - 1e-9)
                and transfer.bytes_per_s * (1 + 1e-9)
                >= max(other.bytes_per_s for other in each.transfers)
                for each in transfer.ports
            )


@examples(20)
@given(st.lists(planned, min_size=1, max_size=12))
def test_no_card_is_over_its_rate_and_none_rests_while_it_holds_a_transfer_up(
    transfers: list[Planned],
) -> None:
    for (at_ms, _, _, nbytes), end_s in zip(transfers, play(transfers), strict=True):
        assert end_s - 1e-3 * at_ms >= nbytes / RATE * (1 - 1e-9)


@examples(10)
@given(st.lists(st.tuples(worker, st.integers(1, 4_000_000)), min_size=1, max_size=8))
def test_a_reader_is_busy_until_its_last_byte(pulled: list[tuple[int, int]]) -> None:
    ends = play([(0, source, 0, nbytes) for source, nbytes in pulled])
    assert max(ends) == pytest.approx(sum(nbytes for _, nbytes in pulled) / RATE)


def test_transfers_share_a_card_evenly_and_take_what_others_leave() -> None:
    # Two readers of one source, 1 ms each alone; the second is half as long.
    assert play([(0, 0, 1, 1_000_000), (0, 0, 2, 500_000)]) == pytest.approx([1.5e-3, 1e-3])
    # The second reader's card is shared by three, so the first pull has two thirds of its source.
    three = [(0, source, 2, 1_000_000) for source in (0, 3, 4)]
    first, *_ = play([(0, 0, 1, 1_000_000), *three])
    assert first == pytest.approx(1.5e-3)


def test_a_busy_source_holds_up_nobody_elses_transfer() -> None:
    """Worker 1 reads from worker 0, which three others read from, and from worker 4, which is
    free."""
    crowd = [(0, 0, reader, 1_000_000) for reader in (1, 2, 3)]
    *_, free = play([*crowd, (0, 4, 1, 600_000)])
    assert free == pytest.approx(0.9e-3)  # worker 1 has two thirds of its card left for it


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


def test_cards_of_unlike_rates() -> None:
    async def main() -> dict[float, float]:
        loop = asyncio.get_running_loop()
        slow, fast, reads = Port(1.0), Port(10.0), Port(4.0)
        of_slow = Transfer(loop, 100, (slow, reads), lambda: None)
        of_fast = Transfer(loop, 100, (fast, reads), lambda: None)
        rates = fair_rates([slow, fast, reads])
        return {rates[of_slow]: of_slow.bytes_per_s, rates[of_fast]: of_fast.bytes_per_s}

    assert run(main()) == {1.0: 1.0, 3.0: 3.0}
