"""The transport interface: register a slab, pull blocks into it, be notified of used tickets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from disagg.kvtransfer.ticket import KVTicket, Peer


@dataclass(frozen=True, slots=True)
class PullDone:
    """A pull ended. `error` is None when every block arrived and every stamp was unchanged.

    After this event the transport does not touch the destination blocks any more.

    lane: UCX's transport ("cma", "cuda_ipc", "rc_mlx5", "tcp", ...); "" if not known.
    is_torn: the error is that a stamp was changed.
    """

    pull_id: int
    error: str | None
    num_blocks: int
    nbytes: int
    seconds: float
    lane: str = ""
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class TicketReleased:
    """A reader does not need the blocks of `ticket_id` any more: it has them, or gave up."""

    ticket_id: str


class Transport(Protocol):
    """Owned by one engine thread; no method blocks for longer than it takes to post work."""

    @property
    def peer(self) -> Peer:
        """The record by which other workers reach this worker's slab."""
        ...

    def add_peer(self, peer: Peer) -> bool:
        """Add `peer`. A new epoch of a known worker replaces the old one. Returns whether it was
        not known.

        The handshake runs in the background; if it fails, pulls from the peer end with an error.
        The worker's own peer is ignored, because membership lists have all workers.

        Raises:
            TransferFailed: layouts differ (the message names both), or numbers that cannot be.
        """
        ...

    def forget_peer(self, worker_id: str) -> None:
        """Drop a peer that has left, and the connections to it once no pull uses them. Pulls from
        it are refused until it is added again."""
        ...

    def pull(
        self, ticket: KVTicket, first_block: int, into: list[int], *, releases: bool = True
    ) -> int:
        """Start copying `ticket.block_ids[first_block:]` into the local blocks `into`.

        Returns a pull id that a later `poll` reports exactly once. Until then the blocks `into`
        belong to the transport, even if the source hangs; to compute meanwhile, use other blocks.
        The end of a pull, successful or not, releases the ticket at the source, unless `releases`
        is False: then the source is not told.

        Raises:
            TransferFailed: unknown peer, wrong epoch, layout or block id; nothing was started.
        """
        ...

    def release(self, ticket: KVTicket) -> None:
        """Tell the source that its blocks are not needed. Lost messages only cost memory there."""
        ...

    def poll(self) -> list[PullDone | TicketReleased]:
        """The events since the last call."""
        ...

    def close(self) -> None: ...
