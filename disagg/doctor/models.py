"""Checks of a model: what it needs, and how many tokens of KV fit into memory beside it."""

from __future__ import annotations

from disagg.config import TierConfig
from disagg.doctor.findings import Finding
from disagg.engine.device.check import check_engine
from disagg.errors import DisaggError, NotEnoughMemory
from disagg.kernels.devices import gpus_here
from disagg.models.description import describe_model
from disagg.planner.shapes import shape_of
from disagg.planner.step_sizes import largest_step

GIB = 1 << 30


def check_model(tier: TierConfig) -> list[Finding]:
    """Read a model's description and its weights' headers; do the arithmetic of one worker."""
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
        found = f"{described}; the GPU's memory is not known here, so a worker finds out"
        return [Finding(check, found)]
    described += f", {plan.weights_nbytes / GIB:.2f} GiB of weights as they are computed"
    if model.is_quantized:
        described += f" ({model.stored_nbytes / GIB:.2f} GiB in files)"
    num_tokens = plan.num_kv_tokens(tier.engine, gpu_nbytes)
    room = (
        f"{num_tokens} tokens a worker, {plan.shape.block_nbytes // plan.shape.block_size} bytes"
        f" each: {num_tokens / plan.max_model_len:.1f} requests of {plan.max_model_len} tokens;"
        f" steps of {plan.max_num_seqs} sequences and {plan.max_num_batched_tokens} tokens"
    )
    return [Finding(check, described), Finding(f"KV of {tier.name}", room)]


def _flag(error: DisaggError) -> str:
    if error.param == "model":  # no flag: the first argument
        return "the path or the name of the model"
    return f"--{error.param.replace('_', '-')}" if error.param else "the model directory"
