"""Kernels on a GPU: equal to the reference, and how near to what the hardware gives.

    python -m bench.gpu_kernels [--out build/gpu]
    TRITON_INTERPRET=1 python -m bench.gpu_kernels --device cpu --tiny      # a rehearsal

Decoding is compared with the measured bandwidth of reading, prompts with the measured speed of
matrix products, both with FlashInfer (where it can be imported) and torch's attention over dense
keys. Heads are those of Llama-3-8B; the cache has all 32 layers in each block, as ours has.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from bench.gpu_device import attempt, ceilings, describe, parse_arguments, seconds, write_json
from bench.gpu_paged import TINY, Heads, Paged
from bench.gpu_peers import (
    dense_layers,
    flashinfer_decode,
    flashinfer_prompt,
    sdpa_decode,
    sdpa_prompt,
)
from bench.report import print_table
from disagg.kernels import reference
from disagg.kernels.kv_pages import FORMATS, KVFormat, KVPages, format_of, pages_of
from disagg.kernels.norm_rope import norm_rope_
from disagg.kernels.rms_norm import add_rms_norm, rms_norm
from disagg.kernels.silu_mul import silu_mul

QUANTIZED = (FORMATS["fp8"], FORMATS["int8"], FORMATS["int4"])
# A step of stored values, of the largest.
ROUNDING = {"fp8": 1 / 14, "int8": 1 / 127, "int4": 1 / 8}
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 4e-3, torch.float32: 2e-3}  # of the largest


# Equality.


def _difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference, as a fraction of the largest value."""
    wide = expected.float().cpu()
    return float((got.float().cpu() - wide).abs().max() / wide.abs().max().clamp(min=1e-6))


def check_rows(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The kernels that work row by row, at sizes that are no powers of two."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, residual, weight, gate_up = draw(13, 1000), draw(13, 1000), draw(1000), draw(13, 1920)
    heads, norm = draw(13, 6, 96), draw(6, 96)
    angles = torch.rand(13, 48, generator=generator) * 6
    rope_rows = torch.stack((angles.cos(), angles.sin()), 1)
    total, normed = add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-6)
    wanted_total, wanted_normed = reference.add_rms_norm(x, residual, weight, 1e-6)
    turned = heads.to(device, copy=True)
    norm_rope_(turned, norm.to(device), 1e-6, rope_rows.to(device))
    wanted_turned = reference.norm_rope(heads, norm, 1e-6, angles.cos(), angles.sin())
    return {
        "rms_norm": _difference(
            rms_norm(x.to(device), weight.to(device), 1e-6), reference.rms_norm(x, weight, 1e-6)
        ),
        "add_rms_norm.total": _difference(total, wanted_total),
        "add_rms_norm.normed": _difference(normed, wanted_normed),
        "silu_mul": _difference(silu_mul(gate_up.to(device)), reference.silu_mul(gate_up)),
        "norm_rope": _difference(turned, wanted_turned),
    }


def on_cpu(paged: Paged) -> KVPages:
    """A copy of its pages."""
    values, heads = paged.pages.values, paged.heads
    return pages_of(
        paged.pages.blocks.cpu().clone().view(torch.uint8).flatten(),
        paged.pages.format,
        values.shape[1],
        heads.num_kv_heads,
        heads.block_size,
        heads.head_dim,
    )


def storable(vectors: Tensor, format: KVFormat) -> Tensor:
    """Vectors near to these that the format stores as they are: the scale of each is 1 / 64."""
    wide = reference.widen(reference.quantize(vectors, format)[0], format)
    wide[..., 0] = format.largest
    return (wide / 64).to(vectors.dtype)


