"""Measures the ceilings of a device: the first part of the GPU suite, with what all parts share.

    python -m bench.gpu_device [--out build/gpu]

prints the machine and what it gives to simple programs. The other GPU benches use these ceilings
and the clocks for device work. Everything in the suite also runs on a CPU (`--device cpu`). There a
figure means nothing, and the rehearsal shows that the programs work.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_rows import Row, parser_of, run_part

NUM_TIMED = 20
# Of what one measurement reads in turns: several times the L2 of any GPU (50 MB on an H100).
UNCACHED_NBYTES = 384e6
PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "flash-attn-3", "nixl-cu13")


def describe(device: torch.device) -> dict[str, Any]:
    """The device and the versions that a figure belongs to."""
    versions = {name: _version(name) for name in PACKAGES}
    host = {"num_cpus": os.cpu_count(), "num_threads": torch.get_num_threads()}
    if device.type != "cuda":
        return {"device": "cpu", **host, **versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "num_multiprocessors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
        "cuda": torch.version.cuda,
        **host,
        **versions,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def datasheet(device: torch.device) -> tuple[float, float] | None:
    """Bytes/s of memory and dense bf16 FLOP/s as the maker states them; None if not known."""
    if device.type != "cuda" or importlib.util.find_spec("msgspec") is None:
        return None
    from disagg.capacity.gpus import gpu_called

    gpu = gpu_called(torch.cuda.get_device_name(device))
    return None if gpu is None else (gpu.memory_bytes_per_s, gpu.bf16_flops)


@dataclass(frozen=True)
class Ceilings:
    """What the device was seen to give, and what its maker states; None where that is not known.

    Attributes:
        read, copy: bytes/s; a copy's are read and written ones together.
        matmul: FLOP/s.
        stated: bytes/s and FLOP/s.
    """

    read: float | None
    copy: float | None
    matmul: float | None
    stated: tuple[float, float] | None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Ceilings:
        """As a part of the suite is told."""
        seen: dict[str, float] = arguments.ceilings
        return cls(
            read=seen.get("read_bytes_per_s"),
            copy=seen.get("copy_bytes_per_s"),
            matmul=seen.get("matmul_flops_per_s"),
            stated=datasheet(torch.device(arguments.device)),
        )

    def reading(self, bytes_per_s: float) -> dict[str, float | None]:
        """Shares of what reading memory gives."""
        stated = self.stated and bytes_per_s / self.stated[0]
        return {"of read": self.read and bytes_per_s / self.read, "of datasheet": stated}

    def multiplying(self, flops_per_s: float) -> dict[str, float | None]:
        """Shares of what bf16 products give."""
        stated = self.stated and flops_per_s / self.stated[1]
        return {"of matmul": self.matmul and flops_per_s / self.matmul, "of datasheet": stated}

    def copy_s(self, nbytes: float) -> float | None:
        """Seconds to copy so many bytes on the device."""
        return self.copy and 2 * nbytes / self.copy


def near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> float:
    """The largest difference, as a share of the largest value.

    Raises:
        ArithmeticError: it is larger than `tolerance`, or NaN.
    """
    wide = wanted.float()
    difference = float((found.float() - wide).abs().max() / wide.abs().max().clamp(min=1e-6))
    if not difference <= tolerance:
        raise ArithmeticError(f"differs from its reference by {difference:.2g} of the largest")
    return difference


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device, num_timed: int = NUM_TIMED) -> float:
    """Median time of `run` on the device, replayed as a CUDA graph so that launching is free.

    `run` must read `UNCACHED_NBYTES`, so that nothing is left in the L2 from one time to the next.
    """
    if device.type != "cuda":
        return _host_seconds(run, 2)
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _event_seconds(graph.replay, num_timed)


def eager_seconds(
    run: Callable[[], object], device: torch.device, num_timed: int = NUM_TIMED
) -> float:
    """Median time of `run` with its launches, as a step of an engine has them."""
    if device.type != "cuda":
        return _host_seconds(run, 2)
    for _ in range(3):
        run()
    return _event_seconds(run, num_timed)


def launch_seconds(run: Callable[[], object], device: torch.device, num_timed: int = 5) -> float:
    """Median time that the host takes to give `run` to the device."""
    run()
    times = []
    for _ in range(num_timed):
        synchronize(device)
        begin_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin_s)
    synchronize(device)
    return statistics.median(times)


def _event_seconds(run: Callable[[], object], num_timed: int) -> float:
    spans = [(_new_event(), _new_event()) for _ in range(num_timed)]
    for begin, end in spans:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    milliseconds: float = statistics.median(begin.elapsed_time(end) for begin, end in spans)
    return milliseconds / 1e3


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_seconds(run: Callable[[], object], num_timed: int) -> float:
    times = []
    for _ in range(num_timed):
        begin_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def read_rate(device: torch.device) -> dict[str, Any]:
    """bytes/s of a sum over more memory than the caches hold: the best of three ways."""
    rows = torch.ones(1 << _log_size(device), 4096, device=device).bfloat16()
    sums = (lambda: rows.amax(-1), lambda: rows.sum(-1), lambda: rows.view(torch.int32).sum(-1))
    rate = rows.nbytes / min(seconds(run, device) for run in sums)
    known = datasheet(device)
    return {"read_bytes_per_s": rate, "of datasheet": known and rate / known[0]}


def copy_rate(device: torch.device) -> dict[str, Any]:
    """bytes/s, read and written both counted."""
    rows = torch.ones(1 << _log_size(device), 4096, device=device).bfloat16()
    target = torch.empty_like(rows)
    rate = 2 * rows.nbytes / seconds(lambda: target.copy_(rows), device)
    known = datasheet(device)
    return {"copy_bytes_per_s": rate, "of datasheet": known and rate / known[0]}


def matmul_rate(device: torch.device) -> dict[str, Any]:
    """bf16 FLOP/s of a large square product of random numbers."""
    size = 8192 if device.type == "cuda" else 256
    left = torch.randn(size, size, device=device).bfloat16()
    right = torch.randn(size, size, device=device).bfloat16()
    rate = 2 * size**3 / seconds(lambda: left @ right, device)
    known = datasheet(device)
    return {"matmul_flops_per_s": rate, "of datasheet": known and rate / known[1]}


def launch_rate(device: torch.device) -> dict[str, Any]:
    """Microseconds of the host for a small torch call, and of the device for one in a graph."""
    small = torch.zeros(32, device=device)
    num_calls = 200

    def run() -> None:
        for _ in range(num_calls):
            small.add_(1.0)

    host_s, device_s = launch_seconds(run, device), seconds(run, device)
    return {"host us": host_s / num_calls * 1e6, "in a graph us": device_s / num_calls * 1e6}


def _log_size(device: torch.device) -> int:
    return 19 if device.type == "cuda" else 12


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    device = torch.device(arguments.device)
    rows = [
        Row("machine", lambda: describe(device), 60.0),
        Row("read", lambda: read_rate(device)),
        Row("matmul", lambda: matmul_rate(device)),
        Row("copy", lambda: copy_rate(device)),
        Row("launch", lambda: launch_rate(device)),
    ]
    run_part("gpu_device", rows, arguments)


if __name__ == "__main__":
    main()
