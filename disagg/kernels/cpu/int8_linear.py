"""Matrix products with 8-bit weights: int8 numbers, and a scale per row or group of neighbours.

A step of few tokens takes as long as reading the weights, and 8-bit weights have half the bytes.
Products are computed in the activations' dtype: numbers are widened, which is exact, and sums are
multiplied by the scales.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu.linear import PlainLinear
from disagg.kernels.cpu.matrix import PANEL, CpuMatrix
from disagg.kernels.cpu.narrow_rows import FEW_ROWS as FEW_ROWS_COMPILED
from disagg.kernels.cpu.narrow_rows import narrow_rows
from disagg.kernels.packed_matrix import Largest, PackedMatrix

LARGEST = 127
_WHOLE = 32  # torch's product reads past the end of a row whose size is no multiple of 16
FEW_ROWS = 4  # with more rows, torch multiplies a widened weight faster than an int8 weight
_ROWS_AT_ONCE = 1024  # rows that are quantised together: few enough for the CPU's cache


class Int8Linear(PlainLinear):
    """Computes x W^T + b with W = numbers * scales, where each row or group has its own scale.

    Attributes:
        numbers: int8 [num_out, num_in]; or in panels, as `csrc/int8.h` reads them:
            [num_panels, num_in, PANEL], padded with zeros.
        scales: [num_out], of the weight's dtype; with groups [num_out, num_groups], in panels
            [num_panels, num_groups, PANEL].
        group: number of neighbouring numbers that share a scale; None: all of a row.
        bias: [num_out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, largest: Largest | None = None) -> None:
        self.numbers, self.scales = quantize(weight, largest)
        self.group: int | None = None
        self.bias = bias
        self.num_out, self.num_in = weight.shape
        self._library: ctypes.CDLL | None = None

    @classmethod
    def of_packed(cls, matrix: PackedMatrix, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear:
        """Make it from the 8-bit numbers of a packed matrix; scales are rounded to `dtype`."""
        made = cls.__new__(cls)
        made.num_out, made.num_in = matrix.shape
        made.numbers, made.group, made.bias = matrix.numbers(), matrix.group, bias
        scales = matrix.scales.to(dtype)
        made.scales = scales[0] if matrix.group is None else scales.T.contiguous()
        made._library = None
        return made

    def __call__(self, x: Tensor) -> Tensor:
        if self._library is not None and x.dtype == torch.bfloat16 and self._is_compiled(x):
            return narrow_rows(self._library, self.described(), x)
        if self.group is not None:
            made = functional.linear(x, self.widened())
        elif x.shape[0] <= FEW_ROWS and not self._is_in_panels and self.num_in % _WHOLE == 0:
            made = torch._weight_int8pack_mm(x, self.numbers, self.scales)
        elif x.dtype == torch.float16:  # sums of unscaled numbers would overflow
            made = functional.linear(x, self.widened())
        else:  # scale the results, which are fewer than the weights
            made = functional.linear(x, self._wide_numbers()).mul_(self.scales)
        return made if self.bias is None else made.add_(self.bias)

    def _is_compiled(self, x: Tensor) -> bool:
        """Whether compiled code multiplies. Without AMX, torch is faster unless rows are few."""
        assert self._library is not None
        return x.shape[0] <= FEW_ROWS_COMPILED or bool(self._library.disagg_step_has_tiles())

    @property
    def panels_nbytes(self) -> int:
        return -(-self.num_out // PANEL) * PANEL * self.num_in

    def lay_in_panels(self, memory: Tensor, library: ctypes.CDLL | None = None) -> None:
        """Lay the numbers in panels for the compiled step.

        Afterwards torch widens the weight for every product with many rows.

        Args:
            memory: int8 [panels_nbytes], which will hold the panels.
            library: the one that `library.find_step` loaded, for products with few rows; None:
                torch computes them too.
        """
        assert not self._is_in_panels
        filled = functional.pad(self.numbers, (0, 0, 0, -self.num_out % PANEL))
        panels = memory.view(-1, self.num_in, PANEL)
        self.numbers = panels.copy_(filled.view(-1, PANEL, self.num_in).transpose(1, 2))
        self._library = library
        if self.group is not None:
            scales = functional.pad(self.scales, (0, 0, 0, -self.num_out % PANEL))
            self.scales = scales.view(len(panels), PANEL, -1).transpose(1, 2).contiguous()

    def described(self) -> CpuMatrix:
        """The structure in which compiled code reads this weight."""
        assert self._is_in_panels
        return CpuMatrix(
            numbers=self.numbers.data_ptr(),
            scales=self.scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_out=self.num_out,
            num_in=self.num_in,
            group_size=self.group or 0,
        )

    def widened(self) -> Tensor:
        """W: [num_out, num_in]."""
        if self.group is None:
            return self._wide_numbers() * self.scales.unsqueeze(1)
        scales = self.scales
        if self._is_in_panels:
            scales = scales.transpose(1, 2).flatten(0, 1)[: self.num_out]
        return self._scaled(self._wide_numbers(), scales)

    def _wide_numbers(self) -> Tensor:
        numbers = self.numbers
        if self._is_in_panels:
            numbers = numbers.transpose(1, 2).reshape(-1, self.num_in)[: self.num_out]
        return numbers.to(self.scales.dtype)

    def _scaled(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """Float numbers [n, num_in] times the scales of their groups. Overwrites the numbers."""
        assert self.group is not None
        num_whole = self.num_in // self.group * self.group
        whole, rest = numbers[:, :num_whole], numbers[:, num_whole:]
        whole.view(len(numbers), -1, self.group).mul_(scales[:, : num_whole // self.group, None])
        rest.mul_(scales[:, -1:])
        return numbers

    def rows(self, which: Tensor) -> Tensor:
        """Some rows of W: [n, num_in]."""
        if self._is_in_panels:
            numbers = self.numbers[which // PANEL, :, which % PANEL].to(self.scales.dtype)
        else:
            numbers = self.numbers[which].to(self.scales.dtype)
        if self.group is None:
            return numbers.mul_(self.scales[which].unsqueeze(1))
        if self._is_in_panels:
            return self._scaled(numbers, self.scales[which // PANEL, :, which % PANEL])
        return self._scaled(numbers, self.scales[which])

    @property
    def _is_in_panels(self) -> bool:
        return self.numbers.dim() == 3


def quantize(weight: Tensor, largest: Largest | None = None) -> tuple[Tensor, Tensor]:
    """The numbers and scales of `Int8Linear`. The largest magnitude of each row becomes 127.

    Args:
        largest: see `Ops.pack`.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=weight.dtype, device=weight.device)
    parts = (torch.split(each, _ROWS_AT_ONCE) for each in (weight, numbers, scales))
    for some, its_numbers, its_scales in zip(*parts, strict=True):
        peaks = some.abs().amax(1).float()
        its_scales.copy_((peaks if largest is None else largest(peaks)) / LARGEST)
        its_scales.masked_fill_(its_scales == 0, 1.0)  # the row has zeros only
        # Divide by the scales as they are kept, with fewer digits.
        scaled = some.float() / its_scales.float().unsqueeze(1)
        its_numbers.copy_(scaled.round_().clamp_(-LARGEST, LARGEST))
    return numbers, scales
