"""Checks of a tier's configuration and model before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from disagg.capacity.worker_steps import largest_step
from disagg.config import EngineConfig, TierConfig
from disagg.engine.device.check import check_engine
from disagg.engine.device.choices import choose_device, choose_dtype, why_not_compiled
from disagg.errors import StartupError
from disagg.host import usable_cores
from disagg.kernels.cpu.library import find_step
from disagg.messages import Role
from disagg.models.adapter import configured_adapters
from disagg.models.description import ModelDescription, describe_foreign, describe_model
from disagg.models.model_config import ModelConfig
from disagg.worker.vllm.arguments import check_settings, check_version

_ABOUT = 1.1  # tolerance for padding of weights that stay quantised


def check_tier(
    tier: TierConfig,
    gpu_nbytes: int | None = None,
    is_here: bool = True,
    gpu_name: str = "",
    tell: Callable[[str], object] = lambda sentence: None,
) -> int:
    """Read the model's description, and check that the model fits into memory.

    Args:
        gpu_nbytes: memory of each GPU; None if unknown here, so that each worker checks its own.
        is_here: whether workers run on this machine.
        gpu_name: name of the GPU from the driver; "" if unknown.
        tell: called with sentences for the user.

    Returns:
        Bytes of host memory that its workers take for KV and for the largest step, as far as known
        here.

    Raises:
        StartupError: the tier cannot be served; also `ModelError` and `NotEnoughMemory`.
    """
    if tier.engine.backend == "vllm":  # which knows its models and plans its memory itself
        check_settings(tier.engine)
        if is_here:
            check_version()
        describe_foreign(tier.directory, tier.engine.engine_args)
        return 0
    model = describe_model(tier.directory)
    configured_adapters(tier.lora_modules, tier.name, model, tier.engine.max_lora_rank)
    host_nbytes = 0
    roles: tuple[Role, ...] = ("prefill", "decode") if tier.prefill.num_replicas else ("decode",)
    for role in roles:
        engine = tier.for_role(role).engine
        plan = check_engine(
            engine,
            model,
            gpu_nbytes=gpu_nbytes,
            is_here=is_here,
            largest_step=largest_step(engine, model, gpu_name),
        )
        if plan is not None and role == "decode":
            loaded_nbytes = plan.weights_nbytes * engine.tensor_parallel_size  # approximately
            sentence = loading_sentence(engine, model, loaded_nbytes)
            if sentence:
                tell(sentence)
        each_nbytes = int(engine.kv_offloading_size * 2**30)
        if plan is not None and choose_device(engine) == "cpu":
            num_ranks = engine.tensor_parallel_size
            if is_here:
                _check_cores(num_ranks)
            each_nbytes += num_ranks * (plan.workspace_nbytes + plan.kv_nbytes(engine))
        pool = tier.pools[role]
        host_nbytes += each_nbytes * pool.num_replicas
    return host_nbytes


def _check_cores(num_ranks: int) -> None:
    num_cores = usable_cores()
    if num_ranks > num_cores:
        raise StartupError(
            f"tensor_parallel_size = {num_ranks} needs a CPU core for each rank of a worker, but"
            f" this machine has {num_cores}; lower it.",
            param="tensor_parallel_size",
        )


def loading_sentence(engine: EngineConfig, model: ModelDescription, loaded_nbytes: int) -> str:
    """A sentence about quantised weights that take more memory than their files, else ""."""
    if not model.is_quantized or loaded_nbytes <= _ABOUT * model.stored_nbytes:
        return ""
    dtype = choose_dtype(engine, model.config, choose_device(engine))
    how = f"are converted to {engine.quantization or dtype} when they are loaded"
    if engine.quantization == "packed":
        how = f"stay packed, but their scales and unquantised weights become {dtype}"
    sizes = f"{_size(loaded_nbytes)} instead of {_size(model.stored_nbytes)}"
    return f"The weights of {model.name} {how}; they take {sizes}."


def cpu_steps_sentence(tiers: Iterable[TierConfig]) -> str:
    """A sentence on what computes decode steps on a CPU: the compiled step, or torch.

    The models must be accepted by `check_tier`.
    """
    found = find_step()
    if found.loaded is None:
        return found.sentence
    is_compiled, by_torch = False, list[str]()
    for tier in tiers:
        why = _why_torch(tier.engine, describe_model(tier.directory).config)
        roles = [
            (role, tier.num_ranks(pool)) for role, pool in tier.pools.items() if pool.num_replicas
        ]
        split = [f"{tier.name}-{role}" for role, num_ranks in roles if num_ranks > 1]
        if why:
            by_torch.append(f"torch for {tier.name}, {why}")
        elif split:
            by_torch.append(f"torch for {', '.join(split)}, whose workers have several ranks")
        is_compiled |= not why and len(split) < len(roles)
    return "; ".join([found.sentence, *by_torch] if is_compiled else by_torch or [found.sentence])


def _why_torch(engine: EngineConfig, model: ModelConfig) -> str:
    """Why the compiled step does not support a model; "" if it does."""
    why = why_not_compiled(model)
    dtype = choose_dtype(engine, model, "cpu")
    if not why and dtype != "bfloat16":
        return f"which computes in {dtype}"
    return why


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
