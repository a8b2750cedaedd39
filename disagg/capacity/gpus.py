"""GPUs and links by their makers' figures, and the prices of renting them. Data only.

FLOP/s are for dense matrices; NVIDIA's sheets print twice that, for structured sparsity. Links are
bytes/s in one direction; the sheets print the sum of both directions. Memory is in decimal
gigabytes as printed, which is a little less than most cards report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from disagg.errors import StartupError

Entry = TypeVar("Entry")


class Gpu(msgspec.Struct, frozen=True):
    """A GPU.

    link_bytes_per_s: rate between the GPUs of one node.
    fp8_flops, fp4_flops: None if the GPU has no such matrix units; it is then not planned with
        weights of that format.
    family: GPUs of one family reach similar shares of their figures; empty: no published run is
        known.
    """

    name: str
    memory_nbytes: float
    memory_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    link_bytes_per_s: float
    gpus_per_node: int
    source: str
    fp4_flops: float | None = None
    family: str = ""

    def flops(self, dtype: str) -> float:
        """FLOP/s of the matrix units. Raises `StartupError` if the GPU has none for `dtype`."""
        found = self._flops(dtype)
        if found is None:
            able = (gpu.name for gpu in GPUS.values() if gpu._flops(dtype))
            raise StartupError(
                f"{self.name} has no {dtype[:3].upper()} matrix units; plan it with bf16 weights,"
                f" or use one of {', '.join(able)}.",
                param="weights",
            )
        return found

    def _flops(self, dtype: str) -> float | None:
        # By the datasheets int8 is twice as fast as bf16. A B200's is slower than its bf16.
        int8_flops = None if self.family == "blackwell" else 2 * self.bf16_flops
        formats = {"bf16": self.bf16_flops, "fp4": self.fp4_flops, "int8": int8_flops}
        return formats.get(dtype, self.fp8_flops)

    def multiplies(self, dtype: str) -> bool:
        """Whether it has matrix units for `dtype`."""
        return self._flops(dtype) is not None

    def flops_per_byte(self, dtype: str = "bf16") -> float:
        """The arithmetic intensity at which computing and reading memory take the same time."""
        return self.flops(dtype) / self.memory_bytes_per_s


# PCIe cards are planned with PCIe links, because an NVLink bridge joins only pairs.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 80e9, 3.35e12, 989.4e12, 1978.9e12, 450e9, 8,
            "NVIDIA H100 datasheet, SXM5; NVLink 900 GB/s both ways", family="hopper"),
        Gpu("h100-pcie", 80e9, 2.0e12, 756e12, 1513e12, 64e9, 8,
            "NVIDIA H100 datasheet, PCIe; PCIe 5.0 x16 128 GB/s both ways", family="hopper"),
        Gpu("h200", 141e9, 4.8e12, 989.4e12, 1978.9e12, 450e9, 8,
            "NVIDIA H200 datasheet, SXM; NVLink 900 GB/s both ways", family="hopper"),
        Gpu("b200", 180e9, 8.0e12, 2250e12, 4500e12, 900e9, 8,
            "NVIDIA DGX B200 datasheet, an eighth of it; NVLink 1.8 TB/s both ways; FP4:"
            " spheron.network/blog/nvidia-b200-complete-guide, 2026-03-19", 9000e12, "blackwell"),
        Gpu("b300", 270e9, 8.0e12, 2250e12, 4500e12, 900e9, 8,
            "HGX B300 as glennklockwood.com/garden/processors/B300 has it, read 2026-11-23; memory"
            " that is left to use: verda.com/blog/gb300-nvl72-architecture", 13125e12, "blackwell"),
        # A worker uses the GPUs of one machine, which has only 4 of the 72 that NVLink joins.
        Gpu("gb200", 186e9, 8.0e12, 2500e12, 5000e12, 900e9, 4,
            "NVIDIA GB200 NVL72 datasheet, a 72nd of it: 1,440 PFLOP/s sparse FP4,"
            " awesomeagents.ai/hardware/nvidia-gb200-nvl72; 186 GB and 4 GPUs a machine: Crusoe's"
            " system in MLCommons' inference_results_v6.1", 10000e12, "blackwell"),
        Gpu("a100-40gb", 40e9, 1.555e12, 312e12, None, 300e9, 8,
            "NVIDIA A100 datasheet, SXM4 40 GB; NVLink 600 GB/s both ways", family="ampere"),
        Gpu("a100-80gb", 80e9, 2.039e12, 312e12, None, 300e9, 8,
            "NVIDIA A100 datasheet, SXM4 80 GB; NVLink 600 GB/s both ways", family="ampere"),
        Gpu("l40s", 48e9, 0.864e12, 362e12, 733e12, 32e9, 8,
            "NVIDIA L40S datasheet; PCIe 4.0 x16 64 GB/s both ways"),
        Gpu("l4", 24e9, 0.3e12, 121e12, 242e12, 32e9, 8,
            "NVIDIA L4 datasheet; PCIe 4.0 x16 64 GB/s both ways"),
        Gpu("mi300x", 192e9, 5.3e12, 1307.4e12, 2614.9e12, 448e9, 8,
            "AMD Instinct MI300X data sheet; seven Infinity Fabric links of 128 GB/s both ways"),
    )
}  # fmt: skip

# A CPU core with matrix units (AMX), with the speed that the bundled models reach on it
# (docs/notebook/engine.md). A core without AMX computes prompts several times slower.
CPU_CORE = Gpu("cpu", 8e9, 12e9, 0.35e12, None, 12e9, 1, "measured: docs/notebook/engine.md")


def gpu_called(device_name: str) -> Gpu | None:
    """The GPU with this driver name, such as "NVIDIA H100 80GB HBM3"; None if it is unknown."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    fitting = [gpu for gpu in GPUS.values() if words.issuperset(gpu.name.split("-"))]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)


