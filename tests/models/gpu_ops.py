"""Operations that keep packed matrices as a GPU does, computed by the reference of its kernels."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.activation import Activation
from disagg.kernels.cpu.linear import PlainLinear
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.ops import Experts
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.kernels.packed_sizes import OnlineKind
from disagg.kernels.torch.ops import TorchOps


class _ReferenceProduct(PlainLinear):
    """The reference, where a decoder on a CPU wants a product."""

    def __init__(self, weight: PackedMatrix, bias: Tensor | None) -> None:
        self._matrix, self._its_bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return reference.packed_linear(x, self._matrix, self._its_bias)


class FakeGpuOps(TorchOps):
    """Keeps the packed matrices of a checkpoint."""

    keeps_packed: Literal["gpu", "cpu"] | None = "gpu"

    def pack(self, weight: Any, bias: Tensor | None, largest: Any = None) -> Any:
        if isinstance(weight, PackedMatrix):
            return _ReferenceProduct(weight, bias)
        return super().pack(weight, bias, largest)

    def pack_experts(self, experts: Experts) -> Any:
        is_packed = isinstance(experts.gate_up, PackedMatrix)
        return experts if is_packed else super().pack_experts(experts)

    def mix_experts(self, x: Tensor, logits: Tensor, experts: Any) -> Tensor:
        if isinstance(experts, Experts):
            return reference.mix_experts(x, logits, experts)
        return super().mix_experts(x, logits, experts)

    def pack_gated(self, weight: Any, bias: Tensor | None) -> Any:
        if isinstance(weight, PackedMatrix):
            return (_ReferenceProduct(weight, bias),)
        return super().pack_gated(weight, bias)

    def project_gated(self, x: Tensor, weight: Any, activation: Activation = "silu") -> Tensor:
        if len(weight) == 1:
            return reference.gated_mul(weight[0](x), activation)
        return super().project_gated(x, weight, activation)


class QuantizingGpuOps(FakeGpuOps):
    """Also quantises floats when they are loaded."""

    def __init__(self, kind: OnlineKind) -> None:
        super().__init__()
        self._gpu = TritonOps(1, 1, quantization=kind)

    def pack(self, weight: Any, bias: Tensor | None, largest: Any = None) -> Any:
        return super().pack(self._gpu._quantized(weight, largest), bias)

    def pack_table(self, weight: Any, bias: Tensor | None = None) -> Any:
        return TorchOps.pack(self, weight, bias)

    def pack_gated(self, weight: Any, bias: Tensor | None) -> Any:
        return super().pack_gated(self._gpu._quantized(weight), bias)

    def pack_experts(self, experts: Experts) -> Any:
        return self._gpu.pack_experts(experts)._experts
