"""Matrix products with weights of 8 or 4 bits.

A step of few tokens takes as long as reading the weights, and such weights have a half or a quarter
of the bytes. Products are computed in the activations' dtype: numbers are widened. Compiled code
(`csrc/int8.h`, `csrc/int4.h`) reads the numbers in panels; without it torch multiplies with the
widened numbers.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu.library import find_step
from disagg.kernels.cpu.linear import PlainLinear
from disagg.kernels.cpu.panels import FEW_ROWS, PANEL, CpuMatrix, multiply_rows
from disagg.kernels.packed_matrix import Largest, PackedMatrix
from disagg.kernels.packed_sizes import INT4_GROUP

LARGEST = {8: 127, 4: 15}
_UNIT = 8  # 4-bit numbers of a row that are contiguous in a panel
_ROWS_AT_ONCE = 1024  # rows that are quantised or widened together: few enough for the CPU's cache
_EVEN_ODD = 2


class NarrowLinear(PlainLinear):
    """Computes x W^T + b, with numbers of which some neighbours in a row (a group) share a scale.

    W is numbers * scales with 8 bits, and numbers * scales + least values with 4.

    Attributes:
        numbers: 8 bits: int8 [num_out, num_in]; or in panels, as `csrc/int8.h` reads them:
            [num_panels, num_in, PANEL], padded with zeros. 4 bits: uint8 [num_out, num_in / 2], two
            numbers per byte, the first in its lower half (an odd row is padded); or in panels, as
            `csrc/int4.h` reads them: [num_panels, num_in / 8, PANEL / 16, 64].
        scales: of the weight's dtype: [num_out, num_groups, 1], or with 4 bits the scales and the
            least values [num_out, num_groups, 2]. With groups in panels: [num_panels, num_groups, 1
            or 2, PANEL].
        group: size of a group; None: all of a row, with 8 bits.
        bias: [num_out], or None.
    """

    def __init__(
        self,
        bits: Literal[8, 4],
        numbers: Tensor,
        scales: Tensor,
        group: int | None,
        bias: Tensor | None,
        num_in: int,
    ) -> None:
        self.bits, self.group, self.bias = bits, group, bias
        self.numbers, self.scales = numbers, scales
        self.num_out, self.num_in = numbers.shape[0], num_in
        self._library: ctypes.CDLL | None = None  # of numbers in panels

    def __call__(self, x: Tensor) -> Tensor:
        if self._library is not None and x.dtype == torch.bfloat16 and self._is_compiled(x):
            return multiply_rows(self._library, self.described(), x)
        if self.group is None and x.dtype != torch.float16:
            # Scale the results, which are fewer than the weights.
            made = functional.linear(x, self._wide_numbers()).mul_(self.scales.flatten())
        else:  # in float16, sums of unscaled numbers would overflow
            parts = torch.split(torch.arange(self.num_out), _ROWS_AT_ONCE)
            some = [functional.linear(x, self.rows(part).to(x.dtype)) for part in parts]
            made = torch.cat(some, 1)
        return made if self.bias is None else made.add_(self.bias)

    def _is_compiled(self, x: Tensor) -> bool:
        """Whether compiled code multiplies. Without AMX, torch multiplies many rows with 8-bit
        weights faster."""
        assert self._library is not None
        is_few = x.shape[0] <= FEW_ROWS or self.group is not None
        return is_few or bool(self._library.disagg_step_has_tiles())

    @property
    def can_be_in_panels(self) -> bool:
        return self.bits == 8 or self.num_in % _UNIT == 0

    def lay_in_panels(self, library: ctypes.CDLL) -> None:
        """Lay the numbers in panels, for the compiled step and for compiled products.

        Args:
            library: the one that `library.find_step` loaded.
        """
        assert self._library is None and self.can_be_in_panels
        if self.bits == 8:
            self.numbers = _in_panels(self.numbers).transpose(1, 2).contiguous()
        else:
            filled = _in_panels(_unpacked(self.numbers, self.num_in))
            # Dimensions of a panel: vectors, columns, units, pairs in a unit, the two of a pair.
            units = filled.view(len(filled), PANEL // 16, 16, -1, _UNIT // 2, _EVEN_ODD)
            words = torch.zeros(*units.shape[:4], _EVEN_ODD, dtype=torch.int16)
            for pair in range(_UNIT // 2):
                words |= units[:, :, :, :, pair].to(torch.int16) << (4 * pair)
            self.numbers = words.permute(0, 3, 1, 2, 4).contiguous().view(torch.uint8).flatten(3)
        if self.group is not None:
            self.scales = _in_panels(self.scales).permute(0, 2, 3, 1).contiguous()
        self._library = library

    def described(self) -> CpuMatrix:
        """The structure in which compiled code reads this weight."""
        assert self._library is not None
        address = self.numbers.data_ptr()
        return CpuMatrix(
            numbers=address if self.bits == 8 else None,
            nibbles=address if self.bits == 4 else None,
            scales=self.scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_out=self.num_out,
            num_in=self.num_in,
            group_size=self.group or 0,
        )

    def widened(self) -> Tensor:
        """W: [num_out, num_in]."""
        return self.rows(torch.arange(self.num_out))

    def rows(self, which: Tensor) -> Tensor:
        """Some rows of W: [n, num_in]."""
        panel, column = which // PANEL, which % PANEL
        if self._library is None or self.group is None:
            scales = self.scales[which]
        else:
            scales = self.scales[panel, :, :, column]
        if self._library is None:
            own = self.numbers[which]
            numbers = own if self.bits == 8 else _unpacked(own, self.num_in)
        elif self.bits == 8:
            numbers = self.numbers[panel, :, column]
        else:
            words = self.numbers.view(torch.int16).view(*self.numbers.shape[:3], 16, _EVEN_ODD)
            own = words[panel, :, column // 16, column % 16]  # [n, units, 2]
            pairs = [own >> (4 * pair) & LARGEST[4] for pair in range(_UNIT // 2)]
            numbers = torch.stack(pairs, 2).flatten(1)
        group = self.group or self.num_in
        if num_more := -self.num_in % group:
            numbers = functional.pad(numbers, (0, num_more))
        groups = numbers.view(-1, scales.shape[1], group).float()
        # Rounded once, as in compiled code.
        groups.mul_(scales[:, :, :1].float())
        if self.bits == 4:
            groups.add_(scales[:, :, 1:].float())
        return groups.to(self.scales.dtype).flatten(1)[:, : self.num_in].contiguous()

    def _wide_numbers(self) -> Tensor:
        """The numbers of 8 bits, without their scales: [num_out, num_in]."""
        numbers = self.numbers
        if self._library is not None:
            numbers = numbers.transpose(1, 2).reshape(-1, self.num_in)[: self.num_out]
        return numbers.to(self.scales.dtype)


def int8_linear(
    weight: Tensor, bias: Tensor | None, largest: Largest | None = None
) -> NarrowLinear:
    """Quantise a weight to 8 bits. The largest magnitude of each row becomes 127.

    Args:
        largest: see `Ops.pack`.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, 1, dtype=weight.dtype, device=weight.device)
    parts = (torch.split(each, _ROWS_AT_ONCE) for each in (weight, numbers, scales))
    for some, its_numbers, its_scales in zip(*parts, strict=True):
        peaks = some.abs().amax(1).float()
        if largest is not None:
            peaks = largest(peaks)
        its_scales.copy_((peaks / LARGEST[8]).view(-1, 1, 1))
        its_scales.masked_fill_(its_scales == 0, 1.0)  # the row has zeros only
        # Divide by the scales as they are kept, with fewer digits.
        scaled = some.float() / its_scales.float()[:, 0]
        its_numbers.copy_(scaled.round_().clamp_(-LARGEST[8], LARGEST[8]))
    return _compiled(NarrowLinear(8, numbers, scales, None, bias, weight.shape[1]))


