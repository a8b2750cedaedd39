"""The flags of `disagg serve`. `serve_config` turns them into a configuration."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from disagg.cli.engine_arguments import add_engine_arguments, add_setting
from disagg.config import HttpConfig, ServeConfig, TierConfig
from disagg.errors import StartupError
from disagg.settings import settings_of
from disagg.text.answer_reader import NAMES as REASONING_PARSERS
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

_SWITCH = {"1": True, "true": True, "0": False, "false": False}
# Flags of the command itself rather than of the deployment.
OF_THE_COMMAND = (
    *("config", "ray_address", "replace", "haproxy", "restart", "log_dir", "log_format"),
    *("verb", "run", "words", "action", "json", "files", "all"),  # of `main` and `disagg config`
)


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


def lora_module(text: str) -> tuple[str, str]:
    """Parse `name=path`, or vLLM's JSON of both. Raises `argparse.ArgumentTypeError`."""
    name, equals, path = text.partition("=")
    if text.startswith("{"):
        try:
            raw = msgspec.json.decode(text, type=dict[str, str])
            name, equals, path = raw["name"], "=", raw["path"]
        except (msgspec.MsgspecError, KeyError):
            equals = ""
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither name=path nor JSON with a name and a path"
        )
    return name, path


def listed(text: str) -> tuple[str, ...]:
    """Parse a JSON list or names separated by commas. Raises `argparse.ArgumentTypeError`."""
    if not text.startswith("["):
        return tuple(text.split(","))
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of names") from error


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


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags that describe a deployment, by `dest`."""
    return {
        each.dest: each
        for each in parser._actions
        if each.option_strings and each.help != argparse.SUPPRESS
        if each.dest not in (*OF_THE_COMMAND, "help")
    }


def variable_of(flag: argparse.Action) -> str:
    """The environment variable that stands for a flag."""
    return "DISAGG_" + flag.option_strings[0].removeprefix("--").replace("-", "_").upper()


def given_in(
    environment: Mapping[str, str], flags: Mapping[str, argparse.Action]
) -> dict[str, Any]:
    """The values of flags in environment variables, by `dest`.

    Raises:
        StartupError: a variable has no valid value.
    """
    given = {}
    for dest, flag in flags.items():
        text = environment.get(variable_of(flag))
        # Kubernetes sets DISAGG_PORT=tcp://... in pods beside a service that is named disagg.
        if text is not None and not text.startswith("tcp://"):
            try:
                given[dest] = _value(flag, text)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise StartupError(f"{variable_of(flag)} in the environment: {error}") from error
    return given


def _value(flag: argparse.Action, text: str) -> Any:
    """Raises `ValueError` or `argparse.ArgumentTypeError`."""
    if flag.nargs == 0:  # a switch
        if text.lower() not in _SWITCH:
            raise ValueError(f"{text!r} is neither 1 (true) nor 0 (false)")
        return _SWITCH[text.lower()]
    if flag.choices is not None and text not in flag.choices:
        raise ValueError(f"{text!r} is none of {', '.join(flag.choices)}")
    kind: Any = flag.type or str
    return [kind(word) for word in text.split()] if flag.nargs == "*" else kind(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = settings_of(TierConfig)["model"].description
    parser.add_argument(
        "model",
        nargs="*",
        help=f"one or more models, from small to large: {model} (default: {DEFAULT_MODEL})",
    )
    parser.epilog = (
        "environment: DISAGG_CPU_KERNELS=torch makes CPU workers decode without the compiled decode"
        " step."
    )
    _add_serving_arguments(parser.add_argument_group("serving"))
    add_engine_arguments(parser.add_argument_group("engine (names follow vLLM)"))
    _add_cluster_arguments(parser.add_argument_group("cluster"))
    # What describes a deployment is in the namespace only if it is given: a file may say it, too.
    for action in parser._actions:
        if action.dest not in OF_THE_COMMAND:
            action.default = argparse.SUPPRESS
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag in NOT_SUPPORTED:
        parser.add_argument(flag, action=_OfVllm, nargs="?", **hidden)
    for flag in NOT_NEEDED:
        parser.add_argument(flag, action=_OfVllm, nargs=0, **hidden)


def _add_serving_arguments(group: argparse._ArgumentGroup) -> None:
    for name in ("host", "port", "ssl_certfile", "ssl_keyfile"):
        add_setting(group, HttpConfig, name)
    add_setting(group, HttpConfig, "api_key")
    add_setting(group, HttpConfig, "api_keys_file", metavar="FILE")
    add_setting(group, HttpConfig, "metrics_key", metavar="KEY")
    add_setting(group, HttpConfig, "ui")
    add_setting(group, HttpConfig, "allowed_origins", type=listed, metavar="ORIGINS")
    add_setting(group, HttpConfig, "allowed_media_domains", type=listed, metavar="HOSTS")
    add_setting(group, HttpConfig, "files_directory", metavar="DIRECTORY")
    add_setting(group, HttpConfig, "files_nbytes", flag="--files-bytes")
    add_setting(group, ServeConfig, "insecure")
    group.add_argument(
        "--tenants",
        metavar="FILE",
        help="YAML file with several tenants: `api_keys` maps each name to its key, `tenants` to"
        " its limits (docs/admission.md)",
    )
    add_setting(group, TierConfig, "ttft_slo_s", type=seconds_or_none)
    for name in ("revision", "served_model_name"):
        more = "; one per model, in the same order"
        add_setting(group, TierConfig, name, nargs="*", default=[], more=more)
    group.add_argument(
        "--cascade",
        nargs="?",
        const="",
        metavar="FILE",
        help='answer requests for the model "auto" with the smallest model that is confident in'
        " its answer. `disagg cascade calibrate` writes FILE (default: calibrated values for the"
        " bundled models, a general threshold for others)",
    )
    add_setting(
        group,
        TierConfig,
        "lora_modules",
        nargs="+",
        type=lora_module,
        default=[],
        metavar="NAME=PATH",
        more="; several, if one model is served",
    )
    add_setting(group, TierConfig, "chat_template")
    for name, names in (
        ("tool_call_parser", TOOL_CALL_PARSERS),
        ("reasoning_parser", REASONING_PARSERS),
    ):
        every = ": " + ", ".join(names)
        add_setting(group, TierConfig, name, choices=names, metavar="NAME", more=every)
    add_setting(group, TierConfig, "tpot_slo_s")
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}",
            type=pool_size,
            metavar="WORKERS",
            help=f"number of {role} workers per model: 2, or 1..4 to scale with the load (default:"
            + (" 1, or 0 if there are too few GPUs)" if role == "prefill" else " 1)"),
        )
    add_setting(group, ServeConfig, "max_num_workers", flag="--max-workers")
    add_setting(group, ServeConfig, "num_ingress", flag="--ingress")
    add_setting(group, ServeConfig, "drain_s")
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
        help="YAML or JSON file that describes a deployment, or a YAML file of Ray Serve;"
        " environment variables (DISAGG_PORT for --port) replace its settings, and flags replace"
        " both",
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
    add_setting(group, ServeConfig, "redis_url")
    group.add_argument(
        "--no-redis", action="store_true", help="do not store evicted KV blocks in Redis"
    )
    add_setting(group, ServeConfig, "cold_tier_nbytes", flag="--cold-tier-bytes", default=None)
    add_setting(group, ServeConfig, "transport")
    group.add_argument(
        "--doctor-report",
        metavar="FILE",
        help="file with the output of `disagg doctor --json`; the router predicts KV transfers with"
        " its measurements until workers have measured their own",
    )
    add_setting(group, ServeConfig, "transfer_interface", metavar="DEVICE")
    group.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put HAProxy in front of the ingresses instead of Ray Serve's Python proxy (default:"
        " enabled)",
    )