# Bytes/s of a pull between two workers, for each GPU of the smaller worker.
LINKS = {
    "nvlink": 400e9,  # of 450e9, if the two workers share a node
    "400g": 49.5e9,  # NIXL's own benchmark over UCX, blocks of 1 to 8 MB: 99 % of the line rate
    "200g": 24.5e9,  # the same share of the line rate
    "100g": 12.1e9,  # NIXL's own benchmark
    "25g": 3.0e9,  # TCP: the line rate without headers
    "10g": 1.2e9,
}


def gpu_of(name: str) -> Gpu:
    """The GPU of `GPUS` with this name, or "cpu". Raises `StartupError` for other names."""
    return _named(name, {**GPUS, CPU_CORE.name: CPU_CORE}, "GPU")


def link_of(name: str) -> float:
    """The link's bytes/s. Raises `StartupError` for a name that is not in `LINKS`."""
    return _named(name, LINKS, "link")


def _named(name: str, table: Mapping[str, Entry], kind: str) -> Entry:
    if name not in table:
        raise StartupError(
            f"{name!r} is not a known {kind}; known are {', '.join(table)}.", param=kind.lower()
        )
    return table[name]


# US dollars for one GPU and hour, on demand. GPUs without a published price are not listed, and
# their prices must be given.
PRICES_AS_OF = "2026-05"
PRICES_SOURCE = (
    "H100, H200, A100: the middle of the specialised clouds' range on mercatus-ai.com/blog/"
    "cloud-gpu-pricing; L40S, MI300X: between the listings on gpu.blog; of 2026-03: B200, the"
    " middle of the range on lyceum.technology/magazine/nvidia-b200-gpu-cloud-pricing-2026; B300,"
    " of that on ornnai.com/research/nvidia-b200-vs-b300-why-use-one-instead-of-the-other; GB200,"
    " half of a superchip on spheron.network/blog/nvidia-h200-vs-b200-vs-gb200"
)
USD_PER_GPU_HOUR = {
    "h100": 3.0,
    "h200": 4.0,
    "b200": 5.25,
    "b300": 6.13,
    "gb200": 4.54,
    "a100-80gb": 1.3,
    "l40s": 1.58,
    "mi300x": 1.78,
}
