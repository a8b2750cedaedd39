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
from disagg.kvtransfer.transport import PullDone, Transport
from disagg.messages import Prefetch

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pull:
    asked: Prefetch
    names: Sequence[BlockHash]  # of the ticket's blocks
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
        self._pulling: dict[int, _Pull] = {}  # by pull id

    @property
    def is_pulling(self) -> bool:
        return bool(self._pulling)

    def begin(self, asked: Prefetch, now: float) -> None:
        """Pull what is not here of a ticket's blocks, if there is room.

        Tickets of a prompt name all of its blocks so far: one that comes while the pull of an
        earlier one is under way can be left out.
        """
        pool, ticket = self._engine.pool, asked.ticket
        num_blocks = len(ticket.block_ids)
        names = asked.block_hashes[:num_blocks]
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
        self._pulling[pull_id] = _Pull(asked, names, held, pulled, until_s)

    def finish(self, done: PullDone) -> Prefetch | None:
        """A pull ended: its blocks can be found from here on. None: it was not one of these."""
        pull = self._pulling.pop(done.pull_id, None)
        if pull is None:
            return None
        pool = self._engine.pool
        if done.error is None:
            for block_id, name in zip(pull.pulled, pull.names[len(pull.held) :], strict=True):
                pool.publish(block_id, name)
        pool.release([*pull.held, *pull.pulled])
        return pull.asked

    def is_coming(self, block_hashes: Sequence[BlockHash], now: float) -> bool:
        """Whether blocks of a prompt with these names are being pulled, and soon here."""
        for pull in self._pulling.values():
            last = len(pull.names) - 1  # whose name stands for all before it
            is_of_prompt = last < len(block_hashes) and block_hashes[last] == pull.names[last]
            if is_of_prompt and now < pull.patient_until_s:
                return True
        return False

    def holders(self) -> Iterable[list[int]]:
        """Blocks held by these pulls, for `Engine.check`."""
        return ([*each.held, *each.pulled] for each in self._pulling.values())
