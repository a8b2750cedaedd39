"""The attention work of decode steps in buffers of one shape, for a captured graph to read.

A graph launches the grids that it was captured with, from the addresses that it saw then. So the
list of pieces has room for the worst case, and what a step does not need of it is empty: a piece
without queries and keys ends at once and writes nothing. A row without a sequence has a piece
without keys, which writes zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disagg.kernels.attention_work import AttentionPiece, Reduction, split_keys
from disagg.kernels.launcher import next_power_of_2
from disagg.kernels.paged_attention import KEY_TILE, Launch, PagedWork

_NO_PIECE = (0, 0, 0, 0, 0, -1)
_NO_REDUCTION = (0, 0, 0, 0)


class FixedWork:
    """Pieces of up to `num_seqs` sequences with one token each, over one window.

    Args:
        group: query heads per KV head.
        num_programs: pieces per KV head that fill the device.
    """

    def __init__(
        self,
        num_seqs: int,
        group: int,
        window: int | None,
        num_programs: int,
        device: torch.device,
    ) -> None:
        self._num_seqs = num_seqs
        self._num_programs = num_programs
        # Each sequence ends with a piece that may be shorter; all others have the common size, of
        # which `num_programs` make up the whole step. So at most that many sequences have one of
        # them and are cut.
        self._num_pieces = num_seqs + num_programs
        self._num_reductions = min(num_seqs, num_programs)
        num_first = 6 * self._num_pieces
        num_numbers = num_first + 4 * self._num_reductions
        self._numbers = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        launch = Launch(
            pieces=self._numbers[:num_first].view(-1, 6),
            reductions=self._numbers[num_first:].view(-1, 4),
            num_partials=self._num_reductions + num_programs,
            rows=max(16, next_power_of_2(group)),
            num_merged_rows=group,
        )
        self.work = PagedWork((launch,), window)
        self.fill(())

    def fill(self, context_lens: Sequence[int]) -> None:
        """Cut the next step: `context_lens` of at most `num_seqs` sequences, in order."""
        rows = [(sequence, 1, length) for sequence, length in enumerate(context_lens)]
        pieces, reductions = split_keys(rows, self.work.window, KEY_TILE, self._num_programs)
        pieces += [AttentionPiece(row, 0, 1, 0, 0, -1) for row in range(len(rows), self._num_seqs)]
        numbers = self._filled_up(pieces, reductions)
        uploaded = torch.tensor(numbers, dtype=torch.int32)
        if self._numbers.device.type == "cuda":
            uploaded = uploaded.pin_memory()
        self._numbers.copy_(uploaded, non_blocking=True)

    def _filled_up(self, pieces: list[AttentionPiece], reductions: list[Reduction]) -> list[int]:
        numbers: list[int] = []
        for p in pieces:
            numbers += (p.sequence, p.first_query, p.num_queries, p.start, p.end, p.partial)
        numbers += _NO_PIECE * (self._num_pieces - len(pieces))
        for r in reductions:
            numbers += (r.sequence, r.first_partial, r.num_partials, r.num_queries)
        numbers += _NO_REDUCTION * (self._num_reductions - len(reductions))
        return numbers
