"""The flags of `disagg serve`, and the deployment that they (or a file) describe."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from disagg.config import EngineConfig, ServeConfig, parse_config
from disagg.doctor.findings import Report
from disagg.doctor.machine import read_memory
from disagg.errors import StartupError

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


STORE_SHARE = 16  # of the memory that is free goes to the embedded store
LEAST_STORE_NBYTES, MOST_STORE_NBYTES = 32 << 20, 1 << 30

# Flags of the command itself, and not of what it deploys: these go beside --config.
OF_THE_COMMAND = ("config", "ray_address", "haproxy", "log_dir", "log_format")


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
        help=f"model directories or bundled models, small to large (default: {DEFAULT_MODEL})",
    )
    _add_serving_arguments(parser.add_argument_group("serving"))
    _add_engine_arguments(parser.add_argument_group("engine (names follow vLLM)"))
    _add_cluster_arguments(parser.add_argument_group("cluster"))


def _add_serving_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="where HTTP listens")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--api-key", default=os.environ.get("DISAGG_API_KEY"))
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
    group.add_argument(
        "--tpot-slo-s",
        type=float,
        default=0.2,
        help="seconds from token to token that decode pools are scaled by (default: 0.2)",
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
        " quality (docs/performance.md)",
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
        help="network devices over which KV moves, with commas between; whoever reaches them can"
        " write into workers (default: that of the node's own address; on one machine: lo)",
    )
    group.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="HAProxy in front of the ingress instead of Serve's Python proxy",
    )


def _store_nbytes(wanted: int | None) -> int:
    """It fills up within minutes, whatever its size, so it must leave room for the workers."""
    if wanted is not None:
        return wanted
    _, available = read_memory()
    return max(LEAST_STORE_NBYTES, min(MOST_STORE_NBYTES, available // STORE_SHARE))


def _refuse_beside_config(arguments: argparse.Namespace) -> None:
    """Raises `StartupError` if a flag says what the file says too, or leaves to its default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = {
        dest: word if isinstance(word, str) else "MODEL"
        for dest, word in getattr(arguments, "given", {}).items()
    }
    for dest, default in vars(parser.parse_args([])).items():  # switches note nothing
        if getattr(arguments, dest) != default:
            given.setdefault(dest, f"--{dest.replace('_', '-')}")
    beside = sorted(word for dest, word in given.items() if dest not in OF_THE_COMMAND)
    if beside:
        raise StartupError(
            f"--config describes the whole deployment, so {', '.join(beside)} would do nothing; put"
            f" it into {arguments.config}, or leave --config out.",
            param="config",
        )


def config_from_arguments(arguments: argparse.Namespace) -> ServeConfig:
    """Flags (or the file given by --config) as a checked configuration."""
    return parse_config(raw_config(arguments))


