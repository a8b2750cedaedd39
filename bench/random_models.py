"""Decoders with random weights, for measurements and tests that need no checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.models.decoder import Decoder, build_decoder
from disagg.models.model_config import ModelConfig
from disagg.models.parts import Part, all_fields
from disagg.models.weights import DecoderWeights, LayerWeights, nested


def random_decoder(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Decoder:
    """Build a decoder with random weights, for measurements that need no checkpoint."""
    return build_decoder(config, random_weights(config, dtype, device, seed))


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> DecoderWeights:
    """Draw random weights: matrices are normal with deviation 0.02, norms are one."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(parts: list[Part]) -> Tensor:
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if parts[0].name.endswith(("norm.weight",)):
            own = torch.float32 if parts[0].is_exact else dtype
            return torch.ones(shape, dtype=own, device=device)
        drawn = torch.empty(shape, dtype=torch.float32, device=device)
        drawn.normal_(0.0, 0.02, generator=generator)
        return drawn if parts[0].is_exact else drawn.to(dtype)

    outer, *layers = all_fields(config)
    tables = nested({field: draw(parts) for field, parts in outer.items()})
    tables.setdefault("lm_head", tables["embedding"])
    drawn = [nested({name: draw(its) for name, its in fields.items()}) for fields in layers]
    read = [LayerWeights(**each) for each in drawn]
    return DecoderWeights(layers=read, dtype=dtype, **tables)