def int4_linear(weight: Tensor, bias: Tensor | None) -> NarrowLinear:
    """Quantise a weight to 4 bits. In each group the least value becomes 0 and the largest 15.

    With groups of 128, SmolLM2-135M loses most of its quality: its perplexity is 53 instead of 31.
    """
    num_out, num_in = weight.shape
    count = -(-num_in // INT4_GROUP)
    numbers = torch.empty(num_out, -(-num_in // 2), dtype=torch.uint8)
    scales = torch.empty(num_out, count, 2, dtype=weight.dtype)
    parts = (torch.split(each, _ROWS_AT_ONCE) for each in (weight, numbers, scales))
    for some, its_numbers, its_scales in zip(*parts, strict=True):
        # The last group may be shorter; it is padded with one of its own numbers.
        wide = functional.pad(some.float(), (0, count * INT4_GROUP - num_in), mode="replicate")
        groups = wide.view(-1, count, INT4_GROUP)
        least, most = torch.aminmax(groups, dim=2)
        its_scales[:, :, 0] = (most - least) / LARGEST[4]
        its_scales[:, :, 1] = least
        its_scales[:, :, 0].masked_fill_(its_scales[:, :, 0] == 0, 1.0)  # all numbers are equal
        # Divide by the scales as they are kept, with fewer digits.
        step, first = its_scales.float().unbind(2)
        scaled = (groups - first.unsqueeze(2)) / step.unsqueeze(2)
        rounded = scaled.round_().clamp_(0, LARGEST[4]).to(torch.uint8).flatten(1)
        its_numbers.copy_(_in_pairs(rounded[:, : num_in + num_in % 2]))
    return _compiled(NarrowLinear(4, numbers, scales, INT4_GROUP, bias, num_in))


def packed_linear(matrix: PackedMatrix, bias: Tensor | None, dtype: torch.dtype) -> NarrowLinear:
    """Take the numbers of a packed matrix as they are; scales are rounded to `dtype`."""
    if matrix.kind == "int4":
        return _compiled(_packed_int4(matrix, bias, dtype))
    scales = matrix.scales.T.to(dtype).contiguous().unsqueeze(2)
    numbers = matrix.numbers()
    return _compiled(NarrowLinear(8, numbers, scales, matrix.group, bias, matrix.num_in))


def _compiled(linear: NarrowLinear) -> NarrowLinear:
    """Lay a weight in panels if compiled code can multiply it here, for a model in bfloat16."""
    library = find_step().loaded
    is_bf16 = linear.scales.dtype == torch.bfloat16 and linear.scales.device.type == "cpu"
    if library is not None and is_bf16 and linear.can_be_in_panels:
        linear.lay_in_panels(library)
    return linear


def _packed_int4(matrix: PackedMatrix, bias: Tensor | None, dtype: torch.dtype) -> NarrowLinear:
    """A scale that loses digits in `dtype` shifts all values of a group in one direction. The least
    value corrects that, so that the values of a group are off in both directions.
    """
    num_out, num_in = matrix.shape
    count, group = matrix.scales.shape[0], matrix.group or num_in
    numbers = torch.empty(num_out, -(-num_in // 2), dtype=torch.uint8)
    scales = torch.empty(num_out, count, 2, dtype=dtype)
    exact, least = matrix.scales.float().T, matrix.least_values().T
    sizes = torch.full((count,), group)
    sizes[-1] = num_in - (count - 1) * group
    for first in range(0, num_out, _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        some = matrix.rows(first, min(first + _ROWS_AT_ONCE, num_out)).numbers().add_(8)
        filled = functional.pad(some, (0, count * group - num_in))
        means = filled.view(-1, count, group).sum(2, dtype=torch.float32) / sizes
        kept = scales[rows, :, 0].copy_(exact[rows])
        scales[rows, :, 1] = least[rows] + means * (exact[rows] - kept.float())
        numbers[rows] = _in_pairs(functional.pad(some, (0, num_in % 2)).view(torch.uint8))
    return NarrowLinear(4, numbers, scales, group, bias, num_in)


def _in_panels(rows: Tensor) -> Tensor:
    """Pad rows to whole panels: [num_panels, PANEL, ...]."""
    more = (0, 0) * (rows.dim() - 1) + (0, -len(rows) % PANEL)
    return functional.pad(rows, more).view(-1, PANEL, *rows.shape[1:])


def _in_pairs(numbers: Tensor) -> Tensor:
    """Pack an even number of columns, uint8 [n, num_in], to [n, num_in / 2]."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _unpacked(numbers: Tensor, num_in: int) -> Tensor:
    """Unpack uint8 [n, num_in / 2], two numbers per byte, to uint8 [n, num_in]."""
    return torch.stack((numbers & LARGEST[4], numbers >> 4), 2).flatten(1)[:, :num_in]
