"""The shares of datasheet figures that engines reach, by engine, weight format and GPU family.

Only the share of the matrix units' FLOP/s depends on these, because published runs differ mainly in
it, and one figure can be fitted to one run. `tests/tools/plan/published_runs.py` has these runs and
others, which the figures predict.
"""

from __future__ import annotations

import msgspec

from disagg.capacity.gpus import CPU_CORE, Gpu
from disagg.errors import StartupError


class Efficiency(msgspec.Struct, frozen=True):
    """Shares of datasheet figures that a good engine reaches, and times that no datasheet has."""

    memory: float
    matmul: float
    attention: float
    link: float
    step_s: float  # fixed time of every step: launches, norms, sampling, the host
    sequence_s: float  # time of each decoding sequence in a step: sampling and bookkeeping
    all_reduce_s: float  # latency of one all-reduce


DATASHEET = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)  # the floor: nothing can be faster

PLANNED = Efficiency(
    # FlashAttention-3's slope over the context is 0.895 of an H100's bandwidth (vLLM's published
    # runs of 2026-04-22, Llama-3.1-8B).
    memory=0.9,
    # Assumption: a large bf16 product reaches 0.8, and a layer's norms, activations and partly
    # filled waves take another fifth of its time.
    matmul=0.66,
    # FlashAttention-3 reports up to 0.75 for long prompts, and less for short ones.
    attention=0.6,
    # Ring all-reduces of some MB, as usually measured for NCCL over NVLink.
    link=0.7,
    # The same vLLM runs start at 6.44 ms where reading the weights takes 4.98 ms at 0.9.
    step_s=1.5e-3,
    # With this value, the predictions match TensorRT-LLM's published table for Llama-3.1-8B
    # (docs/planning.md).
    sequence_s=1e-5,
    # One-shot all-reduces over NVLink take 8 to 15 us, whatever their size below 100 KB.
    all_reduce_s=1e-5,
)

# For `CPU_CORE`, whose figures are measured ones: the time of torch's calls in a step, and the time
# that a sequence adds. Attention reaches half of the speed of matrix products.
ON_CPU = Efficiency(
    memory=1.0, matmul=1.0, attention=0.5, link=1.0, step_s=1e-3, sequence_s=2e-4, all_reduce_s=0.0
)

# Shares of the matrix units' datasheet FLOP/s for the format in which they multiply. Each is fitted
# to the one run of `published_runs.RUNS` with `is_fitted`: the run with the most prompt tokens per
# token of an answer.
MATMUL = {
    # engine, format of the weights, family of GPUs
    ("tensorrt-llm", "bf16", "ampere"): 0.71,
    ("vllm", "bf16", "ampere"): 0.55,
    ("vllm", "bf16", "hopper"): 0.31,
    ("tensorrt-llm", "fp8", "hopper"): 0.56,
    ("tensorrt-llm", "fp8-block", "hopper"): 0.20,
    ("sglang", "fp8-block", "hopper"): 0.22,
    ("tensorrt-llm", "mxfp4", "hopper"): 0.49,
    ("vllm", "mxfp4", "hopper"): 0.22,
    ("tensorrt-llm", "fp4", "blackwell"): 0.40,
    ("tensorrt-llm", "fp4-experts", "blackwell"): 0.07,
    ("tensorrt-llm", "mxfp4", "blackwell"): 0.79,
}
ENGINES = tuple(sorted({engine for engine, _, _ in MATMUL}))


def efficiency_of(gpu: Gpu, weights: str, engine: str = "") -> Efficiency:
    """The efficiency of an engine with weights of a format on a GPU.

    Args:
        weights: format, as from `ModelShape.products_in`. int8 is planned as fp8.
        engine: one of `ENGINES`; empty: a good engine. Its efficiency is an assumption for bf16,
            and the best published one for other formats, on this family of GPUs if there is any.

    Raises:
        StartupError: no run of that engine is known for this format and family.
    """
    if engine:
        return msgspec.structs.replace(PLANNED, matmul=_reached(gpu, weights, engine))
    if gpu is CPU_CORE:
        return ON_CPU
    if weights == "bf16":
        return PLANNED
    alike = "fp8" if weights == "int8" else weights
    known = [(family == gpu.family, share) for (_, kind, family), share in MATMUL.items()
             if kind == alike]  # fmt: skip
    return msgspec.structs.replace(PLANNED, matmul=max(known)[1])


def _reached(gpu: Gpu, weights: str, engine: str) -> float:
    share = MATMUL.get((engine, weights, gpu.family))
    if share is None:
        known = ", ".join(f"{kind} on {family}" for name, kind, family in MATMUL if name == engine)
        raise StartupError(
            f"No published run of {engine} is known with {weights} weights on {gpu.name}"
            f" ({gpu.family or 'no known family'}); known are {known}. Leave --engine out to plan"
            " with the efficiency of a good engine.",
            param="engine",
        )
    return share
