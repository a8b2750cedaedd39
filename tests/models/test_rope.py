"""Rotary tables equal the frequencies that transformers computes for the same settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from disagg.errors import ModelError
from disagg.models.decoder import inverse_frequencies, rope_tables
from disagg.models.rope import KINDS, RopeConfig

_ORIGINAL = {"original_max_position_embeddings": 64}
_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, **_BANDS, **_ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, **_ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "truncate": False, **_ORIGINAL},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0, **_ORIGINAL},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5, **_ORIGINAL},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_frequencies_equal_transformers(settings: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0, **settings}
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"))
    ours = RopeConfig.from_hf({"rope_parameters": parameters}, 256)
    torch.testing.assert_close(inverse_frequencies(ours, 64), inverse, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor)


def test_tables_are_cosines_and_sines_of_position_times_frequency() -> None:
    cos, sin = rope_tables(RopeConfig(theta=100.0), 4, 3)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ModelError) as refused:
        RopeConfig.from_hf({"rope_scaling": {"rope_type": "su"}}, 128)
    assert all(kind in refused.value.message for kind in KINDS)
