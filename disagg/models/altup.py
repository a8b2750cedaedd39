"""Several residual streams, and what else Gemma 3n's layers have (`models.altup_config`).

A layer predicts all streams from those before it, computes one, and corrects all by the difference
(AltUp, arXiv 2301.13310). A second branch of low rank runs beside attention (LAuReL, arXiv
2411.07501). An embedding that each token has for each layer is added to the other streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear

from disagg.kernels.ops import Ops, Weight
from disagg.models.altup_config import AltUpConfig
from disagg.models.model_config import ModelConfig
from disagg.models.weights import DecoderWeights, LayerWeights

HALF = 2**-0.5  # sums of two terms are multiplied by it
_LEAST_SQUARE = 1e-5


@dataclass(frozen=True, slots=True)
class AltUp:
    """What a layer has besides, with matrices in the form that the device wants.

    input_norm, scale, norm, laurel_norm, token_norm: [hidden].
    router: [num_streams, hidden]. prediction: [num_streams^2, num_streams]. correction:
    [num_streams, num_streams].
    """

    layer: int
    input_norm: Tensor
    scale: Tensor | None
    norm: Tensor
    router: Tensor
    prediction: Tensor
    correction: Tensor
    laurel_left: Weight
    laurel_right: Weight
    laurel_norm: Tensor
    token_gate: Weight
    token_output: Weight
    token_norm: Tensor

    @classmethod
    def pack(cls, ops: Ops, config: ModelConfig, index: int, layer: LayerWeights) -> AltUp | None:
        """What the layer has; None if its model has one stream."""
        own = layer.altup
        if config.altup is None or own is None:
            return None
        assert layer.input_norm is not None
        return cls(
            layer=index,
            input_norm=layer.input_norm,
            scale=own["stream_scale"] if config.altup.scales_output else None,
            norm=own["stream_norm"],
            router=own["stream_router"],
            prediction=own["prediction"],
            correction=own["correction"],
            laurel_left=ops.pack_table(own["laurel_left"]),
            laurel_right=ops.pack_table(own["laurel_right"]),
            laurel_norm=own["laurel_norm"],
            token_gate=ops.pack_table(own["token_gate"]),
            token_output=ops.pack_table(own["token_output"]),
            token_norm=own["token_norm"],
        )


@dataclass(frozen=True, slots=True)
class AltUpTables:
    """What a decoder has outside its layers.

    table: [embedding_rows, num_layers * embedding_size], embeddings for layers.
    token_input: [num_layers * embedding_size, hidden], which makes more of a token's embedding.
    token_input_norm: [embedding_size].
    spread: [(num_streams - 1) * hidden, hidden], which makes the other streams of the first.
    join: of each other stream [hidden, hidden].
    """

    config: AltUpConfig
    eps: float
    table: Tensor
    token_input: Weight
    token_input_norm: Tensor
    spread: Weight
    join: tuple[Weight, ...]

    @classmethod
    def pack(cls, ops: Ops, config: ModelConfig, weights: DecoderWeights) -> AltUpTables | None:
        """The tables of a model; None if it has one stream."""
        own = weights.altup
        if config.altup is None or own is None:
            return None
        squares = own["join"].chunk(config.altup.num_streams - 1)
        return cls(
            config=config.altup,
            eps=config.rms_norm_eps,
            table=own["table"],
            token_input=ops.pack_table(own["token_input"]),
            token_input_norm=own["token_input_norm"],
            spread=ops.pack_table(own["spread"]),
            join=tuple(ops.pack_table(each) for each in squares),
        )

    def begin(self, ops: Ops, token_ids: Tensor, hidden: Tensor) -> AltUpStreams:
        """The streams before the first layer.

        Args:
            hidden: [num_tokens, hidden], the tokens' embeddings.
        """
        num_tokens, size = len(hidden), self.config.embedding_size
        rows = token_ids.masked_fill(token_ids >= self.config.embedding_rows, 0)
        stated = embedding(rows, self.table).mul_(_rounded(size**0.5, hidden))
        made = ops.project(hidden, self.token_input) * hidden.shape[1] ** -0.5
        made = ops.rms_norm(made.view(-1, size), self.token_input_norm, self.eps)
        inputs = (made.view(num_tokens, -1, size) + stated.view(num_tokens, -1, size)).mul_(HALF)
        others = ops.project(hidden, self.spread).view(num_tokens, -1, hidden.shape[1])
        values = torch.cat((hidden.unsqueeze(1), _as_long(others, hidden)), 1)
        return AltUpStreams(self, ops, values, inputs)


@dataclass(slots=True)
class AltUpStreams:
    """The residual streams of a step.

    values: [num_tokens, num_streams, hidden].
    inputs: [num_tokens, num_layers, embedding_size], what the tokens give each layer.
    """

    tables: AltUpTables
    ops: Ops
    values: Tensor
    inputs: Tensor

    def enter(self, layer: AltUp) -> tuple[Tensor, Tensor]:
        """Predict the streams after a layer. Returns the sum to which its attention is added, and
        what attention multiplies, [num_tokens, hidden] each."""
        ops, eps, active = self.ops, self.tables.eps, self.tables.config.active
        values, count = self.values, self.tables.config.num_streams
        mixed = linear(self._mixture(layer, values[:, active]), layer.prediction)
        self.values = torch.baddbmm(values, mixed.view(-1, count, count), values)
        own = self.values[:, active].contiguous()
        normed = ops.rms_norm(own, layer.input_norm, eps)
        low = ops.project(ops.project(normed, layer.laurel_left), layer.laurel_right)
        laurel = normed + ops.rms_norm(low, layer.laurel_norm, eps)
        return (own + laurel) * HALF, normed

    def leave(self, layer: AltUp, computed: Tensor) -> None:
        """Correct the predicted streams by what the layer computed of one, [num_tokens, hidden]."""
        ops, active = self.ops, self.tables.config.active
        factors = linear(self._mixture(layer, computed), layer.correction).add_(1.0).unsqueeze(2)
        difference = (computed - self.values[:, active]).unsqueeze(1)
        self.values = self.values + difference * factors
        own = self.values[:, active].contiguous()
        if layer.scale is not None:
            own = own * layer.scale
        gate = gelu(ops.project(own, layer.token_gate), approximate="tanh")
        added = ops.project(gate * self.inputs[:, layer.layer], layer.token_output)
        added = ops.rms_norm(added, layer.token_norm, self.tables.eps)
        self.values[:, 1:] += added.unsqueeze(1)

    def join(self) -> Tensor:
        """The mean of all streams, [num_tokens, hidden]."""
        first, *others = self.values.unbind(1)
        pairs = zip(others, self.tables.join, strict=True)
        made = [self.ops.project(each.contiguous(), weight) for each, weight in pairs]
        alike = _as_long(torch.stack(made, 1), first)
        return torch.cat((first.unsqueeze(1), alike), 1).mean(1)

    def of_rows(self, rows: Tensor) -> AltUpStreams:
        """Those of some tokens."""
        values, inputs = (each.index_select(0, rows) for each in (self.values, self.inputs))
        return replace(self, values=values, inputs=inputs)

    def _mixture(self, layer: AltUp, stream: Tensor) -> Tensor:
        """[num_tokens, num_streams]: from which the factors of the streams are made."""
        normed = self.ops.rms_norm(stream.contiguous(), layer.norm, self.tables.eps)
        routed = linear(normed * (1.0 / stream.shape[1]), layer.router)
        return routed.float().tanh().to(stream.dtype)


def cutoff_of(config: ModelConfig, layer: int) -> float | None:
    """See `Mlp.cutoff`: how many deviations of a normal distribution a share of it lies below."""
    share = 0.0 if config.altup is None else config.altup.sparsities[layer]
    return NormalDist().inv_cdf(share) if share else None


def cut_off_(gates: Tensor, cutoff: float) -> None:
    """Keep what lies above a number of deviations over the mean of each row, in place."""
    deviation, mean = torch.std_mean(gates, -1, correction=0, keepdim=True)
    gates.sub_(mean + deviation * cutoff).relu_()


def _as_long(vectors: Tensor, wanted: Tensor) -> Tensor:
    """Vectors [num_tokens, n, hidden], each as long as its token's in `wanted`."""
    length = wanted.float().square().mean(-1, keepdim=True).sqrt().unsqueeze(1)
    own = vectors.float().square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
    return (vectors * (length / own)).to(vectors.dtype)


def _rounded(value: float, like: Tensor) -> float:
    """A factor in the type of activations, as transformers rounds it."""
    return torch.tensor(value, dtype=like.dtype).item()
