"""A simulated transport: a pull takes the time of a transfer model and moves no bytes.

Otherwise it is as `kvtransfer`: the same checks before a pull, the same stamps after it, the same
notification to the source. A worker sends to one reader at a time and reads from one source at a
time, so transfers that share a network card wait for each other.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable

from disagg.kvtransfer.pulls import Pull, PullBook, describe
from disagg.kvtransfer.slab import Slab
from disagg.kvtransfer.stamps import Stamps
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.time_model import TransferTimeModel

TRANSPORT = "simulated"


class SimulatedNetwork:
    """All simulated transports by worker id, and the transfer model."""

    def __init__(self, loop: AbstractEventLoop, times: TransferTimeModel) -> None:
        self.loop = loop
        self.times = times
        self.sides: dict[str, SimulatedTransport] = {}


class SimulatedTransport:
    """One worker's side.

    Args:
        wake: called when `poll` has something to tell.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        worker_id: str,
        epoch: int,
        slab: Slab,
        stamps: Stamps,
        wake: Callable[[], None],
    ) -> None:
        self._peer = describe(worker_id, epoch, TRANSPORT, slab, stamps)
        self._network = network
        self._stamps = stamps
        self._wake = wake
        self._book = PullBook(slab, TRANSPORT)
        self._events: list[PullDone | TicketReleased] = []
        self._is_open = True
        self._sends_until_s = self._reads_until_s = 0.0
        network.sides[worker_id] = self

    @property
    def peer(self) -> Peer:
        return self._peer

    @property
    def is_pulling(self) -> bool:
        return self._book.num_blocks_filling > 0

    def add_peer(self, peer: Peer) -> None:
        if peer.worker_id != self._peer.worker_id:
            self._book.add_peer(peer)

    def pull(self, ticket: KVTicket, first_block: int, into: list[int]) -> int:
        loop = self._network.loop
        pull = self._book.begin(ticket, first_block, into, loop.time())
        source = self._side(pull.peer)
        begins_s = max(loop.time(), self._reads_until_s)
        if source is not None:
            begins_s = max(begins_s, source._sends_until_s)
        ends_s = begins_s + self._network.times.transfer_s(ticket.source_id, pull.nbytes)
        self._reads_until_s = ends_s
        if source is not None:
            source._sends_until_s = ends_s
        loop.call_at(ends_s, self._end, pull)
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

    def _end(self, pull: Pull) -> None:
        if not self._is_open:
            return
        self._book.end(pull)
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
        self._tell(PullDone(pull.pull_id, error, pull.num_blocks, pull.nbytes, seconds))

    def _side(self, peer: Peer) -> SimulatedTransport | None:
        """The open side that `peer` describes."""
        side = self._network.sides.get(peer.worker_id)
        return side if side is not None and side.peer.epoch == peer.epoch else None

    def _notify(self, peer: Peer, ticket_id: str) -> None:
        source = self._side(peer)
        if source is not None:
            source._tell(TicketReleased(ticket_id))

    def _tell(self, event: PullDone | TicketReleased) -> None:
        self._events.append(event)
        self._wake()
