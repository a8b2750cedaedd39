"""Checks a model: what it needs, and how many tokens of KV fit into the remaining memory."""

from __future__ import annotations

from disagg.capacity.shapes import shape_of
from disagg.capacity.worker_steps import largest_step
from disagg.config import TierConfig
from disagg.devices import gpus_here
from disagg.engine.device.check import check_engine
from disagg.errors import DisaggError, NotEnoughMemory
from disagg.models.description import describe_model
from disagg.tools.doctor.report import Finding

GIB = 1 << 30


def check_model(tier: TierConfig) -> list[Finding]:
    """Compute the memory of one worker from a model's description and its weights' headers."""
    check = f"model {tier.name}"
    gpus = gpus_here().devices if tier.engine.device != "cpu" else ()
    gpu_nbytes, gpu_name = (gpus[0].total_nbytes, gpus[0].name) if gpus else (None, "")
    try:
        model = describe_model(tier.directory)
        engine = tier.engine
        sizes = largest_step(engine, model, gpu_name)
        plan = check_engine(engine, model, gpu_nbytes=gpu_nbytes, largest_step=sizes)
    except NotEnoughMemory as error:
        return [Finding(f"KV of {tier.name}", error.message, "wrong", _flag(error))]
    except DisaggError as error:
        return [Finding(check, error.message, "wrong", _flag(error))]
    num_params = shape_of(model).num_params
    described = f"{model.config.family}, {num_params / 1e6:.0f} M parameters"
    if plan is None:
        found = f"{described}; the GPU's memory is unknown here, so workers check it at their start"
        return [Finding(check, found)]
    described += f", {plan.weights_nbytes / GIB:.2f} GiB of weights in memory"
    if model.is_quantized:
        described += f" ({model.stored_nbytes / GIB:.2f} GiB in files)"
    num_tokens, shape = plan.num_kv_tokens(tier.engine, gpu_nbytes), plan.shape
    token_nbytes = shape.block_nbytes * shape.groups.num_blocks_of_row / shape.block_size
    room = (
        f"{num_tokens} tokens per worker of {token_nbytes:.0f} bytes each,"
        f" enough for {num_tokens / plan.max_model_len:.1f} requests of"
        f" {plan.max_model_len} tokens; steps of up to {plan.max_num_seqs} sequences and"
        f" {plan.max_num_batched_tokens} tokens"
    )
    return [Finding(check, described), Finding(f"KV of {tier.name}", room)]


def _flag(error: DisaggError) -> str:
    """How to name the setting that an error is about."""
    if error.param == "model":  # it has no flag, because it is a positional argument
        return "the path or the name of the model"
    return f"--{error.param.replace('_', '-')}" if error.param else "the model directory"
