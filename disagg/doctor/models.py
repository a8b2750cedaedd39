"""A model directory: what it is, what it needs, and how many tokens of KV fit here beside it."""

from __future__ import annotations

from disagg.config import TierConfig
from disagg.doctor.findings import Finding
from disagg.errors import DisaggError, NotEnoughMemory
from disagg.planner.shapes import shape_of

GIB = 1 << 30


def check_model(tier: TierConfig) -> list[Finding]:
    """Read a model's description and do the arithmetic of one worker."""
    from disagg.engine.runner import check_engine
    from disagg.models.model_config import ModelConfig

    check = f"model {tier.name}"
    try:
        directory = tier.directory
        model = ModelConfig.from_directory(directory)
        shape = shape_of(model, directory)
        weights_nbytes = sum(each.stat().st_size for each in directory.glob("*.safetensors"))
        described = (
            f"{model.family}, {shape.num_params / 1e6:.0f} M parameters,"
            f" {weights_nbytes / GIB:.2f} GiB of weights in {model.dtype}"
        )
        check_engine(tier.engine, directory)
        found = [Finding(check, described.replace("torch.", ""))]
        return [*found, _room(tier, weights_nbytes)]
    except DisaggError as error:
        flag = f"--{error.param.replace('_', '-')}" if error.param else "the model directory"
        return [Finding(check, error.message, "wrong", flag)]


def _room(tier: TierConfig, weights_nbytes: int) -> Finding:
    """How many tokens of KV a worker has; on a GPU by the memory that is free now."""
    from disagg.engine.runner import kv_room

    check = f"KV of {tier.name}"
    try:
        room = kv_room(tier.engine, tier.directory, weights_nbytes)
    except NotEnoughMemory as error:
        return Finding(check, error.message, "wrong", f"--{(error.param or '').replace('_', '-')}")
    num_full = room.num_tokens / room.max_model_len
    return Finding(
        check,
        f"{room.num_tokens} tokens a worker on {room.device}, {room.nbytes_per_token} bytes each:"
        f" {num_full:.1f} requests of {room.max_model_len} tokens",
    )
