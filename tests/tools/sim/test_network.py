from __future__ import annotations

import asyncio

import pytest

from disagg.kvtransfer.slab import Slab, Stamps
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone
from disagg.tools.sim.network import SimulatedNetwork, SimulatedTransport
from disagg.tools.sim.virtual_time import run, running_loop

NUM_BLOCKS, BLOCK_NBYTES = 8, 1_000_000
LATENCY_S, RATE = 1e-3, 1e9


class Worker:
    """A side of the network, and when each of its pulls was over."""

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self._network = network
        self._stamps = Stamps(NUM_BLOCKS, name, epoch=1)
        slab = Slab(1, NUM_BLOCKS, BLOCK_NBYTES, "simulated")
        self.done: list[tuple[float, PullDone]] = []
        self.side = SimulatedTransport(network, slab, self._stamps, self._take)

    def ticket(self, ticket_id: str, block_ids: tuple[int, ...]) -> KVTicket:
        peer, stamps = self.side.peer, self._stamps.of(block_ids)
        return KVTicket(ticket_id, peer.worker_id, 1, "simulated", 1, block_ids, tuple(stamps))

    def reuse(self, block_id: int) -> None:
        self._stamps.generations[block_id] += 1

    def _take(self) -> None:
        now = self._network.loop.time()
        self.done += [(now, each) for each in self.side.poll() if isinstance(each, PullDone)]


def workers(names: str) -> list[Worker]:
    network = SimulatedNetwork(running_loop(), LATENCY_S, RATE)
    found = [Worker(network, name) for name in names]
    for reader in found:
        for other in found:
            reader.side.add_peer(other.side.peer)
    return found


def test_a_pull_alone_takes_the_latency_and_its_bytes() -> None:
    async def main() -> None:
        source, reader = workers("ab")
        reader.side.pull(source.ticket("t", (0, 1, 2)), 1, [5, 6])
        assert reader.side.is_pulling
        await asyncio.sleep(1.0)
        ((at_s, done),) = reader.done
        assert at_s == done.seconds == pytest.approx(LATENCY_S + 2 * BLOCK_NBYTES / RATE)
        assert (done.error, done.num_blocks, done.nbytes) == (None, 2, 2 * BLOCK_NBYTES)
        assert not reader.side.is_pulling

    run(main())


def test_both_cards_work_at_once_and_a_worker_reads_while_it_sends() -> None:
    async def main() -> None:
        a, b, c = workers("abc")
        a.side.pull(b.ticket("t", (0,)), 0, [0])
        b.side.pull(a.ticket("t", (1,)), 0, [1])
        c.side.pull(a.ticket("u", (2,)), 0, [2])  # shares what `a` sends with the pull of `b`
        await asyncio.sleep(1.0)
        took = [done.seconds for worker in (a, b, c) for _, done in worker.done]
        one_s = BLOCK_NBYTES / RATE
        assert took == pytest.approx([LATENCY_S + n * one_s for n in (1, 2, 2)])

    run(main())


def test_a_reader_that_leaves_stops_reading() -> None:
    async def main() -> None:
        source, leaving, staying = workers("abc")
        for number, reader in enumerate((leaving, staying)):
            reader.side.pull(source.ticket(str(number), (0, 1)), 0, [0, 1])
        await asyncio.sleep(LATENCY_S + BLOCK_NBYTES / RATE)
        leaving.side.close()
        await asyncio.sleep(1.0)
        assert not leaving.done
        ((_, done),) = staying.done
        assert done.seconds == pytest.approx(LATENCY_S + 2.5 * BLOCK_NBYTES / RATE)

    run(main())


def test_a_source_that_is_gone_and_blocks_that_were_used_again_are_errors() -> None:
    async def main() -> None:
        gone, changed, reader = workers("abc")
        reader.side.pull(gone.ticket("t", (0,)), 0, [0])
        reader.side.pull(changed.ticket("t", (0,)), 0, [1])
        gone.side.close()
        changed.reuse(0)
        await asyncio.sleep(1.0)
        errors = {done.error for _, done in reader.done}
        assert errors == {"worker a of epoch 1 is gone", "worker b used the blocks again"}

    run(main())
