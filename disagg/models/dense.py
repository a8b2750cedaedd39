"""The description of a model for the compiled step (`csrc/step.cpp`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from disagg.kernels.cpu.int4_linear import Int4Linear
from disagg.kernels.cpu.int8_linear import Int8Linear
from disagg.kernels.cpu.step import DenseLayer, DenseModel
from disagg.kernels.ops import Weight
from disagg.models.layers import Layer, Mlp
from disagg.models.model_config import ModelConfig


def dense_model(
    config: ModelConfig,
    layers: Sequence[Layer],
    embedding: Tensor | Int8Linear | Int4Linear,
    rope: Tensor,
    norm: Tensor,
    head: Weight,
) -> DenseModel:
    """Describe a model, which may have no feature that `not_compiled` names."""
    packed = []
    for layer in layers:
        assert isinstance(layer.mlp, Mlp)
        assert layer.input_norm is not None and layer.post_norm is not None
        packed.append(
            DenseLayer(
                input_norm=layer.input_norm,
                qkv=layer.qkv,
                qk_norm=layer.qk_norm,
                output=layer.output,
                post_norm=layer.post_norm,
                gate_up=layer.mlp.gate_up,
                down=layer.mlp.down,
                window=layer.window,
            )
        )
    return DenseModel(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        embedding=embedding,
        rope=rope,
        layers=packed,
        norm=norm,
        head=head,
    )
