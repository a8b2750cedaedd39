"""Ranks with whole experts together compute what transformers does, and each reads only its own."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.config import EngineConfig
from disagg.engine.device.check import check_engine
from disagg.errors import StartupError
from disagg.models.description import ModelDescription, describe_model
from disagg.models.experts_config import ExpertsConfig
from disagg.models.families import FAMILIES
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.parts import all_parts
from disagg.models.share import Share, check_ranks, possible_ranks
from disagg.models.weights import load_weights
from tests.grids import some
from tests.models.checkpoints import WITHOUT_STATES, write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.quantized_files import GPT_OSS, write_quantized
from tests.models.test_ranks import compare, eight_heads

CPU = torch.device("cpu")
WITH_EXPERTS = [
    name
    for name, (family, _) in WITHOUT_STATES.items()
    if FAMILIES[f"{family}ForCausalLM"].experts is not None
]
# Unlike in their experts: biases, shared ones, dense layers, groups.
ON_TWO = ("qwen2-moe-dense-between", "deepseek-v2-groups", "glm4-moe", "minimax-m2")
ON_FOUR = ("qwen3-moe", "deepseek-v3", "gpt-oss", "mixtral")


def _share(rank: int, num_ranks: int) -> Share:
    return Share(rank, num_ranks, has_whole_experts=True)


def _experts(model: ModelDescription) -> ExpertsConfig:
    assert model.config.experts is not None
    return model.config.experts


def _write(directory: Path, variant: str, **changes: Any) -> ModelDescription:
    changes = {**eight_heads(variant), **changes}
    return describe_model(write_checkpoint(directory, variant, **changes).directory)


def test_experts_are_neighbours_and_the_first_rank_has_the_most(tmp_path: Path) -> None:
    experts = _experts(_write(tmp_path, "qwen3-moe"))
    assert experts.num_experts == 7
    for num_ranks in range(2, 8):
        parts = [_share(rank, num_ranks).own_experts(experts) for rank in range(num_ranks)]
        own = [part for part in parts if part is not None]
        assert [expert for part in own for expert in part] == list(range(7))
        assert max(map(len, own)) == len(own[0]) <= min(map(len, own)) + 1
    assert Share(1, 2).own_experts(experts) is None
    assert _share(1, 2).of_experts(experts) == (0, experts.intermediate_size)


@pytest.mark.parametrize(
    ("variant", "num_ranks"),
    some(
        [*((name, 2) for name in ON_TWO), *((name, 4) for name in ON_FOUR)],
        product(WITH_EXPERTS, (2, 4)),
    ),
)
def test_ranks_compute_what_transformers_does(variant: str, num_ranks: int, tmp_path: Path) -> None:
    """Most numbers of experts are odd here, so ranks have unequal numbers of them."""
    checkpoint = write_checkpoint(tmp_path / "model", variant, **eight_heads(variant))
    model, place = describe_model(checkpoint.directory), tmp_path if num_ranks == 2 else None
    compare(model, checkpoint, num_ranks, place, has_whole_experts=True)


def test_mxfp4_experts_are_not_cut(tmp_path: Path) -> None:
    """Those of one group could not be divided at all."""
    sizes = {**GPT_OSS, "intermediate_size": 32}
    checkpoint = write_quantized(tmp_path, "gpt-oss", "mxfp4", **sizes)
    model = describe_model(checkpoint.directory)
    with pytest.raises(StartupError, match=r"few for 2 ranks\. .* With enable_expert_parallel, .*"):
        check_ranks(model.config, 2)
    check_ranks(model.config, 2, expert_parallel=True)
    compare(model, checkpoint, 2, None, has_whole_experts=True)


def test_ranks_read_whole_experts_of_a_gguf_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "qwen2-moe", **eight_heads("qwen2-moe"))
    model = describe_model(write_gguf(tmp_path / "model.gguf", checkpoint.model))
    compare(model, checkpoint, 2, None, has_whole_experts=True)


@pytest.mark.parametrize("variant", WITH_EXPERTS)
def test_each_expert_is_read_by_one_rank_with_its_biases(variant: str, tmp_path: Path) -> None:
    model = _write(tmp_path, variant)
    read: Counter[str] = Counter()
    for rank in range(2):
        share, own = _share(rank, 2), 0
        for part in all_parts(model.config, share):
            num_values = torch.Size(part.shape).numel()
            own += num_values * 4
            if ".experts." in part.name and ".router." not in part.name:
                read[part.name] += num_values
        assert own == weights_nbytes(model.config, DeviceFormat(4), share)
    stored = {name: each.num_values for name, each in model.tensors.items() if ".experts." in name}
    assert read == stored
    loaded = load_weights(model, torch.float32, CPU, share=_share(1, 2))
    for index, layer in enumerate(loaded.layers):
        experts = model.config.experts_in(index)
        if experts is not None:
            held = _share(1, 2).own_experts(experts)
            assert held is not None
            assert layer.gate_up.shape[0] == len(held) * 2 * experts.intermediate_size
            assert layer.router is not None and layer.router.shape[0] == experts.num_experts
            assert (layer.down_bias is not None) == experts.has_bias


@pytest.mark.parametrize(
    ("variant", "settings", "param", "words"),
    [
        ("llama", {"tensor_parallel_size": 2}, "enable_expert_parallel", "this model has none"),
        (
            "mixtral",
            {},
            "enable_expert_parallel",
            "tensor_parallel_size = 1 there is only one rank",
        ),
        (
            "mixtral",
            {"tensor_parallel_size": 8},
            "tensor_parallel_size",
            r"5 experts are too few for 8 ranks\. Possible up to 16: 2, 4\.$",
        ),
    ],
)
def test_what_is_not_possible_is_refused_in_words(
    variant: str, settings: dict[str, Any], param: str, words: str, tmp_path: Path
) -> None:
    engine = EngineConfig(device="cpu", enable_expert_parallel=True, **settings)
    with pytest.raises(StartupError, match=words) as it:
        check_engine(engine, _write(tmp_path, variant))
    assert it.value.param == param


def test_refusals_of_divided_experts_say_that_whole_ones_are_possible(tmp_path: Path) -> None:
    model = _write(tmp_path / "a", "qwen3-moe", moe_intermediate_size=42)
    assert possible_ranks(model.config) == [1, 2]
    assert possible_ranks(model.config, expert_parallel=True) == [2, 4]
    with pytest.raises(StartupError, match=r"With enable_expert_parallel, .*, 4 is possible, too"):
        check_ranks(model.config, 4)
    with pytest.raises(StartupError, match=r"up to 16: 1, 2\.$"):  # 3 does not divide heads
        check_ranks(model.config, 3)
    engine = EngineConfig(device="cpu", quantization="int4", tensor_parallel_size=2)
    model = _write(tmp_path / "b", "qwen3-moe", moe_intermediate_size=32)
    with pytest.raises(StartupError, match=r"16 columns .*, or set enable_expert_parallel,"):
        check_engine(engine, model)
    model = _write(tmp_path / "c", "qwen2-moe", moe_intermediate_size=32)  # a shared one of 40
    with pytest.raises(StartupError, match=r"16 columns .* change tensor_parallel_size\.$"):
        check_engine(engine, model)
