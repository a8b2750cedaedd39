"""Rooflines give the textbooks' figures, come near published runs, and reward better hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.capacity.efficiency import DATASHEET, efficiency_of
from disagg.capacity.gpus import GPUS, Gpu, gpu_of, link_of
from disagg.capacity.roofline import Placement, placements
from disagg.capacity.shapes import SHAPES, ModelShape
from disagg.errors import NotEnoughMemory, StartupError
from disagg.models.quantized import QuantizedFormat
from disagg.time_model import CHUNK_TOKENS, StepFeatures, StepTimeFit, attended
from tests.grids import examples
from tests.models.paging import SMALL_HYBRID

LLAMA_8B, LLAMA_13B, LLAMA_70B = (
    SHAPES[name] for name in ("llama-3.1-8b", "llama-2-13b", "llama-3-70b")
)
H100 = GPUS["h100"]
LONG = 5000  # tokens of a context, which are more than an index chooses

models = st.sampled_from(list(SHAPES.values()))
gpus = st.sampled_from(list(GPUS.values()))
degrees = st.sampled_from((1, 2, 4, 8))
counts = st.integers(0, 2000)
steps = st.builds(
    StepFeatures,
    num_new_tokens=counts,
    num_attended=st.floats(0, 1e8),
    num_decoding=counts,
    num_decode_context=st.integers(0, 10**7),
)


def test_an_h100_breaks_even_near_295_tokens() -> None:
    assert H100.flops_per_byte() == pytest.approx(295, abs=1)
    assert Placement(LLAMA_70B, H100).break_even_batch == pytest.approx(295, abs=1)
    # Half the bytes and twice the FLOP/s.
    assert Placement(LLAMA_70B, H100, weights="fp8").break_even_batch == pytest.approx(295, abs=1)


def test_13b_on_an_h100_needs_8_ms_a_token() -> None:
    floor = Placement(LLAMA_13B, H100, efficiency=DATASHEET)
    assert floor.decode_step_s(1, 1024) == pytest.approx(8e-3, rel=0.02)


def test_floors_of_llama_8b_on_an_h200() -> None:
    """By hand: 15.01 GB of weights without the input table, 512 MiB of KV, 4.8 TB/s."""
    floor = Placement(LLAMA_8B, GPUS["h200"], efficiency=DATASHEET)
    assert floor.decode_step_s(1, 0) == pytest.approx(15.01e9 / 4.8e12, rel=1e-3)
    by_hand_s = (15.01e9 + 32 * 4096 * 131072) / 4.8e12
    assert floor.decode_step_s(32, 4096) == pytest.approx(by_hand_s, rel=1e-3)
    computed_s = 2 * 6.98e9 * 8192 / 989.4e12  # and attention: 4 x 32 layers x 4,096 wide
    attention_s = 4 * 32 * 4096 * 8192 * 8193 / 2 / 989.4e12
    assert floor.prefill_s(8192) == pytest.approx(computed_s + attention_s, rel=1e-3)


def test_memory_is_what_weights_leave() -> None:
    pair = Placement(LLAMA_70B, H100, 2)
    by_hand = (2 * 80e9 * 0.9 - 2 * LLAMA_70B.num_params) / (320 * 1024)
    assert pair.num_kv_tokens == int(by_hand)
    assert Placement(LLAMA_70B, H100, 1).num_kv_tokens == 0


def test_more_gpus_than_kv_heads_hold_copies() -> None:
    qwen = SHAPES["qwen2.5-7b"]  # 4 KV heads
    four, eight = Placement(qwen, H100, 4), Placement(qwen, H100, 8)
    assert eight.kv_nbytes_per_gpu_token == four.kv_nbytes_per_gpu_token
    assert four.kv_nbytes_per_gpu_token == qwen.kv_nbytes_per_token() / 4


@pytest.mark.parametrize(("gpu", "tokens_per_s"), [("h100", 15_220), ("h200", 17_744)])
def test_near_a_published_table(gpu: str, tokens_per_s: float) -> None:
    """TensorRT-LLM 1.0, Llama-3.1-8B, FP8, 1,000 tokens in and 1,000 out, at most load."""
    worker = Placement(LLAMA_8B, GPUS[gpu], weights="fp8", kv="fp8")
    batch = min(1024, worker.num_kv_tokens // 1500)
    request_s = 1000 * worker.decode_step_s(batch, 1500) / batch + worker.prefill_s(1000)
    assert 1000 / request_s == pytest.approx(tokens_per_s, rel=0.15)


def test_what_an_index_chooses_bounds_attention_but_not_its_own_work() -> None:
    """DeepSeek-V3.2: 61 layers choose 2,048 tokens with 64 heads of 128, on each of 8 GPUs."""
    shape, h200 = SHAPES["deepseek-v3.2"], GPUS["h200"]
    worker = Placement(shape, h200, 8, "fp8-block", efficiency=DATASHEET)
    scored_s = max(2 * 61 * 64 * 128 / h200.bf16_flops, 2 * 61 * 128 / h200.memory_bytes_per_s)
    sizes = 1024, 2048, 4096, 131072
    two, four, eight, many = (worker.decode_step_s(8, context) for context in sizes)
    assert many - eight == pytest.approx(8 * (131072 - 4096) * scored_s)
    attended_s = max(61 * 704 * 2 / h200.memory_bytes_per_s,
                     4 * 61 * 128 * 576 / (8 * h200.bf16_flops))  # fmt: skip
    assert four - two == pytest.approx(8 * 1024 * (scored_s + attended_s))
    assert eight - four == pytest.approx(8 * 2048 * scored_s)
    flop, nbytes = worker.work(StepFeatures(0, 0.0, 8, 8 * 131072))
    less, fewer = worker.work(StepFeatures(0, 0.0, 8, 8 * 4096))
    assert flop - less == 8 * (131072 - 4096) * 2 * 61 * 64 * 128
    assert nbytes - fewer == 8 * (131072 - 4096) * 2 * 61 * 128


def test_near_a_published_first_step() -> None:
    """vLLM with FlashAttention-3: a step of one short Llama-3.1-8B sequence takes 6.44 ms."""
    assert Placement(LLAMA_8B, H100).decode_step_s(1, 0) == pytest.approx(6.44e-3, rel=0.03)


@examples(20)
@given(model=models, gpu=gpus, degree=degrees, step=steps, factor=st.floats(1.0, 10.0))
def test_better_hardware_is_never_slower(
    model: ModelShape, gpu: Gpu, degree: int, step: StepFeatures, factor: float
) -> None:
    seconds = Placement(model, gpu, degree).step_s(step)
    for field in ("memory_bytes_per_s", "bf16_flops", "link_bytes_per_s"):
        better = msgspec.structs.replace(gpu, **{field: getattr(gpu, field) * factor})
        assert Placement(model, better, degree).step_s(step) <= seconds


@examples(20)
@given(model=models, gpu=gpus, degree=degrees, step=steps, more=steps)
def test_more_work_is_never_faster(
    model: ModelShape, gpu: Gpu, degree: int, step: StepFeatures, more: StepFeatures
) -> None:
    worker = Placement(model, gpu, degree)
    both = StepFeatures(
        step.num_new_tokens + more.num_new_tokens,
        step.num_attended + more.num_attended,
        step.num_decoding + more.num_decoding,
        step.num_decode_context + more.num_decode_context,
    )
    assert worker.step_s(both) >= worker.step_s(step) > 0
    assert worker.prefill_s(both.num_new_tokens + 1) >= worker.prefill_s(step.num_new_tokens + 1)


@examples(20)
@given(
    model=models,
    gpu=gpus,
    degree=degrees,
    batch=st.integers(1, 256),
    data=st.data(),
)
def test_the_prior_meets_the_roofline_at_its_ends_and_lies_near_it_between(
    model: ModelShape, gpu: Gpu, degree: int, batch: int, data: st.DataObject
) -> None:
    worker = Placement(model, gpu, degree)
    prior = worker.time_model(batch)
    StepTimeFit(prior)  # takes it: nothing is ruled out
    chunk = StepFeatures(CHUNK_TOKENS, attended(CHUNK_TOKENS, 3000), 0, 0)
    assert prior.step_s(chunk) == pytest.approx(worker.step_s(chunk), rel=1e-3)
    full = StepFeatures(0, 0.0, batch, batch * LONG)
    assert prior.step_s(full) == pytest.approx(worker.step_s(full), rel=1e-6)
    # A line is at most too high by what every step reads, and too low by the experts, if any.
    bytes_per_s = degree * gpu.memory_bytes_per_s * worker.efficiency.memory
    every_step_s = model.read_nbytes(0, worker.weights) / bytes_per_s
    experts_s = model.read_nbytes(10**6, worker.weights) / bytes_per_s - every_step_s
    assert (experts_s > 0) == (model.num_experts > 0)
    num_new, num_decoding = (data.draw(st.integers(0, most)) for most in (CHUNK_TOKENS, batch))
    part = StepFeatures(num_new, attended(num_new, LONG), 0, 0)
    few = StepFeatures(0, 0.0, num_decoding, num_decoding * LONG)
    for step in (part, few):
        too_high_s = prior.step_s(step) - worker.step_s(step)
        assert -experts_s - 1e-8 <= too_high_s <= every_step_s + 1e-8


def test_only_degrees_that_fit_are_offered() -> None:
    def degrees(like: Placement, num_tokens: int = 1) -> list[int]:
        return [each.num_gpus for each in placements(like, num_tokens)]

    assert degrees(Placement(LLAMA_70B, H100)) == [2, 4, 8]
    # In fp8 too, as its two tables of tokens stay in 16 bits: 72.7 GB, and there are 72.
    assert degrees(Placement(LLAMA_70B, H100, weights="fp8")) == [2, 4, 8]
    assert degrees(Placement(LLAMA_70B, GPUS["h200"], weights="fp8")) == [1, 2, 4, 8]
    assert degrees(Placement(LLAMA_70B, H100), 9000) == [4, 8]
    # 28 heads do not go over 8 GPUs.
    assert degrees(Placement(SHAPES["qwen2.5-7b"], H100)) == [1, 2, 4]
    # Nor do recurrent states go over several.
    assert degrees(Placement(replace(LLAMA_8B, config=SMALL_HYBRID), H100)) == [1]


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(NotEnoughMemory, match=r"811\.7 GB of weights.* 8 x h100 have room"):
        placements(Placement(SHAPES["llama-3.1-405b"], H100))
    with pytest.raises(NotEnoughMemory, match=r"would fit on 8 GPUs of 113 GB each, or try fp8"):
        placements(Placement(SHAPES["llama-3.1-405b"], H100))
    plain = SHAPES["llama-3.1-405b"]
    # No number of nodes helps one whose recurrent states cannot be divided.
    states: dict[str, Any] = {"delta_layers": (0,), "delta_heads": SMALL_HYBRID.delta_heads}
    hybrid = replace(plain, config=replace(plain.config, **states))
    with pytest.raises(NotEnoughMemory, match=r"on 1 GPU of \d+ GB each, or try fp8 weights\.$"):
        placements(Placement(hybrid, H100))
    # One that has 8 bits already is not told to take them.
    format = QuantizedFormat(name="fp8", layout="plain", dtype="F8_E4M3")
    packed = replace(plain, config=replace(plain.config, quantized=format))
    with pytest.raises(NotEnoughMemory, match=r"405b in fp8 has .* GB each\. `disagg serve") as why:
        placements(Placement(packed, GPUS["l40s"]))
    assert "try" not in why.value.message


FP8 = {"dtype": "F8_E4M3", "inputs": "static"}


def _quantized(name: str, **format: Any) -> ModelShape:
    shape, of_weights = SHAPES[name], QuantizedFormat(name="", layout="plain", **format)
    return replace(shape, config=replace(shape.config, quantized=of_weights))


@pytest.mark.parametrize(
    ("model", "format", "gpu", "products"),
    [
        ("llama-3.1-8b", FP8, "h100", "fp8"),
        ("llama-3.1-8b", {**FP8, "block": (128, 128)}, "h100", "fp8-block"),
        ("llama-3.1-8b", {**FP8, "block": (64, 64)}, "h100", "bf16"),
        ("llama-3.1-8b", {**FP8, "inputs": ""}, "h100", "bf16"),
        ("llama-3.1-8b", FP8, "a100-80gb", "bf16"),
        ("llama-3.1-8b", {"dtype": "I8", "inputs": "own"}, "a100-80gb", "int8"),
        ("llama-3.1-8b", {"dtype": "I8", "inputs": "own"}, "b200", "bf16"),
        ("qwen3-30b-a3b", FP8, "h100", "bf16"),
    ],
)
def test_what_a_checkpoints_products_are_planned_in(
    model: str, format: dict[str, Any], gpu: str, products: str
) -> None:
    shape = _quantized(model, **format)
    worker = placements(Placement(shape, GPUS[gpu]))[0]
    assert worker.products == products
    share = efficiency_of(GPUS[gpu], products).matmul
    assert worker.efficiency.matmul == share
    if model == "llama-3.1-8b":  # by hand: 6.98 billion parameters, where nothing is read
        twice = 2.0 if products != "bf16" else 1.0
        by_hand_s = 2 * 6.98e9 * 8192 / (twice * GPUS[gpu].bf16_flops * share)
        computed_s = worker.prefill_s(8192, 8192) - attended(8192, 0) * worker.attended_s
        assert computed_s == pytest.approx(by_hand_s + worker.efficiency.step_s, rel=2e-3)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(StartupError, match=r"'h300' is not a known GPU; known are h100,"):
        gpu_of("h300")
    with pytest.raises(StartupError, match=r"'avian' is not a known link; known are nvlink,"):
        link_of("avian")
    with pytest.raises(StartupError, match=r"a100-80gb has no FP8 .* use one of h100,"):
        placements(Placement(LLAMA_8B, GPUS["a100-80gb"], weights="fp8"))
