"""The interfaces `KVSource` and `KVTier` of KV import, and the source for a peer's ticket."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from disagg.blocks import BlockHash
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import Transport

# If a source freezes, a transfer from it may hang. A pull may take this many seconds, plus this
# many times the predicted time of the pull.
PULL_PATIENCE_S = 3.0
PULL_FACTOR = 4.0

TransferTimes = Callable[[str, int], float]  # (source id, blocks) -> seconds


class KVSource(Protocol):
    """The KV of one import. Blocks are counted from the prompt's first; no method waits.

    names: hashes of the full blocks that it may have.
    num_tokens: tokens with KV in its blocks, of which the last may be partial. The source keeps
        them for this sequence, which may wait for free blocks. 0: full blocks for any sequence.
    answer_s: how long `find` may return None.
    """

    names: SequenceOf[BlockHash]
    num_tokens: int
    answer_s: float

    def find(self, first_block: int) -> int | None:
        """How many blocks it has from `first_block` on; None: not known yet."""
        ...

    def patience_s(self, num_blocks: int) -> float:
        """Seconds that a transfer of so many blocks may take before it is given up."""
        ...

    def begin(self, first_block: int, into: list[int]) -> Hashable | None:
        """Start writing blocks. Returns the key that reports the end; None: it has ended already.

        Raises:
            TransferFailed: nothing was started.
        """
        ...

    def drop(self) -> None:
        """Release the source: it will not be used."""
        ...


class KVTier(Protocol):
    """A tier behind the cache that stores blocks by hash. No method waits.

    num_under_way: copies in progress; poll often while there are any.
    """

    @property
    def num_under_way(self) -> int: ...

    def ask(
        self, names: SequenceOf[BlockHash], num_here: int, compute_s: Callable[[int], float]
    ) -> KVSource | None:
        """A source for blocks `names[num_here:]`; None: it has none, or computing is faster.

        Args:
            compute_s: predicted seconds to compute the first n of them; any thread may call it.
        """
        ...

    def poll(self) -> Iterable[tuple[Hashable, str | None]]:
        """Keys of the transfers that ended since the last call, each with its error or None."""
        ...


@dataclass(slots=True, eq=False)
class TicketSource:
    """Blocks in another worker's cache."""

    ticket: KVTicket
    names: SequenceOf[BlockHash]
    transport: Transport
    transfer_times: TransferTimes
    traceparent: str
    is_early: bool = False  # nothing is held for it
    answer_s: float = math.inf
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.ticket.num_tokens

    def find(self, first_block: int) -> int:
        return len(self.ticket.block_ids) - first_block

    def patience_s(self, num_blocks: int) -> float:
        predicted_s = self.transfer_times(self.ticket.source_id, num_blocks)
        return PULL_PATIENCE_S + PULL_FACTOR * predicted_s

    def begin(self, first_block: int, into: list[int]) -> int:
        # The end of the pull releases the ticket at the source. Nothing is held for an early one.
        return self.transport.pull(self.ticket, first_block, into, releases=not self.is_early)

    def drop(self) -> None:
        if not self.is_early:
            self.transport.release(self.ticket)
