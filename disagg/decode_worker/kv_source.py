"""What every source of KV is to `kv_import`, and the source that is another worker's cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from disagg.blocks import BlockHash
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import Transport

# A source that freezes may let a transfer hang with it. A pull may take so long, and so many times
# what pulls from that source are predicted to take.
PULL_PATIENCE_S = 3.0
PULL_FACTOR = 4.0

TransferTimes = Callable[[str, int], float]  # (source id, blocks) -> seconds


class KVSource(Protocol):
    """Where the KV of one import is. Blocks are counted from the prompt's first; nothing waits.

    names: of the full blocks up to which it may bring KV.
    num_tokens: how many have their KV in its blocks, the last of which may not be full. The source
        keeps them for this sequence, which waits for room. 0: full blocks, which others may find.
    answer_s: how long to wait until `find` knows.
    """

    names: SequenceOf[BlockHash]
    num_tokens: int
    answer_s: float

    def find(self, first_block: int) -> int | None:
        """How many blocks it can bring from there on; None: it does not know yet."""
        ...

    def patience_s(self, num_blocks: int) -> float:
        """How long so many blocks may take to move."""
        ...

    def begin(self, first_block: int, into: list[int]) -> Hashable | None:
        """Start to write blocks. Returns what names this move at its end; None: it has ended.

        Raises:
            TransferFailed: nothing was started.
        """
        ...

    def drop(self) -> None:
        """It will not be begun."""
        ...


class KVTier(Protocol):
    """A place behind the cache where blocks are by name. No method waits.

    num_under_way: copies whose ends `poll` should see soon.
    """

    @property
    def num_under_way(self) -> int: ...

    def ask(
        self, names: SequenceOf[BlockHash], num_here: int, compute_s: Callable[[int], float]
    ) -> KVSource | None:
        """A source of blocks `names[num_here:]`; None: it has none, or computing is quicker.

        Args:
            compute_s: what computing the first so many of them would take; any thread may call it.
        """
        ...

    def poll(self) -> Iterable[tuple[Hashable, str | None]]:
        """Moves that have ended since the last call, and why one failed."""
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
        return self.transport.pull(self.ticket, first_block, into)  # its end releases the ticket

    def drop(self) -> None:
        if not self.is_early:
            self.transport.release(self.ticket)
