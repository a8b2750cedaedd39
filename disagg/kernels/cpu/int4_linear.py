"""Matrix products with 4-bit weights: numbers from 0 to 15, a scale and a least value per group.

A group is some neighbouring numbers of a row. A compiled product (`csrc/int4.h`) reads the numbers
for prompts and decode steps; it multiplies in the activations' bfloat16 and sums in float32.
Without it torch widens the weight for each product, some rows at a time.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu.int4_groups import GROUP, num_groups
from disagg.kernels.cpu.linear import PlainLinear
from disagg.kernels.cpu.matrix import PANEL, CpuMatrix
from disagg.kernels.cpu.narrow_rows import narrow_rows
from disagg.kernels.packed_matrix import PackedMatrix

LARGEST = 15
UNIT = 8  # numbers of a row that are contiguous in a panel
_ROWS_AT_ONCE = 1024  # rows that are quantised or widened together: few enough for the cache
_EVEN_ODD = 2


class Int4Linear(PlainLinear):
    """Computes x W^T + b with W = numbers * scales + least, where each group has its own scale.

    Attributes:
        numbers: uint8 [num_out, num_in / 2], two numbers per byte, the first in its lower half (an
            odd row is padded); or in panels, as `csrc/int4.h` reads them:
            [num_panels, num_in / 8, PANEL / 16, 64].
        scales: [num_out, num_groups, 2], scales and least values, of the weight's dtype; in panels
            [num_panels, num_groups, 2, PANEL].
        group: number of neighbouring numbers that share a scale.
        bias: [num_out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_out, self.num_in = weight.shape
        self.numbers, self.scales = quantize(weight)
        self.group, self.bias = GROUP, bias
        self._library: ctypes.CDLL | None = None

    @classmethod
    def of_packed(cls, matrix: PackedMatrix, bias: Tensor | None, dtype: torch.dtype) -> Int4Linear:
        """Make it from the 4-bit numbers of a packed matrix; scales are rounded to `dtype`."""
        made = cls.__new__(cls)
        made.num_out, made.num_in = matrix.shape
        made.numbers, made.scales = _of_packed(matrix, dtype)
        made.group, made.bias = matrix.group or matrix.num_in, bias
        made._library = None
        return made

    def __call__(self, x: Tensor) -> Tensor:
        if self._library is not None and x.dtype == torch.bfloat16:
            return narrow_rows(self._library, self.described(), x)
        parts = torch.split(torch.arange(self.num_out), _ROWS_AT_ONCE)
        made = torch.cat([functional.linear(x, self.rows(part).to(x.dtype)) for part in parts], 1)
        return made if self.bias is None else made.add_(self.bias)

    @property
    def num_panels(self) -> int:
        return -(-self.num_out // PANEL)

    @property
    def can_be_in_panels(self) -> bool:
        return self.num_in % UNIT == 0

    @property
    def panels_nbytes(self) -> int:
        return self.num_panels * PANEL * self.num_in // 2

    def lay_in_panels(self, memory: Tensor, library: ctypes.CDLL) -> None:
        """Lay the numbers in panels, for the compiled step and for compiled products.

        Args:
            memory: uint8 [panels_nbytes], which will hold the panels.
            library: the one that `library.find_step` loaded.
        """
        assert not self._is_in_panels and self.can_be_in_panels
        unpacked = _unpacked(self.numbers, self.num_in)
        filled = functional.pad(unpacked, (0, 0, 0, -self.num_out % PANEL))
        # Dimensions of a panel: vectors, columns, units, pairs in a unit, and the two of a pair.
        units = filled.view(self.num_panels, PANEL // 16, 16, -1, UNIT // 2, _EVEN_ODD)
        words = torch.zeros(*units.shape[:4], _EVEN_ODD, dtype=torch.int16)
        for pair in range(UNIT // 2):
            words |= units[:, :, :, :, pair].to(torch.int16) << (4 * pair)
        panels = memory.view(torch.int16).view(self.num_panels, -1, PANEL // 16, 16, _EVEN_ODD)
        panels.copy_(words.permute(0, 3, 1, 2, 4))
        scales = functional.pad(self.scales, (0, 0, 0, 0, 0, -self.num_out % PANEL))
        scales = scales.view(self.num_panels, PANEL, -1, 2).permute(0, 2, 3, 1).contiguous()
        self.numbers, self.scales = panels.view(torch.uint8).flatten(3), scales
        self._library = library

    def described(self) -> CpuMatrix:
        """The structure in which compiled code reads this weight."""
        assert self._is_in_panels
        return CpuMatrix(
            nibbles=self.numbers.data_ptr(),
            scales=self.scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_out=self.num_out,
            num_in=self.num_in,
            group_size=self.group,
        )

    def widened(self) -> Tensor:
        """W: [num_out, num_in]."""
        return self.rows(torch.arange(self.num_out))

    def rows(self, which: Tensor) -> Tensor:
        """Some rows of W: [n, num_in]."""
        if self._is_in_panels:
            panel, column = which // PANEL, which % PANEL
            words = self.numbers.view(torch.int16).view(*self.numbers.shape[:3], 16, _EVEN_ODD)
            own = words[panel, :, column // 16, column % 16]  # [n, units, 2]
            pairs = [own >> (4 * pair) & LARGEST for pair in range(UNIT // 2)]
            numbers = torch.stack(pairs, 2).flatten(1)
            scales, least = self.scales[panel, :, :, column].unbind(2)
        else:
            numbers = _unpacked(self.numbers[which], self.num_in)
            scales, least = self.scales[which].unbind(2)
        filled = functional.pad(numbers, (0, -self.num_in % self.group))
        groups = filled.view(-1, scales.shape[1], self.group).float()
        # Rounded once, as in compiled code.
        groups.mul_(scales.float().unsqueeze(2)).add_(least.float().unsqueeze(2))
        return groups.to(self.scales.dtype).flatten(1)[:, : self.num_in].contiguous()

    @property
    def _is_in_panels(self) -> bool:
        return self.numbers.dim() == 4


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers and scales of `Int4Linear`.

    In each group the least value becomes 0 and the largest 15.
    """
    num_out, num_in = weight.shape
    count = num_groups(num_in)
    numbers = torch.empty(num_out, -(-num_in // 2), dtype=torch.uint8)
    scales = torch.empty(num_out, count, 2, dtype=weight.dtype)
    parts = (torch.split(each, _ROWS_AT_ONCE) for each in (weight, numbers, scales))
    for some, its_numbers, its_scales in zip(*parts, strict=True):
        # The last group may be shorter; it is padded with one of its own numbers.
        wide = functional.pad(some.float(), (0, count * GROUP - num_in), mode="replicate")
        groups = wide.view(-1, count, GROUP)
        least, most = torch.aminmax(groups, dim=2)
        its_scales[:, :, 0] = (most - least) / LARGEST
        its_scales[:, :, 1] = least
        its_scales[:, :, 0].masked_fill_(its_scales[:, :, 0] == 0, 1.0)  # all numbers are equal
        # Divide by the scales as they are kept, with fewer digits.
        step, first = its_scales.float().unbind(2)
        scaled = (groups - first.unsqueeze(2)) / step.unsqueeze(2)
        rounded = (
            scaled.round_().clamp_(0, LARGEST).to(torch.uint8).flatten(1)[:, : num_in + num_in % 2]
        )
        its_numbers.copy_(rounded[:, 0::2] | rounded[:, 1::2] << 4)
    return numbers, scales


def _of_packed(matrix: PackedMatrix, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers and scales of `Int4Linear`, from a packed matrix.

    A scale that loses digits in `dtype` shifts all values of a group in one direction. The least
    value corrects that, so that the values of a group are off in both directions.
    """
    num_out, num_in = matrix.shape
    count, group = matrix.scales.shape[0], matrix.group or num_in
    numbers = torch.empty(num_out, -(-num_in // 2), dtype=torch.uint8)
    scales = torch.empty(num_out, count, 2, dtype=dtype)
    exact, least = matrix.scales.float().T, matrix.least_values().T
    sizes = torch.full((count,), group).index_fill_(
        0, torch.tensor(count - 1), num_in - (count - 1) * group
    )
    for first in range(0, num_out, _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        some = matrix.rows(first, min(first + _ROWS_AT_ONCE, num_out)).numbers().add_(8)
        filled = functional.pad(some, (0, count * group - num_in))
        means = filled.view(-1, count, group).sum(2, dtype=torch.float32) / sizes
        kept = scales[rows, :, 0].copy_(exact[rows])
        scales[rows, :, 1] = least[rows] + means * (exact[rows] - kept.float())
        pairs = functional.pad(some, (0, num_in % 2)).view(torch.uint8)
        numbers[rows] = pairs[:, 0::2] | pairs[:, 1::2] << 4
    return numbers, scales


def _unpacked(numbers: Tensor, num_in: int) -> Tensor:
    """Unpack uint8 [n, num_in / 2], two numbers per byte, to uint8 [n, num_in]."""
    return torch.stack((numbers & LARGEST, numbers >> 4), 2).flatten(1)[:, :num_in]
