"""How large steps are, and what does not fit, before anything is loaded."""

from __future__ import annotations

import dataclasses
import re

import pytest

from disagg.config import EngineConfig
from disagg.engine.device.kv_shape import KVShape
from disagg.engine.device.memory_plan import LARGEST_STEP, MemoryPlan, StoredModel, plan_memory
from disagg.errors import NotEnoughMemory
from disagg.kernels.kv_pages import FORMATS
from disagg.models.experts_config import ExpertsConfig
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.share import Share
from tests.engine.device.test_workspace import LLAMA_3_8B

QWEN3_14B = dataclasses.replace(
    LLAMA_3_8B, num_layers=40, hidden_size=5120, intermediate_size=17408, vocab_size=151936
)
GB = 10**9


def plan(
    gb: float | None,
    model: object = LLAMA_3_8B,
    largest_step: tuple[int, int] = LARGEST_STEP,
    rank: int = 0,
    **settings: object,
) -> MemoryPlan:
    """Of a GPU of `gb`, of which a worker claims nine tenths; None: a CPU."""
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    assert isinstance(model, type(LLAMA_3_8B))
    shape = KVShape.from_model(model, "weights", 64, FORMATS["bfloat16"], config.share(rank))
    claim_nbytes = None if gb is None else int(gb * config.gpu_memory_utilization * GB)
    max_model_len = config.max_model_len or (2048 if gb is None else 8192)
    stored = StoredModel(model, shape, 2, config.quantization)
    return plan_memory(config, stored, max_model_len, claim_nbytes, largest_step)


def sizes(found: MemoryPlan) -> tuple[int, int]:
    return found.max_num_seqs, found.max_num_batched_tokens


def test_weights_are_counted() -> None:
    plain = dataclasses.replace(LLAMA_3_8B, qkv_bias=False, qk_norm=False)
    assert plan(80, plain).weights_nbytes == 2 * 8_030_261_248  # of Llama-3-8B, as published


@pytest.mark.parametrize(
    ("gb", "model", "expected"),
    [
        (None, LLAMA_3_8B, (64, 1024)),
        (96, LLAMA_3_8B, (512, 8192)),
        (80, QWEN3_14B, (512, 8192)),
        (48, LLAMA_3_8B, (384, 8192)),
        (40, QWEN3_14B, (64, 4096)),
        (24, LLAMA_3_8B, (64, 4096)),
    ],
)
def test_the_size_of_steps_follows_the_memory(
    gb: float | None, model: object, expected: tuple[int, int]
) -> None:
    assert sizes(plan(gb, model)) == expected


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_ranks_with_unequal_parts_choose_steps_alike(has_whole_experts: bool) -> None:
    """Of experts with three groups of MXFP4, or of three of them: the second rank has one."""
    inner = 96 << 6 if has_whole_experts else 96
    experts = ExpertsConfig(
        num_experts=3,
        num_experts_per_tok=2,
        intermediate_size=inner,
        is_mxfp4=True,
    )
    model = dataclasses.replace(LLAMA_3_8B, family="GptOssForCausalLM", experts=experts)
    first, other = (
        plan(
            40,
            model,
            rank=rank,
            tensor_parallel_size=2,
            enable_expert_parallel=has_whole_experts,
        )
        for rank in range(2)
    )
    assert sizes(first) == sizes(other)
    assert (first.weights_nbytes, first.workspace_nbytes) == (
        other.weights_nbytes,
        other.workspace_nbytes,
    )
    shares = [Share(rank, 2, has_whole_experts) for rank in range(2)]
    own = [weights_nbytes(model, DeviceFormat(2), share) for share in shares]
    assert own[1] < own[0] == first.weights_nbytes


def test_a_step_is_not_larger_than_the_speed_of_the_device_asks_for() -> None:
    assert sizes(plan(96, largest_step=(288, 4096))) == (288, 4096)
    assert sizes(plan(22, largest_step=(288, 4096))) == (64, 2048), "the memory has room for less"
    assert sizes(plan(None, largest_step=(288, 4096))) == (64, 1024)
    assert sizes(plan(96, largest_step=(288, 4096), max_num_seqs=512)) == (512, 4096)


@pytest.mark.parametrize("gb", [None, 80])
def test_what_is_set_stays_and_the_other_follows(gb: float | None) -> None:
    assert sizes(plan(gb, max_num_seqs=7, max_num_batched_tokens=9)) == (7, 9)
    assert sizes(plan(gb, max_num_batched_tokens=32)) == (32, 32)
    assert sizes(plan(gb, max_num_seqs=9000)) == (9000, 9000)


def test_a_context_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        plan(24, max_model_len=131072)
    said = refused.value.message
    for words in ("16.1 GB of weights", "17.2 GB of KV", "131072 tokens", "21.6 GB of its GPU"):
        assert words in said
    found = re.search(r"Lower max_model_len to (\d+) or less", said)
    assert found is not None and refused.value.param == "max_model_len"
    longest = int(found[1])
    # Tables of running sequences grow with the context, too: theirs are some megabytes.
    assert 20000 < longest < 131072
    plan(24, max_model_len=longest)
    with pytest.raises(NotEnoughMemory):
        plan(24, max_model_len=longest + 1000)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(NotEnoughMemory, match="smaller model or a larger GPU") as refused:
        plan(16)
    assert refused.value.param == "gpu_memory_utilization"


def test_a_cache_that_is_set_must_fit_too() -> None:
    with pytest.raises(NotEnoughMemory, match=r"60\.0 GB of KV"):
        plan(80, kv_cache_memory_bytes=60 * GB)
    with pytest.raises(NotEnoughMemory, match="9000 blocks"):
        plan(80, num_gpu_blocks_override=9000)


def with_drafts(gb: float, **settings: object) -> MemoryPlan:
    """Of Llama-3-8B, for which a model of four of its layers drafts."""
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    four = dataclasses.replace(LLAMA_3_8B, num_layers=4)
    both = [
        StoredModel(each, KVShape.from_model(each, "weights", 64, FORMATS["bfloat16"]), 2)
        for each in (LLAMA_3_8B, four)
    ]
    claim_nbytes = int(gb * config.gpu_memory_utilization * GB)
    return plan_memory(config, both[0], 8192, claim_nbytes, LARGEST_STEP, both[1])


def test_a_draft_model_is_counted_before_it_is_loaded() -> None:
    alone, both = plan(80), with_drafts(80)
    four = dataclasses.replace(LLAMA_3_8B, num_layers=4)
    assert both.weights_nbytes == alone.weights_nbytes
    assert both.drafts_nbytes == weights_nbytes(four, DeviceFormat(2), Share())
    assert both.workspace_nbytes > alone.workspace_nbytes
    assert both.block_nbytes == alone.block_nbytes * 36 // 32, "KV of 36 layers, not of 32"
    config = EngineConfig()
    for found in (alone, both):
        assert found.num_blocks(config, 36 * 1000 * alone.block_nbytes // 32) == (
            1000 if found is both else 1125
        )
        left = 72 * GB - found.beside_nbytes
        assert found.num_kv_tokens(config, 80 * GB) == left // found.block_nbytes * 64


def test_a_draft_model_that_does_not_fit_is_refused_with_its_size() -> None:
    assert plan(22)
    with pytest.raises(
        NotEnoughMemory, match=r"16\.1 GB of weights, 3\.\d GB of those of the draft"
    ):
        with_drafts(22)
    with pytest.raises(NotEnoughMemory, match=r"58\.5 GB of KV"):  # 52 and an eighth of that
        with_drafts(90, kv_cache_memory_bytes=52 * GB)
