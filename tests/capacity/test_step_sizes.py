"""Steps on a GPU are as small as nearly full speed allows."""

from __future__ import annotations

import pytest

from disagg.capacity.gpus import GPUS
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import SHAPES
from disagg.capacity.step_sizes import CONTEXT_TOKENS, step_sizes
from disagg.engine.device.memory_plan import LARGEST_STEP

DRIVERS_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
}


@pytest.mark.parametrize(
    ("called", "model", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "qwen3-8b", (256, 8192)),
        ("NVIDIA H100 80GB HBM3", "qwen3-0.6b", (320, 8192)),
        # Few tokens of a step share an expert, so twice as many sequences read hardly more.
        ("NVIDIA H100 80GB HBM3", "qwen3-30b-a3b", (480, 8192)),
        ("NVIDIA A100-SXM4-80GB", "qwen3-8b", (256, 4096)),
        ("NVIDIA L40S", "qwen3-8b", (320, 4096)),
        ("NVIDIA L4", "qwen3-8b", (288, 2048)),
    ],
)
def test_sizes_of_known_gpus(called: str, model: str, expected: tuple[int, int]) -> None:
    assert step_sizes(SHAPES[model], called) == expected


@pytest.mark.parametrize("called", DRIVERS_NAMES)
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_little_throughput_is_lost(model: str, called: str) -> None:
    placement = Placement(SHAPES[model], GPUS[DRIVERS_NAMES[called]])
    num_seqs, num_tokens = step_sizes(SHAPES[model], called)
    most_seqs, most_tokens = LARGEST_STEP
    assert 256 <= num_seqs <= most_seqs and 2048 <= num_tokens <= most_tokens
    step_s = placement.decode_step_s(num_seqs, CONTEXT_TOKENS)
    largest_s = placement.decode_step_s(most_seqs, CONTEXT_TOKENS)
    assert num_seqs / step_s >= 0.95 * most_seqs / largest_s
    prompt_s = placement.prefill_s(most_tokens, num_tokens)
    assert prompt_s <= placement.prefill_s(most_tokens, most_tokens) / 0.995


def test_an_unknown_gpu_has_the_largest_steps() -> None:
    assert step_sizes(SHAPES["qwen3-8b"], "NVIDIA GeForce RTX 4090") == LARGEST_STEP
    assert step_sizes(SHAPES["qwen3-8b"], "") == LARGEST_STEP


def test_smaller_kv_lets_more_sequences_pay() -> None:
    shape, called = SHAPES["qwen3-14b"], "NVIDIA H200"
    assert step_sizes(shape, called, "fp8") >= step_sizes(shape, called, "auto")
    assert step_sizes(shape, called, "float16") == step_sizes(shape, called, "bfloat16")
