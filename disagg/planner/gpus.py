"""GPUs and links as their makers state them, and what renting them costs. Data only.

FLOP/s are of dense matrices: NVIDIA's sheets print twice that, for structured sparsity. Links are
bytes/s in one direction: the sheets print both directions together. Memory is decimal gigabytes as
printed, which is a little less than most cards report.
"""

from __future__ import annotations

import msgspec

from disagg.errors import StartupError


class Gpu(msgspec.Struct, frozen=True):
    """`link_bytes_per_s` is between the GPUs of one node. `fp8_flops` is None where bf16 units
    must do the work; such a GPU is not planned with fp8 weights."""

    name: str
    memory_nbytes: float
    memory_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    link_bytes_per_s: float
    gpus_per_node: int
    source: str

    def flops(self, dtype: str) -> float:
        """Raises `StartupError` where the GPU cannot multiply in `dtype`."""
        if dtype == "bf16":
            return self.bf16_flops
        if self.fp8_flops is None:
            raise StartupError(
                f"{self.name} has no FP8 matrix units; plan it with bf16 weights, or take one of"
                f" {', '.join(gpu.name for gpu in GPUS.values() if gpu.fp8_flops)}.",
                param="weights",
            )
        return self.fp8_flops

    def flops_per_byte(self, dtype: str = "bf16") -> float:
        """Arithmetic intensity at which compute and memory take equally long."""
        return self.flops(dtype) / self.memory_bytes_per_s


def _gpu(
    name: str,
    memory_gb: float,
    memory_tb_per_s: float,
    bf16_tflops: float,
    fp8_tflops: float | None,
    link_gb_per_s: float,
    gpus_per_node: int,
    source: str,
) -> Gpu:
    return Gpu(
        name,
        memory_gb * 1e9,
        memory_tb_per_s * 1e12,
        bf16_tflops * 1e12,
        fp8_tflops and fp8_tflops * 1e12,
        link_gb_per_s * 1e9,
        gpus_per_node,
        source,
    )


# PCIe cards are planned over PCIe: an NVLink bridge joins pairs only.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 80, 3.35, 989.4, 1978.9, 450, 8,
             "NVIDIA H100 datasheet, SXM5; NVLink 900 GB/s both ways"),
        _gpu("h100-pcie", 80, 2.0, 756, 1513, 64, 8,
             "NVIDIA H100 datasheet, PCIe; PCIe 5.0 x16 128 GB/s both ways"),
        _gpu("h200", 141, 4.8, 989.4, 1978.9, 450, 8,
             "NVIDIA H200 datasheet, SXM; NVLink 900 GB/s both ways"),
        _gpu("b200", 180, 8.0, 2250, 4500, 900, 8,
             "NVIDIA DGX B200 datasheet, an eighth of it; NVLink 1.8 TB/s both ways"),
        _gpu("a100-40gb", 40, 1.555, 312, None, 300, 8,
             "NVIDIA A100 datasheet, SXM4 40 GB; NVLink 600 GB/s both ways"),
        _gpu("a100-80gb", 80, 2.039, 312, None, 300, 8,
             "NVIDIA A100 datasheet, SXM4 80 GB; NVLink 600 GB/s both ways"),
        _gpu("l40s", 48, 0.864, 362, 733, 32, 8,
             "NVIDIA L40S datasheet; PCIe 4.0 x16 64 GB/s both ways"),
        _gpu("l4", 24, 0.3, 121, 242, 32, 8,
             "NVIDIA L4 datasheet; PCIe 4.0 x16 64 GB/s both ways"),
        _gpu("mi300x", 192, 5.3, 1307.4, 2614.9, 448, 8,
             "AMD Instinct MI300X data sheet; seven Infinity Fabric links of 128 GB/s both ways"),
    )
}  # fmt: skip

# Bytes/s that a pull gets between two workers, for each GPU of the smaller one.
LINKS = {
    "nvlink": 400e9,  # of 450: the two workers share a node
    "400g": 49.5e9,  # NIXL's own benchmark over UCX, blocks of 1 to 8 MB: 99 % of the line
    "200g": 24.5e9,  # the same share of the line
    "100g": 12.1e9,  # NIXL's own benchmark
    "25g": 3.0e9,  # TCP: the line less its headers
    "10g": 1.2e9,
}


def gpu_of(name: str) -> Gpu:
    """Raises `StartupError` for a name that is not in `GPUS`."""
    if name not in GPUS:
        raise StartupError(
            f"{name!r} is not a known GPU; known are {', '.join(GPUS)}.", param="gpu"
        )
    return GPUS[name]


def link_of(name: str) -> float:
    """Bytes/s. Raises `StartupError` for a name that is not in `LINKS`."""
    if name not in LINKS:
        raise StartupError(
            f"{name!r} is not a known link; known are {', '.join(LINKS)}.", param="link"
        )
    return LINKS[name]


# US dollars for one GPU and hour, on demand. Only where a list was found; the others must be given.
PRICES_AS_OF = "2026-05"
PRICES_SOURCE = (
    "H100, H200, A100: the middle of the specialised clouds' range on mercatus-ai.com/blog/"
    "cloud-gpu-pricing; L40S, MI300X: between the listings on gpu.blog"
)
USD_PER_GPU_HOUR = {"h100": 3.0, "h200": 4.0, "a100-80gb": 1.3, "l40s": 1.58, "mi300x": 1.78}
