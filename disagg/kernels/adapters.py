"""LoRA in a step: the tables of adapters, which rows of a step have which, and the torch twin.

out += B (A x), with another A and B for each row: those of the row's adapter, or none. The sums
over the columns of A ("shrink") are kept in float32, rounded once to the type of the activations,
and multiplied with B ("expand"); the result is added to `out` in float32 and rounded once.

Sources: LoRA (arXiv 2106.09685); grouped by adapter as in Punica (arXiv 2310.18547) and S-LoRA
(arXiv 2311.03285).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

NO_ADAPTER = -1
_FEW_SLOTS, _MOST_SINGLE_ROWS = 16, 64  # measured with `bench.lora`


@dataclass(frozen=True)
class AdaptedMatrix:
    """The A and B of all slots for one matrix, whose outputs may be several that are stacked.

    Attributes:
        a: [num_slots, num_outputs * rank, in]: that of each output, one after the other.
        b: [num_slots, out, rank]; the rows of an output are multiplied with its own A.
        bounds: the first row of each output, and the end.
        rank: of all slots; smaller adapters are padded with zeros.
        ranks: the largest rank of an output of each slot's adapter.
    """

    a: Tensor
    b: Tensor
    bounds: tuple[int, ...]
    rank: int
    ranks: list[int]

    @classmethod
    def empty(
        cls,
        num_slots: int,
        rank: int,
        nums_out: Sequence[int],
        num_in: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdaptedMatrix:
        """Tables of adapters that change nothing."""
        bounds = [0]
        for num_out in nums_out:
            bounds.append(bounds[-1] + num_out)
        shape_a = num_slots, len(nums_out) * rank, num_in
        a = torch.zeros(shape_a, dtype=dtype, device=device)
        b = torch.zeros((num_slots, bounds[-1], rank), dtype=dtype, device=device)
        return cls(a, b, tuple(bounds), rank, [0] * num_slots)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def clear(self, slot: int) -> None:
        """Make the slot's adapter one that changes nothing: with B = 0, whatever A is."""
        self.b[slot].zero_()
        self.ranks[slot] = 0

    def of(self, slot: int, index: int) -> tuple[Tensor, Tensor]:
        """A and B of one output in a slot, without what is padded."""
        begin, num = index * self.rank, self.ranks[slot]
        first, end = self.bounds[index : index + 2]
        return self.a[slot, begin : begin + num], self.b[slot, first:end, :num]

    def write(self, slot: int, index: int, a: Tensor, b: Tensor) -> None:
        """Write the matrices of one output, [r, in] and [out, r], into a slot that was cleared."""
        first, end = self.bounds[index : index + 2]
        num = a.shape[0]
        self.ranks[slot] = max(self.ranks[slot], num)
        rows = self.a[slot, index * self.rank : (index + 1) * self.rank]
        rows[:num].copy_(a, non_blocking=True)
        rows[num:].zero_()
        self.b[slot, first:end, :num].copy_(b, non_blocking=True)


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a step with an adapter, for `adapt_rows_`.

    groups: the slot, and int64 [num_rows]: its rows; None: all rows of the step.
    singly: int64 [num_rows]: rows, and the slot of each. They are computed one by one, because
        there are few and they have many adapters; otherwise starting the calls would take longer.
    """

    groups: tuple[tuple[int, Tensor | None], ...] = ()
    singly: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, adapters: Tensor) -> AdapterRows:
        """adapters: integers [num_rows]: the slot of each row, or `NO_ADAPTER`. Reads them."""
        slots = sorted(set(adapters.tolist()))
        if len(slots) == 1 and slots[0] != NO_ADAPTER:
            return cls(((slots[0], None),))
        if len(slots) > _FEW_SLOTS and adapters.shape[0] <= _MOST_SINGLE_ROWS:
            own = (adapters >= 0).nonzero()[:, 0]
            return cls(singly=(own, adapters[own]))
        return cls(tuple((slot, (adapters == slot).nonzero()[:, 0]) for slot in slots if slot >= 0))


def adapt_rows_(out: Tensor, x: Tensor, matrix: AdaptedMatrix, rows: AdapterRows) -> Tensor:
    """Add what the rows' adapters make of `x` to `out`, in torch. Returns `out`.

    Args:
        out: [num_rows, out].
        x: [num_rows, in].
    """
    for slot, own in rows.groups:
        of_group = x if own is None else x[own]
        for output, (first, end) in enumerate(pairwise(matrix.bounds)):
            a, b = matrix.of(slot, output)
            shrunk, columns = of_group @ a.t(), out[:, first:end]
            if own is None:
                columns.addmm_(shrunk, b.t())
            else:  # rounded as above
                columns.index_copy_(0, own, torch.addmm(columns[own], shrunk, b.t()))
    if rows.singly is not None:
        own, slots = rows.singly
        shrunk = torch.bmm(matrix.a[slots], x[own].unsqueeze(2))
        b, before = matrix.b[slots], out[own].unsqueeze(2)
        of_outputs = shrunk.view(own.shape[0], -1, matrix.rank, 1).unbind(1)
        parts = [
            torch.baddbmm(before[:, first:end], b[:, first:end], y)
            for (first, end), y in zip(pairwise(matrix.bounds), of_outputs, strict=True)
        ]
        out.index_copy_(0, own, torch.cat(parts, 1).squeeze(2))
    return out
