"""KV that comes ahead of the request that it belongs to, while the rest of the prompt is computed.

An early ticket names full blocks only. They are pulled into the cache under their names, so that
the request, once its last ticket is there, skips them as it skips whatever else is here. Nobody
waits for an early pull but its own request: without room it is not made, and whatever goes wrong
gives its blocks back. Knows nothing of links or models. Owned by the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disagg.blocks import BlockHash
from disagg.decode_worker.arrivals import TransferTimes, patience_s
from disagg.engine.engine import Engine
from disagg.errors import TransferFailed
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone, Transport

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Prefetch:
    ticket: KVTicket
    block_hashes: tuple[BlockHash, ...]  # of the blocks of the ticket
    held: list[int]  # leading blocks that were here already
    pulled: list[int]  # blocks that the transport fills
    patient_until_s: float


class Prefetches:
    """Pulls for which no sequence is here yet.

    Args:
        transfer_times: predictions as of now.
    """

    def __init__(self, engine: Engine, transport: Transport, transfer_times: TransferTimes) -> None:
        self._engine = engine
        self._transport = transport
        self._transfer_times = transfer_times
        self._pulling: dict[int, _Prefetch] = {}  # by pull id

    @property
    def is_pulling(self) -> bool:
        return bool(self._pulling)

    def begin(self, ticket: KVTicket, block_hashes: Sequence[BlockHash], now: float) -> None:
        """Pull what is not here of the blocks that `block_hashes` name, if there is room.

        Tickets of a prompt name all of its blocks so far: one that comes while the pull of an
        earlier one is under way can be left out.
        """
        pool, num_blocks = self._engine.pool, len(ticket.block_ids)
        names = tuple(block_hashes[:num_blocks])
        is_sound = (
            0 < num_blocks == len(names) and ticket.num_tokens == num_blocks * pool.block_size
        )
        caches = self._engine.scheduler.enable_prefix_caching
        if not is_sound or not caches or self.is_coming(names, now):
            return
        held = pool.match(names)
        if len(held) == num_blocks:
            return
        pool.acquire(held)  # before reserving, which might evict them
        pulled = self._engine.reserve(num_blocks - len(held))
        if pulled is None:
            pool.release(held)
            return
        try:
            pull_id = self._transport.pull(ticket, len(held), pulled)
        except Exception as error:  # whatever the ticket says harms nobody else
            if not isinstance(error, TransferFailed):
                log.exception("The early pull of %s could not begin.", ticket.ticket_id)
            pool.release([*held, *pulled])
            return
        until_s = now + patience_s(self._transfer_times(ticket.source_id, len(pulled)))
        self._pulling[pull_id] = _Prefetch(ticket, names, held, pulled, until_s)

    def finish(self, done: PullDone) -> KVTicket | None:
        """A pull ended: its blocks can be found from here on. None: it was not one of these."""
        prefetch = self._pulling.pop(done.pull_id, None)
        if prefetch is None:
            return None
        pool = self._engine.pool
        if done.error is None:
            names = prefetch.block_hashes[len(prefetch.held) :]
            for block_id, name in zip(prefetch.pulled, names, strict=True):
                pool.publish(block_id, name)
        pool.release([*prefetch.held, *prefetch.pulled])
        return prefetch.ticket

    def is_coming(self, block_hashes: Sequence[BlockHash], now: float) -> bool:
        """Whether blocks of a prompt with these names are being pulled, and soon here."""
        for each in self._pulling.values():
            last = len(each.block_hashes) - 1  # whose name stands for all before it
            if (
                now < each.patient_until_s
                and tuple(block_hashes[last : last + 1]) == each.block_hashes[-1:]
            ):
                return True
        return False

    def holders(self) -> Iterable[list[int]]:
        """Blocks held by these pulls, for `Engine.check`."""
        return ([*each.held, *each.pulled] for each in self._pulling.values())
