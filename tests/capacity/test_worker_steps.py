"""A worker's first belief about its speed is of the right size, on whatever it runs, and its steps
on a GPU are as small as nearly full speed allows."""

from __future__ import annotations

import pytest

from disagg.capacity.gpus import gpu_called
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import SHAPES, read_shape
from disagg.capacity.worker_steps import CONTEXT_TOKENS, step_sizes, step_times
from disagg.config import ASSETS
from disagg.engine.device.memory_plan import LARGEST_STEP
from disagg.time_model import StepTimeFit


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_drivers_names_are_known(called: str, name: str | None) -> None:
    gpu = gpu_called(called)
    assert (gpu and gpu.name) == name


def test_ranks_with_whole_experts_wait_for_the_busiest() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    for name in ("", "NVIDIA H100 80GB HBM3"):
        even, _ = step_times(shape, name, 8)
        whole, _ = step_times(shape, name, 8, expert_parallel=True)
        assert (
            even.decode_step_s(8, 800)
            < whole.decode_step_s(8, 800)
            < 2.5 * (even.decode_step_s(8, 800))
        )
    alone = step_times(shape, "NVIDIA H100 80GB HBM3")
    assert step_times(shape, "NVIDIA H100 80GB HBM3", expert_parallel=True) == alone


def test_a_gpu_begins_with_its_own_roofline() -> None:
    shape = SHAPES["llama-3-8b"]
    fast, of_fast = step_times(shape, "NVIDIA H200")
    slow, of_slow = step_times(shape, "NVIDIA L4")
    other, of_other = step_times(shape, "NVIDIA GeForce RTX 4090")
    assert (of_fast, of_slow) == ("h200", "l4")
    assert "a100-80gb" in of_other and "RTX 4090" in of_other
    # Decoding reads 15 GB of weights: at 4.8 TB/s and at 0.3 TB/s.
    assert 0.004 < fast.decode_step_s(1, 1000) < 0.007
    assert 0.05 < slow.decode_step_s(1, 1000) < 0.08
    assert slow.prefill_s(1000) > other.prefill_s(1000) > fast.prefill_s(1000)


def test_a_bundled_model_on_a_cpu_is_within_a_few_times_of_what_was_measured() -> None:
    """docs/notebook/routing.md, "Time model": 2.6 ms a step, 43 us a prompt token."""
    times, whose = step_times(read_shape(str(ASSETS / "demo-large")), "")
    assert "CPU" in whose
    assert 1e-3 < times.decode_step_s(1, 100) < 8e-3
    assert 20e-3 < times.prefill_s(1000) < 150e-3


@pytest.mark.parametrize("device_name", ["", "NVIDIA H100 80GB HBM3", "unheard of"])
def test_a_fit_can_begin_with_it(device_name: str) -> None:
    for shape in SHAPES.values():
        times, _ = step_times(shape, device_name)
        assert StepTimeFit(times).model == times


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


@pytest.mark.parametrize(
    "called",
    ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA L4"],
)
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_little_throughput_is_lost(model: str, called: str) -> None:
    gpu = gpu_called(called)
    assert gpu is not None
    placement = Placement(SHAPES[model], gpu)
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