def raw_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same as plain data, with nothing in it that was not asked for."""
    if arguments.config:
        _refuse_beside_config(arguments)
        raw = _read_config_file(Path(arguments.config))
        http = raw.get("http") or {}
        if (
            arguments.api_key
            and isinstance(http, dict)
            and not http.keys() & {"api_key", "api_keys"}
        ):
            raw["http"] = {**http, "api_key": arguments.api_key}  # of the environment
        return {**raw, "cluster_key": raw.get("cluster_key") or _new_key()}
    models = arguments.model or [DEFAULT_MODEL]
    names = arguments.served_model_name
    if names and len(names) != len(models):
        raise StartupError(
            f"{len(models)} models but {len(names)} served names were given; give one per model.",
            param="served_model_name",
        )
    if arguments.num_threads is None and arguments.ray_address is None:
        # All workers are on this machine; more threads than cores cost several times their work.
        sizes = [size.most if size else 1 for size in (arguments.prefill, arguments.decode)]
        num_workers = len(models) * sum(sizes)
        arguments.num_threads = max(1, (os.cpu_count() or 1) // max(1, num_workers))
    engine = {
        key: value
        for key in EngineConfig.__struct_fields__
        if (value := getattr(arguments, key, None)) is not None  # not every setting has a flag
    }
    tiers = [
        {
            "model": model,
            "served_model_name": name,
            "prefill": _pool(arguments.prefill, arguments.num_gpus_per_worker),
            "decode": _pool(arguments.decode, arguments.num_gpus_per_worker),
            "engine": engine,
            "chat_template": arguments.chat_template,
            "ttft_slo_s": arguments.ttft_slo_s,
            "tpot_slo_s": arguments.tpot_slo_s,
        }
        for model, name in zip(models, names or [None] * len(models), strict=True)
    ]
    api_keys, tenants = _tenants(arguments.tenants)
    return {
        "tiers": tiers,
        "tenants": tenants,
        "cascade": _cascade_section(arguments.cascade),
        "http": {
            "host": arguments.host,
            "port": arguments.port,
            "api_key": arguments.api_key,
            "api_keys": api_keys,
        },
        "num_ingress": arguments.ingress,
        "max_num_workers": arguments.max_workers,
        "drain_s": arguments.drain_s,
        "transport": arguments.transport,
        "transfer_prior": _transfer_prior(arguments.doctor_report),
        "transfer_interface": arguments.transfer_interface,
        "redis_url": arguments.redis_url,
        "cold_tier_nbytes": 0 if arguments.no_redis else _store_nbytes(arguments.cold_tier_bytes),
        "link_host": None if arguments.ray_address else "127.0.0.1",
        "cluster_key": _new_key(),
    }


def _pool(size: PoolSize | None, num_gpus: float | None) -> dict[str, Any]:
    """A scaled pool begins with its minimum, or with one worker that shows how fast it is."""
    gpus = {} if num_gpus is None else {"num_gpus": num_gpus}
    if size is None:
        return gpus
    if size.least == size.most:
        return {"num_replicas": size.least, **gpus}
    limits = {"min_replicas": size.least, "max_replicas": size.most}
    return {"num_replicas": max(1, size.least), "autoscaling": limits, **gpus}


def _transfer_prior(path: str | None) -> dict[str, float] | None:
    if path is None:
        return None
    try:
        report = msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(
            f"{path} is no report of `disagg doctor --json`: {error}.", param="doctor_report"
        ) from error
    prior = report.transfer_prior
    if prior is None:
        raise StartupError(
            f"{path} has no measured KV transfer in it: run `disagg doctor --json` without"
            " --no-transfers, and mend what it finds.",
            param="doctor_report",
        )
    return {"latency_s": prior.latency_s, "bytes_per_s": prior.bytes_per_s}


def _tenants(file: str | None) -> tuple[Any, Any]:
    """The sections `api_keys` and `tenants` of a file."""
    if file is None:
        return {}, {}
    raw = _read_config_file(Path(file))
    if "api_keys" not in raw or not set(raw) <= {"api_keys", "tenants"}:
        raise StartupError(
            f"{file} must hold api_keys, may hold tenants, and nothing else.", param="tenants"
        )
    return raw["api_keys"], raw.get("tenants") or {}


def _cascade_section(file: str | None) -> Any:
    """None: no cascade; "": that of the bundled models; else a file with a `cascade` section."""
    if not file:
        return None if file is None else {}
    raw = _read_config_file(Path(file))
    if set(raw) != {"cascade"}:
        raise StartupError(
            f"{file} must hold a cascade section and nothing else; disagg cascade calibrate writes"
            " one.",
            param="cascade",
        )
    return raw["cascade"]


def _new_key() -> str:
    return secrets.token_hex(32)


def _read_config_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise StartupError(f"Cannot read the configuration {path}: {error}.", param="config") from (
            error
        )
    if not isinstance(raw, dict):
        raise StartupError(f"The configuration {path} is not a mapping.", param="config")
    return raw
