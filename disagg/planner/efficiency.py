"""Which shares of the datasheets' figures engines reach, by engine, format of weights and GPUs.

Only the share of the matrix units differs in the table: it is what published runs differ in, and
one figure can be fitted to one run. `published.py` has these runs, `python -m bench.planner` shows
how well the figures predict the others.
"""

from __future__ import annotations

import msgspec

from disagg.errors import StartupError
from disagg.planner.gpus import CPU_CORE, Gpu


class Efficiency(msgspec.Struct, frozen=True):
    """Shares of the datasheet's figures that a good engine reaches, and what no datasheet has."""

    memory: float
    matmul: float
    attention: float
    link: float
    step_s: float  # of every step: launches, norms, sampling, the host
    sequence_s: float  # of every decoding sequence in a step: sampling and bookkeeping
    all_reduce_s: float  # latency of one


DATASHEET = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)  # the floor: nothing can be faster

PLANNED = Efficiency(
    # FlashAttention-3's slope over the context is 0.895 of an H100's bandwidth (vLLM's published
    # runs of 2026-04-22, Llama-3.1-8B).
    memory=0.9,
    # Assumed: a large bf16 product reaches 0.8, and a layer's norms, activations and tails of waves
    # take another fifth of its time.
    matmul=0.66,
    # FlashAttention-3 reports up to 0.75 for long prompts, and less for short ones.
    attention=0.6,
    # Ring all-reduces of some MB, as usually seen of NCCL over NVLink.
    link=0.7,
    # The same vLLM runs start at 6.44 ms where reading the weights takes 4.98 ms at 0.9.
    step_s=1.5e-3,
    # With this, the model meets TensorRT-LLM's published table for Llama-3.1-8B (docs/planning.md).
    sequence_s=1e-5,
    # One-shot all-reduces over NVLink take 8 to 15 us, whatever their size below 100 KB.
    all_reduce_s=1e-5,
)

# Of `CPU_CORE`, whose figures are reached already: what torch's calls take in a step, and what a
# sequence adds; attention reaches half of the products' speed.
ON_CPU = Efficiency(
    memory=1.0, matmul=1.0, attention=0.5, link=1.0, step_s=1e-3, sequence_s=2e-4, all_reduce_s=0.0
)

# Of the matrix units' datasheet figure for the format that they multiply in. Each is fitted to the
# one run of `published.RUNS` that says so: the one with the most prompt tokens for an answer's.
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
    """What that engine reaches with weights of that format on that GPU.

    Args:
        weights: as `ModelShape.products_in` has it.
        engine: one of `ENGINES`; empty: what a good one reaches. That is assumed for bf16, and for
            other formats the best of those published, on this family of GPUs if there are any.

    Raises:
        StartupError: no run of that engine is known for this format and family.
    """
    if engine:
        return msgspec.structs.replace(PLANNED, matmul=_reached(gpu, weights, engine))
    if gpu is CPU_CORE:
        return ON_CPU
    if weights == "bf16":
        return PLANNED
    known = [(family == gpu.family, share) for (_, kind, family), share in MATMUL.items()
             if kind == weights]  # fmt: skip
    return msgspec.structs.replace(PLANNED, matmul=max(known)[1])


def _reached(gpu: Gpu, weights: str, engine: str) -> float:
    share = MATMUL.get((engine, weights, gpu.family))
    if share is None:
        known = ", ".join(f"{kind} on {family}" for name, kind, family in MATMUL if name == engine)
        raise StartupError(
            f"No published run of {engine} is known with {weights} weights on {gpu.name}"
            f" ({gpu.family or 'no known family'}); known are {known}. Leave --engine out to plan"
            " with what a good engine reaches.",
            param="engine",
        )
    return share
