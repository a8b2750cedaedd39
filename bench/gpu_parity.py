"""Compares kernels on a GPU with their references.

    python -m bench.gpu_parity [--out build/gpu] [--only "llama KV fp8"]
    TRITON_INTERPRET=1 python -m bench.gpu_parity --device cpu      # a rehearsal

Rows named "llama" have the heads of the timed rows, and compile the kernels that those use. Rows
named "odd" have other dtypes, groups, blocks and windows; there "KV bfloat16" stands for KV as the
model computes it. A row fails if a kernel differs from its reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bench.gpu_paged import INTERPRETED_DTYPE, LATENT, TINY, TINY_LATENT, Heads, Paged
from bench.gpu_rows import Row, parser_of, run_part
from bench.gpu_step_parity import check_cuts, check_step_arrays
from disagg.kernels import reference
from disagg.kernels.gpu.gated_mul import gated_mul
from disagg.kernels.gpu.norm_rope import norm_rope_
from disagg.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from disagg.kernels.kv_pages import FORMATS, KVFormat, format_of

SCALED = ("fp8", "int8", "int4")
# A step of stored values, of the largest: at the middle between two, writing may go either way.
ROUNDING = {"fp8": 1 / 14, "int8": 1 / 127, "int4": 1 / 8}
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 4e-3, torch.float32: 2e-3}  # of the largest


def _difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference, as a fraction of the largest value. NaN counts as one."""
    wide = expected.float().cpu()
    found = (got.float().cpu() - wide).abs().nan_to_num(nan=float("inf")).max()
    return float(found / wide.abs().max().clamp(min=1e-6))


def _checked(differences: Mapping[str, float], room: Mapping[str, float]) -> dict[str, float]:
    """The differences.

    Raises:
        ArithmeticError: one is larger than its room.
    """
    wrong = [
        f"{name} by {difference:.2g} of the largest value, not {room[name]:.2g} at most"
        for name, difference in differences.items()
        if not difference <= room[name]
    ]
    if wrong:
        raise ArithmeticError(f"differs from its reference: {'; '.join(wrong)}")
    return dict(differences)


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
    found = {
        "rms_norm": _difference(
            rms_norm(x.to(device), weight.to(device), 1e-6), reference.rms_norm(x, weight, 1e-6)
        ),
        "add_rms_norm.total": _difference(total, wanted_total),
        "add_rms_norm.normed": _difference(normed, wanted_normed),
        "silu_mul": _difference(gated_mul(gate_up.to(device)), reference.gated_mul(gate_up)),
        "norm_rope": _difference(turned, wanted_turned),
    }
    return _checked(found, dict.fromkeys(found, TOLERANCE[dtype]))


def storable(vectors: Tensor, format: KVFormat) -> Tensor:
    """Vectors near to these that the format stores as they are: the scale of each is 1 / 64."""
    wide = reference.widen(reference.quantize(vectors, format)[0], format)
    wide[..., 0] = format.largest
    return (wide / 64).to(vectors.dtype)


def check_attention(
    heads: Heads,
    device: torch.device,
    dtype: torch.dtype,
    format: KVFormat,
    window: int | None = None,
    long: int = 3000,
) -> dict[str, float]:
    """A step of decodes, verification and prompts with and without a prefix; and one of decodes."""
    mixed = [(1, long), (1, 1), (1, 64), (4, 70), (37, 37), (50, long // 2)]
    decodes = [(1, long), (1, 1), (1, 64), (1, 65)]
    differences = {}
    for name, lens in (("mixed", mixed), ("decodes", decodes)):
        is_captured = name == "decodes"
        paged = Paged(heads, lens, device, dtype, window, format, is_captured=is_captured)
        if device.type == "cpu" and format.has_scales:
            # A rehearsal is interpreted, and the interpreter rounds to e4m3 wrongly.
            vectors = paged.qkv[:, heads.num_heads :]
            vectors.copy_(storable(vectors, format))
        before = paged.pages_on_cpu()
        attended = paged.attend(1)
        reference.kv_write(paged.qkv.cpu(), before, 1, paged.batch.slots.cpu())
        written = paged.pages_on_cpu()
        differences[f"kv_write, {name}"] = _difference(
            reference.numbers(written), reference.numbers(before)
        )
        expected = reference.paged_attention(
            paged.qkv.cpu()[:, : heads.num_heads],
            written,
            1,
            paged.batch.block_tables.cpu(),
            paged.batch.query_lens,
            paged.batch.context_lens_host,
            window,
        )
        differences[f"attention, {name}"] = _difference(
            attended, expected[..., : heads.value_dim].flatten(1)
        )
    room = {
        name: max(TOLERANCE[dtype], ROUNDING.get(format.name, 0.0) if "write" in name else 0.0)
        for name in differences
    }
    return _checked(differences, room)


def attention_rows(device: torch.device, tiny: bool) -> list[Row]:
    interpreted = device.type == "cpu"
    odd = {
        "group 7, block 16, window 33": (Heads(7, 1, 64, 16), torch.bfloat16, 33),
        "group 2, block 16, float16": (Heads(4, 2, 32, 16), torch.float16, None),
        "group 1, block 64, float32": (Heads(4, 4, 64, 64), torch.float32, None),
    }
    long = 300 if interpreted else 3000

    def row(
        name: str, stored: str, heads: Heads, dtype: torch.dtype, window: int | None = None
    ) -> Row:
        dtype = INTERPRETED_DTYPE if interpreted else dtype
        format = FORMATS[stored] if stored in SCALED else format_of(dtype)
        return Row(name, lambda: check_attention(heads, device, dtype, format, window, long), 60.0)

    rows = [
        row(f"llama KV {stored}", stored, TINY if interpreted else Heads(), torch.bfloat16)
        for stored in ("bfloat16", *SCALED)
    ]
    rows += [
        row(f"odd KV {stored} {name}", stored, *each)
        for name, each in odd.items()
        for stored in ("bfloat16", *SCALED)
    ]
    heads = TINY_LATENT if interpreted else LATENT
    rows.append(row("odd KV bfloat16 latent", "bfloat16", heads, torch.bfloat16))
    return rows[:4] if tiny else rows


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    device = torch.device(arguments.device)

    def row(dtype: torch.dtype) -> Row:
        name = f"rows {str(dtype).removeprefix('torch.')}"
        return Row(name, lambda: check_rows(device, dtype), 60.0)

    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    rows = [
        *attention_rows(device, arguments.tiny),
        *map(row, dtypes),
        Row("rows of a small step", lambda: check_step_arrays(device), 60.0),
        Row("rows of cut attention", lambda: check_cuts(device), 60.0),
    ]
    run_part("gpu_parity", rows, arguments)


if __name__ == "__main__":
    main()
