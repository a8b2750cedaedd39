"""Plans which workers run on which GPUs, and refuses fleets that do not fit.

A worker uses one GPU for each of its ranks, or a share of one GPU; by default it shares no GPU. If
there are too few GPUs and the number of prefill workers was not set, a tier gets workers that both
prefill and decode. If a fleet still does not fit, an error gives the numbers. Knows no driver,
torch or Ray.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from disagg.config import ServeConfig, TierConfig
from disagg.devices import Device, Gpus
from disagg.errors import StartupError

_ROUNDING = 1e-6  # so that three shares of 0.333 and one of 0.001 fit on a GPU


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The devices of all pools.

    Attributes:
        config: the configuration, in which each pool's `num_gpus` and each engine's `device` are
            set.
        devices: the GPUs that are used.
        line: a line that tells the user the plan.
    """

    config: ServeConfig
    devices: tuple[Device, ...] = ()
    line: str = ""

    @property
    def device_ids(self) -> list[str]:
        """The ids of the GPUs, as in `CUDA_VISIBLE_DEVICES`."""
        return [each.id for each in self.devices]

    @property
    def gpu_nbytes(self) -> int | None:
        """Memory of the smallest GPU; None if it is not known, or if there is no GPU."""
        return min((each.total_nbytes for each in self.devices if each.total_nbytes), default=None)

    @property
    def gpu_name(self) -> str:
        """The driver's name of a GPU with the least memory; empty if it is not known."""
        every = ((each.total_nbytes or 0, each.name) for each in self.devices)
        return min(every, default=(0, ""))[1]


class _Worker(NamedTuple):
    """One worker of a pool, whose size is its maximum."""

    pool: str
    share: float  # share of each of its GPUs, as Ray counts it
    claim: float  # share of each GPU's memory
    num_gpus: int = 1


@dataclass(slots=True)
class _Gpu:
    """A GPU and the workers that were placed on it."""

    device: Device
    workers: list[_Worker] = field(default_factory=list)

    def takes(self, worker: _Worker) -> bool:
        workers = [*self.workers, worker]
        is_shared = sum(each.share for each in workers) <= 1 + _ROUNDING
        return is_shared and sum(each.claim for each in workers) <= self.free

    @property
    def free(self) -> float:
        """The share of its memory that is free; 1 if it is not known."""
        free, total = self.device.free_nbytes, self.device.total_nbytes
        return 1.0 if free is None or not total else free / total


def plan_devices(config: ServeConfig, gpus: Gpus, unsized: Collection[str] = ()) -> DevicePlan:
    """Give every worker a device.

    Args:
        gpus: the GPUs that can be used.
        unsized: names of the tiers whose number of prefill workers the user did not set.

    Raises:
        StartupError: there are too few GPUs, or settings contradict each other.
    """
    config = with_devices(config, has_gpus=bool(gpus.devices or gpus.problem))
    for tier in config.tiers:
        if tier.engine.device == "cuda" and not gpus.devices:
            why = gpus.problem or f"{gpus.where.capitalize()} has no GPU{_held(gpus)}."
            raise StartupError(
                f"{why} Tier {tier.name!r} is configured for GPUs; --device cpu serves it without.",
                param="device",
            )
    merged: list[str] = []
    filled, is_all = _placed(config, gpus.devices)
    for tier in config.tiers:  # smallest model first, because the largest gains most by two pools
        if not is_all and tier.name in unsized and tier.prefill.num_gpus:
            merged.append(tier.name)
            config = _without_prefill(config, tier.name)
            filled, is_all = _placed(config, gpus.devices)
    if not is_all:
        raise StartupError(_too_few(config, gpus))
    used = [each for each in filled if each.workers]
    devices = tuple(each.device for each in used)
    return DevicePlan(config, devices, _line(gpus, used, merged))


def with_devices(config: ServeConfig, has_gpus: bool) -> ServeConfig:
    """Fill in open settings: a GPU for each worker if there are GPUs, otherwise none.

    Raises:
        StartupError: a tier's settings ask both for GPUs and for none.
    """
    tiers = tuple(_with_device(tier, has_gpus) for tier in config.tiers)
    return msgspec.structs.replace(config, tiers=tiers)


def unsized_tiers(raw: Mapping[str, Any], config: ServeConfig) -> set[str]:
    """The tiers whose prefill pool has no size in `raw`, from which `config` was made."""
    return {
        tier.name
        for tier, each in zip(config.tiers, raw["tiers"], strict=True)
        if "num_replicas" not in each.get("prefill", {})
    }


def _with_device(tier: TierConfig, has_gpus: bool) -> TierConfig:
    asked = [pool.num_gpus for pool in tier.pools.values() if pool.num_gpus is not None]
    device = tier.engine.device
    if device != "cpu":
        _check_asked(tier, asked)
        is_on_gpu = any(asked) if asked else device == "cuda" or has_gpus
        device = "cuda" if is_on_gpu else "cpu"
    sized = {
        role: msgspec.structs.replace(
            pool, num_gpus=float(tier.num_ranks(pool)) if device == "cuda" else 0.0
        )
        for role, pool in tier.pools.items()
        if pool.num_gpus is None
    }
    engine = msgspec.structs.replace(tier.engine, device=device)
    return msgspec.structs.replace(tier, engine=engine, **sized)


