"""The engine flags of `disagg serve`, some of which `disagg doctor` has too. Names follow vLLM."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any


def json_object(text: str) -> Any:
    """Parse JSON; the configuration checks its content. Raises `argparse.ArgumentTypeError`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


def number(text: str) -> int:
    """Parse an integer with one of vLLM's suffixes: 8k is 8000, 8K is 8192, 1.5m is 1500000.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    match = re.fullmatch(r"(-?[0-9]+)([kKmMgGtT]?)|([0-9]+\.[0-9]+)([kmgt])", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number such as 8192, 8K (8 * 1024) or 8k (8 * 1000)"
        )
    suffix = match[2] or match[4] or ""
    unit = (1024 if suffix.isupper() else 1000) ** " kmgt".index(suffix.lower() or " ")
    return int(Decimal(match[1] or match[3]) * unit)


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags that decide how much memory a model needs, and how much of it is for KV."""
    group.add_argument(
        "--dtype",
        default="auto",
        help="data type of weights and activations: auto, float32, bfloat16 or float16 (default:"
        " auto)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="data type of the KV cache: auto (the model's dtype), float32, bfloat16, float16, fp8"
        " (e4m3), int8 or int4. The last three store one scale per token and head; int4 changes"
        " answers (docs/notebook/kv-formats.md)",
    )
    group.add_argument(
        "--quantization",
        choices=("int8", "int4", "fp8", "packed"),
        help="quantise the weights while they are loaded: int8 or (on GPUs) fp8 with one scale per"
        " row of a matrix, int4 with one scale per 32 values. packed (on CPUs, for dense models)"
        " keeps the weights of a quantised checkpoint packed, as GPU workers always do"
        " (docs/models.md#quantised-weights)",
    )
    group.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda, or auto, which uses GPUs if there are any (default: auto)",
    )
    group.add_argument(
        "--max-model-len",
        type=number,
        help="context length: largest number of tokens of a prompt and its answer together,"
        " such as 8192, 8K (8 * 1024) or 8k (8 * 1000) (default: the model's limit)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="fraction of a GPU's memory that all workers on it may use together (default: 0.9)",
    )


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    add_model_arguments(group)
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="RANKS",
        help="number of GPUs (or of processes, on CPUs) that each worker splits its model over"
        " (docs/models.md#several-gpus-a-worker; default: 1)",
    )
    flags = "--prefill-tensor-parallel-size", "--decode-tensor-parallel-size"
    _add_for_pools(group, flags, "RANKS")
    group.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="use expert parallelism for the layers of a mixture of experts: each GPU of a worker"
        " holds whole experts instead of a slice of every expert (docs/models.md#whole-experts)",
    )
    group.add_argument(
        "--nnodes",
        type=int,
        default=1,
        metavar="NODES",
        help="number of nodes of the Ray cluster over which the ranks of each worker are spread"
        " (default: 1)",
    )
    _add_for_pools(group, ("--prefill-nnodes", "--decode-nnodes"), "NODES")
    group.add_argument(
        "--num-gpus-per-worker",
        type=float,
        metavar="SHARE",
        help="share of a GPU that each worker takes: with 0.5 two workers share a GPU and each"
        " gets half of its memory (default: 1)",
    )
    group.add_argument(
        "--block-size",
        type=int,
        help="number of tokens in a KV block (default: 16 on a CPU, 64 on a GPU)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        help="largest number of sequences in one step (default: 64 on a CPU; on a GPU 256 to 512"
        " depending on its speed, and fewer, but at least 64, if memory is short)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=number,
        help="largest number of tokens in one step (default: 1024 on a CPU; on a GPU 2048 to 8192"
        " depending on its speed and memory)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=number,
        help="size of the KV cache of each rank, in bytes (default on a GPU: what"
        " --gpu-memory-utilization leaves)",
    )
    group.add_argument(
        "--kv-offloading-size",
        type=float,
        default=0.0,
        help="host memory per worker for evicted KV blocks, in GiB (default: 0)",
    )
    group.add_argument(
        "--num-gpu-blocks-override",
        type=int,
        help="number of KV blocks of each worker, instead of a number computed from its memory",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV cache of prefixes that requests share (default: enabled)",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="do not use CUDA graphs on GPUs; launch each kernel separately",
    )
    group.add_argument(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help="speculative decoding by prompt lookup (n-grams), for answers that repeat parts of"
        " their prompt; not for requests with penalties or structured output:"
        """ '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'""",
    )
    group.add_argument(
        "--num-threads",
        type=int,
        help="number of torch threads of each worker; on a GPU it only loads weights with them, and"
        " on a CPU small steps use fewer (default: the number of cores of a node divided by the"
        " number of workers on it)",
    )


def _add_for_pools(group: argparse._ArgumentGroup, flags: Sequence[str], metavar: str) -> None:
    """Add flags that override the flag added before them, for one pool each."""
    for flag in flags:
        role = flag[2:].split("-")[0]
        group.add_argument(
            flag, type=int, metavar=metavar, help=f"the same for {role} workers only"
        )
