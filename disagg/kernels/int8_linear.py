"""Matrix products with weights of 8 bits: an int8 number for each, and a scale for each output.

A step of few tokens takes as long as reading the weights, of which there is half as much. Products
are of the activations' own type: numbers are widened, which is exact, and sums multiplied by the
scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.linear import PANEL, PlainLinear

LARGEST = 127
_WHOLE = 32  # torch's own product reads memory behind a row whose size is no multiple of 16
FEW_ROWS = 4  # of more, torch multiplies a widened weight in less time than one of int8
_ROWS_AT_ONCE = 1024  # that are quantised together: few enough for the processor's cache


class Int8Linear(PlainLinear):
    """x W^T + b with W = numbers * scales[:, None].

    Attributes:
        numbers: int8 from -127 to 127, [num_out, num_in]; or in panels, as `csrc/int8.h` reads
            them: [num_panels, num_in, PANEL], filled up with zeros.
        scales: [num_out], of the weight's type.
        bias: [num_out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.numbers, self.scales = quantize(weight)
        self.bias = bias
        self.num_out, self.num_in = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS and not self._is_in_panels and self.num_in % _WHOLE == 0:
            made = torch._weight_int8pack_mm(x, self.numbers, self.scales)
        elif x.dtype == torch.float16:  # sums of whole numbers would be beyond what it has
            made = functional.linear(x, self.widened())
        else:  # results are fewer than weights
            made = functional.linear(x, self._wide_numbers()).mul_(self.scales)
        return made if self.bias is None else made.add_(self.bias)

    @property
    def panels_nbytes(self) -> int:
        return -(-self.num_out // PANEL) * PANEL * self.num_in

    def lay_in_panels(self, memory: Tensor) -> None:
        """For the compiled step; torch then widens the weight for every product.

        Args:
            memory: int8 [panels_nbytes], where the panels are kept.
        """
        assert not self._is_in_panels
        filled = functional.pad(self.numbers, (0, 0, 0, -self.num_out % PANEL))
        panels = memory.view(-1, self.num_in, PANEL)
        self.numbers = panels.copy_(filled.view(-1, PANEL, self.num_in).transpose(1, 2))

    def widened(self) -> Tensor:
        """W: [num_out, num_in]."""
        return self._wide_numbers() * self.scales.unsqueeze(1)

    def _wide_numbers(self) -> Tensor:
        numbers = self.numbers
        if self._is_in_panels:
            numbers = numbers.transpose(1, 2).reshape(-1, self.num_in)[: self.num_out]
        return numbers.to(self.scales.dtype)

    def rows(self, which: Tensor) -> Tensor:
        """Some rows of W: [n, num_in]."""
        if self._is_in_panels:
            numbers = self.numbers[which // PANEL, :, which % PANEL]
        else:
            numbers = self.numbers[which]
        return numbers.to(self.scales.dtype).mul_(self.scales[which].unsqueeze(1))

    @property
    def _is_in_panels(self) -> bool:
        return self.numbers.dim() == 3


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers and scales of `Int8Linear`: of each row, the largest value becomes 127."""
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=weight.dtype, device=weight.device)
    parts = (torch.split(each, _ROWS_AT_ONCE) for each in (weight, numbers, scales))
    for some, its_numbers, its_scales in zip(*parts, strict=True):
        its_scales.copy_(some.abs().amax(1).float() / LARGEST)
        its_scales.masked_fill_(its_scales == 0, 1.0)  # of a row of zeros
        # By the scales as they are kept, which have fewer digits.
        scaled = some.float() / its_scales.float().unsqueeze(1)
        its_numbers.copy_(scaled.round_().clamp_(-LARGEST, LARGEST))
    return numbers, scales