def _check_asked(tier: TierConfig, asked: Sequence[float]) -> None:
    if any(asked) and not all(asked):
        raise StartupError(
            f"One pool of tier {tier.name!r} has num_gpus = 0 and another has more, but workers on"
            " CPUs cannot use the KV of workers on GPUs. Give both pools GPUs, or neither.",
            param="num_gpus",
        )
    if tier.engine.device == "cuda" and asked and not any(asked):
        raise StartupError(
            f"Tier {tier.name!r} has device = 'cuda' and num_gpus = 0. Ray would assign no GPUs to"
            " its workers, so all would open the first one. Leave num_gpus out (one for each"
            " worker), or set it to 1 or to a share of a GPU.",
            param="num_gpus",
        )


def _workers(config: ServeConfig) -> list[_Worker]:
    """All workers on GPUs, with all pools at their maximum; those that need most come first."""
    every = []
    for tier in config.tiers:
        for role, pool in tier.pools.items():
            most = pool.autoscaling.max_replicas if pool.autoscaling else pool.num_replicas
            share = min(pool.num_gpus or 0.0, 1.0)
            claim = share * tier.engine.gpu_memory_utilization
            num_gpus = tier.num_ranks(pool)
            worker = _Worker(f"{tier.name}-{role}", share, claim, num_gpus)
            every += [worker] * most
    every.sort(key=lambda each: -each.share * each.num_gpus)
    return [each for each in every[: config.max_num_workers] if each.share]


def _placed(config: ServeConfig, devices: Sequence[Device]) -> tuple[list[_Gpu], bool]:
    """Place each worker on the first GPUs with room, as Ray does; and whether all have room."""
    filled, is_all = [_Gpu(device) for device in devices], True
    for worker in _workers(config):
        taking = [each for each in filled if each.takes(worker)][: worker.num_gpus]
        if len(taking) < worker.num_gpus:
            is_all = False
            continue
        for gpu in taking:
            gpu.workers.append(worker)
    return filled, is_all


def _without_prefill(config: ServeConfig, name: str) -> ServeConfig:
    tiers = [
        msgspec.structs.replace(tier, prefill=msgspec.structs.replace(tier.prefill, num_replicas=0))
        if tier.name == name
        else tier
        for tier in config.tiers
    ]
    return msgspec.structs.replace(config, tiers=tuple(tiers))


def _too_few(config: ServeConfig, gpus: Gpus) -> str:
    """Why the workers do not fit, and what to change."""
    workers = _workers(config)
    needed = sum(each.share * each.num_gpus for each in workers)
    least = min(each.claim for each in workers)
    full = [gpu for gpu in map(_Gpu, gpus.devices) if gpu.free < least]
    num_left = len(gpus.devices) - len(full)
    words = [
        f"{_named(workers)} need {needed:g} GPUs, and {gpus.where} has"
        f" {len(gpus.devices)}{_held(gpus)}."
    ]
    if full:
        each_one = ", ".join(_fullness(gpu.device) for gpu in full)
        words.append(
            f"Other processes use {each_one}, and a worker needs {least:.0%} of a GPU's memory;"
            " end these processes, or lower --gpu-memory-utilization."
        )
    if num_left and max(each.num_gpus for each in workers) > 1:
        words.append(
            "Ask for fewer workers (--prefill, --decode, --max-workers; with --prefill 0 decode"
            " workers do both), or for fewer GPUs of each (--tensor-parallel-size)."
        )
    elif num_left:
        share = math.floor(100 / math.ceil(len(workers) / num_left)) / 100
        words.append(
            "Ask for fewer workers (--prefill, --decode, --max-workers; with --prefill 0 decode"
            f" workers do both), or let some share a GPU (--num-gpus-per-worker {share:g})."
        )
    return " ".join([*words, "--device cpu serves without GPUs."])


def _line(gpus: Gpus, used: Sequence[_Gpu], merged: Sequence[str]) -> str:
    if not used:
        has_gpus = gpus.devices or gpus.num_held or gpus.problem
        return "devices: CPU" + ("" if has_gpus else f" ({gpus.where} has no GPU)")
    places = Counter(each for gpu in used for each in gpu.workers)
    workers = [each for each, number in places.items() for _ in range(number // each.num_gpus)]
    ids = ", ".join(gpu.device.id for gpu in used if gpu.device.id)
    names = ", ".join(sorted({gpu.device.name for gpu in used if gpu.device.name}))
    line = f"devices: {_named(workers)} on " + (f"GPU {ids}" if ids else f"{len(used)}")
    line += f" of {len(gpus.devices)}" + (f" ({names})" if names else " GPUs" * (not ids))
    if merged:
        line += f"; too few for two pools of {' and '.join(merged)}: decode workers do both"
    return line


def _named(workers: Iterable[_Worker]) -> str:
    """`2 x-prefill, 1 x-decode (0.5 of a GPU each)`."""
    return ", ".join(
        f"{number} {each.pool}{_size(each)}" for each, number in Counter(workers).items()
    )


def _size(worker: _Worker) -> str:
    if worker.num_gpus > 1:
        return f" ({worker.num_gpus} GPUs each)"
    return f" ({worker.share:g} of a GPU each)" if worker.share < 1 else ""


def _held(gpus: Gpus) -> str:
    return f" free, and {gpus.num_held} that others hold" if gpus.num_held else ""


def _fullness(device: Device) -> str:
    free, total = device.free_nbytes or 0, device.total_nbytes or 0
    return f"GPU {device.id} ({free / 1e9:.1f} of {total / 1e9:.1f} GB are free)"
