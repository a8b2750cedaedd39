"""A mixture of experts from torch's own operations, arranged for CPUs.

Tokens are sorted by expert, and each expert that has tokens multiplies all of them at once. Its
matrices are packed like those of a dense layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.cpu.linear import Linear, linear
from disagg.kernels.ops import Experts


class TorchExperts:
    """The experts of a layer, packed."""

    def __init__(self, experts: Experts) -> None:
        self._num_chosen, self._is_normalized = experts.num_chosen, experts.is_normalized
        self._grouping, self._score_bias = experts.grouping, experts.score_bias
        self._limit, self._alpha = experts.limit, experts.alpha
        self._held = experts.held
        assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
        self._experts: list[tuple[Linear, Linear, Linear]] = []  # the experts that this rank has
        for index in range(len(self._held)):
            gate_bias, up_bias = _halves(experts.gate_up_bias, index)
            down_bias = None if experts.down_bias is None else experts.down_bias[index].clone()
            gate, up = experts.gate_up[index].chunk(2)
            down = experts.down[index]
            self._experts.append(
                (linear(gate, gate_bias), linear(up, up_bias), linear(down, down_bias))
            )

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `Ops.mix_experts`."""
        weights, chosen = self._choose(logits)
        if x.shape[0] == 1:  # there is nothing to sort
            out = torch.zeros(x.shape, dtype=torch.float32)
            for expert, weight in sorted(zip(chosen[0].tolist(), weights[0].tolist(), strict=True)):
                if expert in self._held:
                    out.add_(self._one(x, expert), alpha=weight)
            return out.to(x.dtype)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert.div(self._num_chosen, rounding_mode="floor")
        own_weights = weights.flatten().index_select(0, by_expert).unsqueeze(1)
        counts = torch.bincount(chosen.flatten(), minlength=logits.shape[1]).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32)
        end = sum(counts[: self._held.start])
        for expert in self._held:
            start, end = end, end + counts[expert]
            if start < end:
                own = tokens[start:end]
                made = self._one(x.index_select(0, own), expert)
                out.index_add_(0, own, made * own_weights[start:end])
        return out.to(x.dtype)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._grouping is not None:
            how = self._num_chosen, self._is_normalized, self._grouping
            return reference.choose_grouped(logits, self._score_bias, *how)
        largest, chosen = torch.topk(logits.float(), self._num_chosen)
        if self._is_normalized:
            return torch.softmax(largest, -1), chosen
        return torch.softmax(logits.float(), -1).gather(1, chosen), chosen

    def _one(self, x: Tensor, expert: int) -> Tensor:
        gate, up, down = self._experts[expert - self._held.start]
        if self._limit is None:
            return down(up.times(x, gate.silu(x)))
        return down(reference.gated(gate(x), up(x), self._limit, self._alpha))


def _halves(bias: Tensor | None, index: int) -> tuple[Tensor | None, Tensor | None]:
    if bias is None:
        return None, None
    gate, up = bias[index].clone().chunk(2)
    return gate, up