def check_attention(
    device: torch.device, dtype: torch.dtype, tiny: bool, format: KVFormat
) -> dict[str, float]:
    """Decodes, verification, prompts with and without a prefix, windows, odd groups."""
    long = 300 if tiny else 3000
    mixed = [(1, long), (1, 1), (1, 64), (4, 70), (37, 37), (50, long // 2)]
    cases: dict[str, tuple[Heads, int | None]] = {
        "group 2, block 16": (Heads(4, 2, 32, 16, 2), None),
        "group 4, block 64": (Heads(8, 2, 128, 64, 2), None),
        "group 7, block 16, window 33": (Heads(7, 1, 64, 16, 2), 33),
    }
    differences = {}
    for name, (heads, window) in list(cases.items())[: 1 if tiny else None]:
        paged = Paged(heads, mixed, device, dtype, window, format)
        if tiny and format.has_scales:
            # A rehearsal is interpreted, and the interpreter rounds to e4m3 wrongly.
            vectors = paged.qkv[:, heads.num_heads :]
            vectors.copy_(storable(vectors, format))
        before = on_cpu(paged)
        paged.write(1)
        reference.kv_write(paged.qkv.cpu(), before, 1, paged.slots.cpu())
        written = on_cpu(paged)
        differences[f"kv_write, {name}"] = _difference(
            reference.numbers(written), reference.numbers(before)
        )
        expected = reference.paged_attention(
            paged.qkv.cpu()[:, : heads.num_heads],
            written,
            1,
            paged.tables.cpu(),
            [query for query, _ in mixed],
            [context for _, context in mixed],
            window,
        )
        differences[f"paged_attention, {name}"] = _difference(paged.attend(1), expected.flatten(1))
    return differences


def check(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    rows = []
    dtypes = [torch.float32] if tiny else [torch.bfloat16, torch.float16, torch.float32]
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        found = {(name, kind): value for name, value in check_rows(device, dtype).items()}
        for stored in (format_of(dtype), *QUANTIZED):
            differences = check_attention(device, dtype, tiny, stored)
            found |= {(name, stored.name): value for name, value in differences.items()}
        for (name, stored_as), difference in found.items():
            room = TOLERANCE[dtype]
            if name.startswith("kv_write"):  # at the middle between two it may go either way
                room = max(room, ROUNDING.get(stored_as, 0.0))
            rows.append(
                {
                    "kernel": name,
                    "dtype": kind,
                    "KV": stored_as,
                    "difference": difference,
                    "equal": difference <= room,
                }
            )
    return rows


# Speed.

PROMPTS = [(1024, 0), (4096, 0), (16384, 0), (1024, 15360)]  # new tokens, tokens before them
TINY_PROMPTS = [(24, 0), (16, 20)]


def decode_cases(tiny: bool) -> dict[str, list[int]]:
    """Context lengths of each sequence."""
    if tiny:
        return {"2 x 40": [40, 40], "skewed": [90, 20, 20]}
    return {
        "1 x 1k": [1024],
        "1 x 32k": [32768],
        "8 x 4k": [4096] * 8,
        "32 x 1k": [1024] * 32,
        "32 x 4k": [4096] * 32,
        "64 x 1k": [1024] * 64,
        "128 x 1k": [1024] * 128,
        "skewed 32k + 63 x 1k": [32768, *[1024] * 63],
    }


def time_decode(
    name: str,
    contexts: list[int],
    heads: Heads,
    device: torch.device,
    read_rate: float,
    format: KVFormat = FORMATS["bfloat16"],
) -> dict[str, Any]:
    """Microseconds of one layer. The peers read bf16 and stand beside that only."""
    paged = Paged(heads, [(1, context) for context in contexts], device, format=format)
    nbytes = sum(contexts) * heads.token_nbytes(format)
    ours = seconds(paged.attend_all, device) / heads.num_layers
    row = {
        "decode": name,
        "KV": format.name,
        "us": ours * 1e6,
        "GB/s": nbytes / ours / 1e9,
        "of read": nbytes / ours / read_rate,
    }
    if format.has_scales:
        return {**row, "FlashInfer us": None, "SDPA us": None}
    layers = dense_layers(paged)
    flashinfer = attempt("FlashInfer", lambda: flashinfer_decode(layers, paged, device))
    sdpa = None
    if len(set(contexts)) == 1:  # dense keys of unequal lengths would not be a fair peer
        sdpa = attempt("SDPA", lambda: sdpa_decode(layers, paged, device))
    return {**row, "FlashInfer us": _microseconds(flashinfer), "SDPA us": _microseconds(sdpa)}


def time_prompt(
    new: int, cached: int, heads: Heads, device: torch.device, matmul_rate: float
) -> dict[str, Any]:
    """Microseconds of one layer for `new` tokens after `cached` ones."""
    paged = Paged(heads, [(new, new + cached)], device)
    pairs = new * cached + new * (new + 1) // 2
    num_flops = 4 * heads.num_heads * heads.head_dim * pairs
    ours = seconds(paged.attend_all, device) / heads.num_layers
    flashinfer = attempt("FlashInfer", lambda: flashinfer_prompt(paged, device))
    sdpa = None if cached else attempt("SDPA", lambda: sdpa_prompt(paged, device))
    return {
        "new": new,
        "cached": cached,
        "us": ours * 1e6,
        "TFLOP/s": num_flops / ours / 1e12,
        "of matmul": num_flops / ours / matmul_rate,
        "FlashInfer us": _microseconds(flashinfer),
        "SDPA us": _microseconds(sdpa),
    }


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def main() -> None:
    arguments = parse_arguments(__doc__)
    device, tiny = torch.device(arguments.device), arguments.tiny
    found: dict[str, Any] = {"machine": describe(device), "parity": check(device, tiny)}
    print_table(found["parity"])
    write_json(arguments.out, "gpu_kernels", found)  # kept should a measurement break
    found["ceilings"] = ceilings(device, tiny)
    rates = found["ceilings"]
    heads = TINY if tiny else Heads()
    found["decode"] = [
        time_decode(name, contexts, heads, device, rates["read_bytes_per_s"], format)
        for name, contexts in decode_cases(tiny).items()
        for format in (FORMATS["bfloat16"], *QUANTIZED)
    ]
    print_table(found["decode"])
    heads = TINY if tiny else Heads(num_layers=2)
    found["prompt"] = [
        time_prompt(new, cached, heads, device, rates["matmul_flops_per_s"])
        for new, cached in (TINY_PROMPTS if tiny else PROMPTS)
    ]
    print_table(found["prompt"])
    write_json(arguments.out, "gpu_kernels", found)
    if not all(row["equal"] for row in found["parity"]):
        sys.exit("a kernel differs from its reference")


if __name__ == "__main__":
    main()
