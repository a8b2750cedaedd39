"""The attention work of short prompts, drafts and decodes in buffers of fixed shape, for graphs.

As `fixed_work` for decodes: the buffers have the size of the worst case, a piece without queries
ends at once, and tokens without a sequence have pieces without keys, which write zeros. Sequences
with few queries are split along their keys, the others along their queries, in two launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from disagg.kernels.attention_work import AttentionPiece, split_keys, split_queries
from disagg.kernels.launcher import next_power_of_2
from disagg.kernels.paged_work import (
    KEY_TILE,
    LONG_ROWS,
    MAX_SHORT_ROWS,
    Launch,
    PagedWork,
)

MAX_SHORT_QUERIES = 8  # a draft of seven, and the token before it
_NO_PIECE = (0, 0, 0, 0, 0, -1)
_NO_REDUCTION = (0, 0, 0, 0)


class FixedMixedWork:
    """Pieces of steps of up to `num_tokens` tokens of up to `num_seqs` sequences, over one window.

    Args:
        group: query heads per KV head.
        num_programs: pieces per KV head that fill the device.
    """

    def __init__(
        self,
        num_seqs: int,
        num_tokens: int,
        group: int,
        window: int | None,
        num_programs: int,
        device: torch.device,
    ) -> None:
        self._num_programs = num_programs
        self._short_queries = max(1, min(MAX_SHORT_QUERIES, MAX_SHORT_ROWS // group))
        self._num_seqs, self._num_tokens = num_seqs, num_tokens
        long_rows = max(LONG_ROWS, next_power_of_2(group))
        self._queries_per_piece = long_rows // group
        self._num_short = num_seqs + num_programs
        self._num_reductions = min(num_seqs, num_programs)  # as in `fixed_work`
        # Each sequence ends with a piece that may be shorter, and so do the tokens of nobody.
        num_long_seqs = min(num_seqs, num_tokens // (self._short_queries + 1))
        self._num_long = num_tokens // self._queries_per_piece + num_long_seqs + 1
        ends = [6 * self._num_short]
        ends.append(ends[-1] + 4 * self._num_reductions)
        ends.append(ends[-1] + 6 * self._num_long)
        self._numbers = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        short = Launch(
            pieces=self._numbers[: ends[0]].view(-1, 6),
            reductions=self._numbers[ends[0] : ends[1]].view(-1, 4),
            num_partials=self._num_reductions + num_programs,
            rows=max(16, next_power_of_2(self._short_queries * group)),
            num_merged_rows=self._short_queries * group,
        )
        long = Launch(
            pieces=self._numbers[ends[1] :].view(-1, 6),
            reductions=self._numbers[:0].view(-1, 4),
            num_partials=0,
            rows=long_rows,
            num_merged_rows=0,
        )
        self.work = PagedWork((short, long), window)
        self.fill((), ())

    def fill(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> None:
        """Cut the next step, of its sequences in order.

        Tokens that are left belong to one sequence more, and get zeros.
        """
        if len(query_lens) > self._num_seqs or sum(query_lens) > self._num_tokens:
            raise ValueError(f"{query_lens} are more than {self._num_tokens} tokens")
        rows = [*zip(range(len(query_lens)), query_lens, context_lens, strict=True)]
        window = self.work.window
        short = [row for row in rows if row[1] <= self._short_queries]
        long = [row for row in rows if row[1] > self._short_queries]
        pieces, reductions = split_keys(short, window, KEY_TILE, self._num_programs)
        numbers = _filled_up(
            ((p.sequence, p.first_query, p.num_queries, p.start, p.end, p.partial) for p in pieces),
            _NO_PIECE,
            self._num_short,
        )
        numbers += _filled_up(
            ((r.sequence, r.first_partial, r.num_partials, r.num_queries) for r in reductions),
            _NO_REDUCTION,
            self._num_reductions,
        )
        pieces = split_queries(long, window, KEY_TILE, self._queries_per_piece)
        num_idle = self._num_tokens - sum(query_lens)
        for first in range(0, num_idle, self._queries_per_piece):
            count = min(self._queries_per_piece, num_idle - first)
            pieces.append(AttentionPiece(len(rows), first, count, 0, 0, -1))
        numbers += _filled_up(
            ((p.sequence, p.first_query, p.num_queries, p.start, p.end, p.partial) for p in pieces),
            _NO_PIECE,
            self._num_long,
        )
        uploaded = torch.tensor(numbers, dtype=torch.int32)
        if self._numbers.device.type == "cuda":
            uploaded = uploaded.pin_memory()
        self._numbers.copy_(uploaded, non_blocking=True)


def _filled_up(rows: Iterable[tuple[int, ...]], empty: tuple[int, ...], num_rows: int) -> list[int]:
    numbers = [number for row in rows for number in row]
    return numbers + list(empty) * (num_rows - len(numbers) // len(empty))
