"""What the GPU benches share: a clock for device work, and the device's measured ceilings.

Everything here also runs on a CPU (`--device cpu --tiny`), where a figure means nothing and a
rehearsal shows that the programs work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NUM_TIMED = 20


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def describe(device: torch.device) -> dict[str, Any]:
    """The device and the versions that a figure belongs to."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    versions = {"torch": torch.__version__, "triton": triton_version}
    if device.type != "cuda":
        return {"device": "cpu", **versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "num_multiprocessors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
        "cuda": torch.version.cuda,
        **versions,
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device, num_timed: int = NUM_TIMED) -> float:
    """Median time of `run` on the device, replayed as a CUDA graph so that launching is free.

    `run` must read enough memory that nothing is left in the caches from one time to the next.
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


def ceilings(device: torch.device, tiny: bool) -> dict[str, float]:
    """What the memory and the matrix units of this device give to simple programs.

    read: bytes/s of a sum over more memory than the caches hold; copy: bytes/s, read and written
    both counted; matmul: bf16 FLOP/s of a large square product on random numbers.
    """
    rows = torch.ones(1 << (8 if tiny else 19), 256 if tiny else 4096, device=device).bfloat16()
    target = torch.empty_like(rows)
    sums = (lambda: rows.amax(-1), lambda: rows.sum(-1), lambda: rows.view(torch.int32).sum(-1))
    read = rows.nbytes / min(seconds(run, device) for run in sums)
    copy = 2 * rows.nbytes / seconds(lambda: target.copy_(rows), device)
    size = 128 if tiny else 8192
    left = torch.randn(size, size, device=device).bfloat16()
    right = torch.randn(size, size, device=device).bfloat16()
    matmul = 2 * size**3 / seconds(lambda: left @ right, device)
    return {"read_bytes_per_s": read, "copy_bytes_per_s": copy, "matmul_flops_per_s": matmul}


def attempt(what: str, run: Callable[[], float]) -> float | None:
    """The peer's figure; None, and the reason in the log, where the peer cannot run."""
    try:
        return run()
    except Exception as error:  # whatever a peer trips over must not end ours
        print(f"{what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


def write_json(out: Path, name: str, found: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"bench": name, **found})
    (out / f"{name}.json").write_text(text)
    print(text, flush=True)
