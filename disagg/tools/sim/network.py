"""A simulated transport: a pull takes a latency and its share of two network cards; no bytes move.

Otherwise it works like `kvtransfer`: it has the same checks before a pull, the same stamps after
it, and the same notification to the source. Each worker has a network card. As with NIXL, all its
pulls run at the same time and share the bandwidth of their cards (`shared_bandwidth`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from disagg.kvtransfer.pulls import Pull, PullBook, describe
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.tools.sim.shared_bandwidth import Port, Transfer
from disagg.tools.sim.virtual_time import VirtualLoop

TRANSPORT = "simulated"


class SimulatedNetwork:
    """All simulated transports by worker id.

    Args:
        latency_s: time from the start of a pull to its first byte.
        bytes_per_s: rate of each worker's card in each direction.
    """

    def __init__(self, loop: VirtualLoop, latency_s: float, bytes_per_s: float) -> None:
        self.loop = loop
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.sides: dict[str, SimulatedTransport] = {}


class SimulatedTransport:
    """One worker's side of the network.

    Args:
        wake: called when `poll` will return something.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        slab: Slab,
        stamps: Stamps,
        wake: Callable[[], None],
    ) -> None:
        self._peer = describe(TRANSPORT, slab, stamps)
        self._network = network
        self._stamps = stamps
        self._wake = wake
        self._book = PullBook(slab, TRANSPORT)
        self._events: list[PullDone | TicketReleased] = []
        self._is_open = True
        self._sends = Port(network.bytes_per_s)
        self._reads = Port(network.bytes_per_s)
        network.sides[self._peer.worker_id] = self

    @property
    def peer(self) -> Peer:
        return self._peer

    @property
    def is_pulling(self) -> bool:
        return self._book.num_blocks_filling > 0

    def add_peer(self, peer: Peer) -> bool:
        return peer.worker_id != self._peer.worker_id and self._book.add_peer(peer).is_new

    def forget_peer(self, worker_id: str) -> None:
        self._book.forget_peer(worker_id)

    def pull(
        self, ticket: KVTicket, first_block: int, into: list[int], *, releases: bool = True
    ) -> int:
        loop = self._network.loop
        pull = self._book.begin(ticket, first_block, into, loop.time(), releases)
        loop.call_later(self._network.latency_s, self._begin, pull)
        return pull.pull_id

    def release(self, ticket: KVTicket) -> None:
        self._book.mark_used(ticket)
        peer = self._book.peer_of(ticket)
        if peer is not None:
            self._notify(peer, ticket.ticket_id)

    def poll(self) -> list[PullDone | TicketReleased]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._is_open = False
        if self._network.sides.get(self._peer.worker_id) is self:
            del self._network.sides[self._peer.worker_id]
        for transfer in list(self._reads.transfers):
            transfer.cancel()

    def _begin(self, pull: Pull) -> None:
        if not self._is_open:
            return
        source = self._side(pull.peer)
        ports = (self._reads,) if source is None else (self._reads, source._sends)
        Transfer(self._network.loop, pull.nbytes, ports, partial(self._end, pull))

    def _end(self, pull: Pull) -> None:
        self._book.end(pull)
        if pull.releases:
            self._notify(pull.peer, pull.ticket.ticket_id)
        source = self._side(pull.peer)
        error = None
        if source is None:
            error = f"worker {pull.peer.worker_id} of epoch {pull.peer.epoch} is gone"
        else:
            first = len(pull.ticket.block_ids) - pull.num_blocks
            if source._stamps.of(pull.ticket.block_ids[first:]) != pull.generations:
                error = f"worker {pull.peer.worker_id} used the blocks again"
        seconds = self._network.loop.time() - pull.started_at
        self._add_event(PullDone(pull.pull_id, error, pull.num_blocks, pull.nbytes, seconds))

    def _side(self, peer: Peer) -> SimulatedTransport | None:
        """The open transport that `peer` describes; None if it is closed or has another epoch."""
        side = self._network.sides.get(peer.worker_id)
        return side if side is not None and side.peer.epoch == peer.epoch else None

    def _notify(self, peer: Peer, ticket_id: str) -> None:
        source = self._side(peer)
        if source is not None:
            source._add_event(TicketReleased(ticket_id))

    def _add_event(self, event: PullDone | TicketReleased) -> None:
        self._events.append(event)
        self._wake()
