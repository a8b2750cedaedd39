"""Chooses the device and the dtype of an engine, and checks whether its weights can be quantised.

Loads torch only if a GPU driver is installed, because loading it takes seconds.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from disagg.config import EngineConfig
from disagg.devices import gpus_here, has_driver, why_no_gpu
from disagg.errors import StartupError
from disagg.kernels.cpu.library import LANES, cpu_flags, find_step
from disagg.models.families import FAMILIES
from disagg.models.model_config import ModelConfig, not_compiled

DeviceType: TypeAlias = Literal["cpu", "cuda"]


def choose_device(config: EngineConfig) -> DeviceType:
    """The configured device, or else a GPU if there is one.

    Raises:
        StartupError: a GPU was requested or exists, and cannot be used.
    """
    if config.device == "cpu":
        return "cpu"
    if _has_gpu():
        return "cuda"
    if config.device == "cuda":
        raise StartupError(f"{why_no_gpu()} device = 'cpu' works without one.", param="device")
    if problem := gpus_here().problem:
        raise StartupError(f"{problem} device = 'cpu' works without a GPU.", param="device")
    return "cpu"


def _has_gpu() -> bool:
    if not has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def choose_dtype(config: EngineConfig, model: ModelConfig, device: DeviceType) -> str:
    """The requested dtype.

    The default is half precision, unless neither the CPU nor compiled code multiplies it fast.

    Raises:
        StartupError: the model's activations do not fit into float16.
    """
    fits_float16 = FAMILIES[model.family].fits_float16
    if config.dtype == "float16" and not fits_float16:
        raise StartupError(
            f"Activations of {model.family} become larger than float16's 65,504. Set dtype ="
            " 'bfloat16' or 'float32'.",
            param="dtype",
        )
    if config.dtype != "auto":
        return config.dtype
    if device == "cuda":
        keeps = model.dtype == "float16" and fits_float16
        return "float16" if keeps else "bfloat16"
    return "bfloat16" if cpu_multiplies_bfloat16() or is_step_compiled() else "float32"


def cpu_multiplies_bfloat16() -> bool:
    return not cpu_flags().isdisjoint(("amx_bf16", "avx512_bf16"))


def is_step_compiled() -> bool:
    """Whether disagg has a compiled step for this CPU."""
    return find_step().loaded is not None


def why_not_compiled(model: ModelConfig) -> str:
    """Why the compiled CPU step cannot compute a model in bfloat16; empty if it can.

    The reason is a clause such as "whose model has experts".
    """
    if has := not_compiled(model):
        return f"whose model has {has}"
    if model.head_dim % LANES:
        return f"whose heads have {model.head_dim} values, which is no multiple of {LANES}"
    return ""


def check_quantization(
    config: EngineConfig, model: ModelConfig, device: DeviceType, *, is_quantized: bool = True
) -> None:
    """Raise `StartupError` if the configured quantization is impossible for the model or device."""
    asked, why = config.quantization, ""
    if asked is None:
        return
    if model.experts is not None and device == "cpu":
        why = f"{model.family} has experts, which can be quantised on GPUs only"
    elif model.experts is not None and model.experts.is_mxfp4:
        why = "the checkpoint's experts already have 4 bits (MXFP4), and a GPU keeps them so"
    elif asked == "packed" and not is_quantized:
        why = "the checkpoint is not quantised, so nothing is packed; set 'int8' or 'int4'"
    elif asked == "packed" and device != "cpu":
        why = (
            "it is a setting for CPUs; a GPU always keeps quantised checkpoints packed and always"
            " widens GGUF files"
        )
    elif device == "cpu" and asked == "fp8":
        why = "only GPUs can multiply fp8 weights; set 'int8' or 'int4'"
    elif device != "cpu" and model.quantized is not None:
        why = (
            f"the checkpoint is already quantised ({model.quantized.name}), and a GPU keeps it so;"
            " set device = 'cpu'"
        )
    if why:
        instead = ", or" if "; set " in why else ";"
        raise StartupError(
            f"quantization = {asked!r} is not possible: {why}{instead} leave it out.",
            param="quantization",
        )
