"""Measures kernels on a GPU as shares of what the hardware gives.

    python -m bench.gpu_kernels [--out build/gpu] [--only decode] [--ceilings JSON]
    TRITON_INTERPRET=1 python -m bench.gpu_kernels --device cpu      # a rehearsal

Attention is called through `Ops`, writing KV included, over so many layers that nothing is left in
the L2. Times are those of replayed graphs. `of read` is the share of the measured bandwidth, `of
datasheet` the share of the stated one. `goal us` is the goal of docs/notebook/gpu.md. Each row
checks some of its results against the reference. Heads and matrices are those of Llama-3-8B,
latents those of DeepSeek-V3 on one of eight ranks, and delta nets those of Qwen3-Next.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch

from bench import gpu_delta_net
from bench.gpu_device import UNCACHED_NBYTES, Ceilings, launch_seconds, seconds
from bench.gpu_paged import (
    CHOSEN,
    INTERPRETED_DTYPE,
    LATENT,
    TINY,
    TINY_CHOSEN,
    TINY_LATENT,
    Heads,
    Paged,
)
from bench.gpu_rows import Row, parser_of, run_part
from disagg.kernels import adapters as torch_adapters
from disagg.kernels.adapters import AdaptedMatrix
from disagg.kernels.dispatch import ops_for
from disagg.kernels.gpu.adapters import AdapterGroups, adapt_rows_
from disagg.kernels.gpu.attention_work import LONG_ROWS
from disagg.kernels.gpu.gated_mul import gated_mul
from disagg.kernels.gpu.norm_rope import norm_rope_
from disagg.kernels.gpu.rms_norm import add_rms_norm
from disagg.kernels.kv_pages import FORMATS, format_of
from disagg.kernels.ops import Ops

TOLERANCE = 1.6e-2  # of the largest value

# Context lengths of each sequence; the most telling ones first.
DECODES = {
    "32 x 4k": [4096] * 32,
    "1 x 1k": [1024],
    "128 x 1k": [1024] * 128,
    "1 x 32k": [32768],
    "skewed 32k + 63 x 1k": [32768, *[1024] * 63],
    "32 x 1k": [1024] * 32,
    "8 x 4k": [4096] * 8,
    "256 x 1k": [1024] * 256,
}
SCALED_DECODES = ("32 x 4k", "1 x 32k", "128 x 1k")
VERIFIED = 4  # tokens of each sequence in a step that verifies drafts
PROMPTS = [(4096, 0), (16384, 0), (1024, 15360), (1024, 0)]  # new tokens, tokens before them
# What docs/notebook/gpu.md aims at, as shares of what the device was seen to give.
GOAL_LARGE, GOAL_MEDIUM, GOAL_SCALED = 0.95, 0.75, 0.88
LARGE_NBYTES = 256e6
GOAL_TINY_S = 8e-6
GOAL_PROMPT_FLOPS = 450e12


class Bench:
    """The device and what it gives."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.is_interpreted = self.device.type == "cpu"
        self.heads = TINY if self.is_interpreted else Heads()
        self.dtype = INTERPRETED_DTYPE if self.is_interpreted else torch.bfloat16
        self.ceilings = Ceilings.of(arguments)

    @property
    def of_latents(self) -> Bench:
        """The same of DeepSeek-V3."""
        other = copy.copy(self)
        other.heads = TINY_LATENT if self.is_interpreted else LATENT
        return other

    @property
    def of_chosen(self) -> Bench:
        """The same of DeepSeek-V3.2, whose index chooses the tokens that are attended to."""
        other = copy.copy(self)
        other.heads = TINY_CHOSEN if self.is_interpreted else CHOSEN
        return other

    def contexts(self, contexts: list[int]) -> list[int]:
        """What the interpreter can bear of them."""
        if not self.is_interpreted:
            return contexts
        return [max(20, context // 1024) for context in contexts[:2]]

    def decode(self, contexts: list[int], stored: str, num_new: int = 1) -> dict[str, Any]:
        """Microseconds of one layer."""
        contexts, format = self.contexts(contexts), FORMATS[stored]
        format = format if format.has_scales else format_of(self.dtype)
        enough = UNCACHED_NBYTES if not self.is_interpreted else 1.0
        heads = self.heads.uncached(sum(contexts), format, enough)
        lens = [(num_new, context) for context in contexts]
        is_captured = num_new == 1
        paged = Paged(heads, lens, self.device, self.dtype, format=format, is_captured=is_captured)
        difference = _near(paged.difference())
        nbytes = sum(contexts) * heads.token_nbytes(format)
        if heads.index is not None:  # keys of all tokens, and vectors of the chosen ones
            share = heads.index.key_dim / heads.head_dim
            chosen = sum(min(context, heads.index.num_chosen) for context in contexts)
            nbytes = nbytes * share + chosen * heads.token_nbytes(format) * (1 - share)
        taken_s = seconds(paged.attend_all, self.device) / heads.num_layers
        host_s = launch_seconds(paged.attend_all, self.device) / heads.num_layers
        goal = GOAL_SCALED if format.has_scales else GOAL_LARGE
        goal = goal if nbytes >= LARGE_NBYTES else GOAL_MEDIUM
        read_rate = self.ceilings.read
        return {
            "us": taken_s * 1e6,
            "GB/s": nbytes / taken_s / 1e9,
            **self.ceilings.reading(nbytes / taken_s),
            "goal us": read_rate and max(GOAL_TINY_S, nbytes / read_rate / goal) * 1e6,
            "MB": nbytes / 1e6,
            "layers": heads.num_layers,
            "launched by hand, host us": host_s * 1e6,
            "difference": difference,
        }

    def prompt(self, new: int, cached: int, *, long_rows: int = LONG_ROWS) -> dict[str, Any]:
        """Microseconds of one layer for `new` tokens after `cached` ones, in tiles of so many
        rows."""
        if self.is_interpreted:
            new, cached = max(new // 512, 8), cached // 512
        lens = [(new, new + cached)]
        paged = Paged(self.heads, lens, self.device, self.dtype, long_rows=long_rows)
        difference = _near(paged.difference())
        num_pairs = new * cached + new * (new + 1) // 2
        sizes = self.heads.head_dim + self.heads.value_dim
        index = self.heads.index
        if index is not None:
            scored = 2 * self.heads.index_heads * index.key_dim * num_pairs
            num_pairs, sizes = min(num_pairs, new * index.num_chosen), sizes - index.key_dim
        num_flops = 2 * self.heads.num_heads * sizes * num_pairs
        num_flops += 0 if index is None else scored
        taken_s = seconds(paged.attend_all, self.device) / self.heads.num_layers
        host_s = launch_seconds(paged.attend_all, self.device) / self.heads.num_layers
        return {
            "us": taken_s * 1e6,
            "TFLOP/s": num_flops / taken_s / 1e12,
            **self.ceilings.multiplying(num_flops / taken_s),
            "goal us": num_flops / GOAL_PROMPT_FLOPS * 1e6,
            "launched by hand, host us": host_s * 1e6,
            "difference": difference,
        }

    def delta_nets(self, num_seqs: int, num_tokens: int) -> dict[str, Any]:
        """Microseconds of one layer of gated delta nets, for so many tokens of each sequence."""
        heads = gpu_delta_net.TINY if self.is_interpreted else gpu_delta_net.QWEN3_NEXT
        if self.is_interpreted:
            num_seqs, num_tokens = min(num_seqs, 2), min(num_tokens, 8)
        step = gpu_delta_net.DeltaNets.of(heads, num_seqs, num_tokens, self.device)
        difference = _near(step.difference())
        taken_s = seconds(step.advance, self.device)
        rate = step.nbytes / taken_s
        return {
            "us": taken_s * 1e6,
            "us a token": taken_s * 1e6 / num_tokens,
            "GB/s": rate / 1e9,
            **self.ceilings.reading(rate),
            "difference": difference,
        }

    def matrices(self, num_rows: int) -> dict[str, Any]:
        """Microseconds of each matrix of a layer with so many rows, fused kernels included."""
        hidden, inner = (64, 96) if self.is_interpreted else (4096, 14336)
        heads, size = self.heads, self.heads.head_dim
        num_values = heads.num_heads + 2 * heads.num_kv_heads
        shapes = {
            "qkv": (num_values * size, hidden),
            "output": (hidden, heads.num_heads * size),
            "gate, up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        ops: Ops = ops_for(self.device, heads.num_heads)
        found: dict[str, Any] = {}
        total_nbytes = total_s = total_flops = 0.0
        for name, shape in shapes.items():
            nbytes = 2 * shape[0] * shape[1]
            total_flops += num_rows * nbytes
            taken_s = self._matrix_s(ops, name, shape, num_rows, nbytes)
            found |= {f"{name} us": taken_s * 1e6, f"{name} GB/s": nbytes / taken_s / 1e9}
            total_nbytes, total_s = total_nbytes + nbytes, total_s + taken_s
        shares = {
            **self.ceilings.multiplying(total_flops / total_s),
            **self.ceilings.reading(total_nbytes / total_s),
        }
        del shares["of datasheet"]  # of both
        return {"us": total_s * 1e6, "TFLOP/s": total_flops / total_s / 1e12, **shares, **found}

    def _matrix_s(
        self, ops: Ops, name: str, shape: tuple[int, int], num_rows: int, nbytes: int
    ) -> float:
        """Of one matrix, over enough of them that none stays in the L2."""
        count = max(2, min(32, round(UNCACHED_NBYTES / nbytes)))
        count = 2 if self.is_interpreted else count
        pack = ops.pack_gated if name == "gate, up" else ops.pack
        weights = [pack(self._random(*shape), None) for _ in range(count)]
        x, residual = self._random(num_rows, shape[1]), self._random(num_rows, shape[0])
        norm = self._random(shape[0])

        def run() -> None:
            for weight in weights:
                if name == "qkv":
                    ops.project(x, weight)
                elif name == "gate, up":
                    ops.project_gated(x, weight)
                else:
                    ops.project_add_norm(x, weight, residual, norm, 1e-5)

        return seconds(run, self.device) / count

    def small(self, num_rows: int) -> dict[str, Any]:
        """Microseconds of what else is in a layer, its inputs in the L2 as in a step."""
        heads = self.heads
        hidden, inner = (64, 96) if self.is_interpreted else (4096, 14336)
        num_rows, times = (2, 2) if self.is_interpreted else (num_rows, 32)
        x, residual = self._random(num_rows, hidden), self._random(num_rows, hidden)
        norm, gate_up = self._random(hidden), self._random(num_rows, 2 * inner)
        qkv = self._random(num_rows, heads.num_heads + heads.num_kv_heads, heads.head_dim)
        rope_rows = torch.rand(num_rows, 2, heads.head_dim // 2, device=self.device)
        calls: dict[str, Callable[[], object]] = {
            "add_rms_norm": lambda: add_rms_norm(x, residual, norm, 1e-5),
            "silu_mul": lambda: gated_mul(gate_up),
            "norm_rope": lambda: norm_rope_(qkv, None, 1e-5, rope_rows),
        }
        return {
            f"{name} us": seconds(_repeated(call, times), self.device) / times * 1e6
            for name, call in calls.items()
        }

    def adapters(self, num_rows: int, num_adapters: int) -> dict[str, Any]:
        """Microseconds of what LoRA adapters of rank 16 add to gate and up."""
        num_in, num_out = (64, 96) if self.is_interpreted else (4096, 14336)
        sizes = [num_out] * 2
        count = 1 if self.is_interpreted else 4  # more than the L2 holds
        tables = [
            AdaptedMatrix.empty(num_adapters, 16, sizes, num_in, self.dtype, self.device)
            for _ in range(count)
        ]
        for table in tables:
            table.a.normal_(0.0, num_in**-0.5)
            table.b.normal_()
            table.ranks[:] = [16] * num_adapters
        slots = torch.arange(num_rows, device=self.device, dtype=torch.int32) % num_adapters
        x = self._random(num_rows, num_in).to(self.dtype)
        out = self._random(num_rows, 2 * num_out).to(self.dtype)
        groups = AdapterGroups.of(slots, num_adapters)
        ours = adapt_rows_(out.clone(), x, tables[0], groups)
        theirs = torch_adapters.adapt_rows_(
            out.clone(), x, tables[0], torch_adapters.AdapterRows.of(slots)
        )
        difference = _near(float((ours - theirs).abs().max() / theirs.abs().max()))

        def run() -> None:
            for table in tables:
                adapt_rows_(out, x, table, groups)

        taken_s = seconds(run, self.device) / count
        rate = min(num_rows, num_adapters) * tables[0].nbytes / num_adapters / taken_s
        return {"us": taken_s * 1e6, **self.ceilings.reading(rate), "difference": difference}

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def _near(difference: float) -> float:
    if not difference <= TOLERANCE:
        raise ArithmeticError(f"differs from its reference by {difference:.2g} of the largest")
    return difference


def rows_of(bench: Bench) -> list[Row]:
    def decode(name: str, stored: str, num_new: int = 1) -> Row:
        contexts = DECODES[name]
        verified = f", {num_new} tokens each" if num_new > 1 else ""
        title = f"decode {name}{verified}, {stored}"
        return Row(title, lambda: bench.decode(contexts, stored, num_new))

    def prompt(new: int, cached: int) -> Row:
        return Row(f"prompt {new} after {cached}", lambda: bench.prompt(new, cached))

    def matrices(num_rows: int) -> Row:
        return Row(f"layer matrices, {num_rows} rows", lambda: bench.matrices(num_rows))

    def in_low_tiles(new: int) -> Row:
        """Two programs with such tiles fit onto a multiprocessor of an H100, one with ours."""
        rows = LONG_ROWS // 2
        return Row(f"prompt {new}, {rows} rows", lambda: bench.prompt(new, 0, long_rows=rows))

    def adapters(num_rows: int, num_adapters: int) -> Row:
        title = f"adapters, {num_rows} rows of {num_adapters}"
        return Row(title, lambda: bench.adapters(num_rows, num_adapters))

    def delta_nets(num_seqs: int, num_tokens: int) -> Row:
        title = f"delta nets, {num_tokens} tokens of {num_seqs}"
        return Row(title, lambda: bench.delta_nets(num_seqs, num_tokens))

    latents = bench.of_latents

    def latent_decode(name: str, num_new: int = 1) -> Row:
        verified = f", {num_new} tokens each" if num_new > 1 else ""
        title = f"latent decode {name}{verified}"
        return Row(title, lambda: latents.decode(DECODES[name], "bfloat16", num_new))

    of_chosen = bench.of_chosen

    def chosen_decode(name: str) -> Row:
        title = f"chosen latents, decode {name}"
        return Row(title, lambda: of_chosen.decode(DECODES[name], "bfloat16"))

    plain = [decode(name, "bfloat16") for name in DECODES]
    scaled = [decode(name, stored) for name in SCALED_DECODES for stored in ("fp8", "int8", "int4")]
    prompts = [prompt(*each) for each in PROMPTS]
    return [
        *plain[:5],
        *prompts[:2],
        *map(in_low_tiles, (4096, 16384)),
        *map(matrices, (32, 1, 256)),
        *map(latent_decode, ("32 x 4k", "1 x 32k", "128 x 1k")),
        latent_decode("32 x 4k", VERIFIED),
        *(delta_nets(*each) for each in ((32, 1), (256, 1), (1, 1024))),
        Row("latent prompt 4096 after 0", lambda: latents.prompt(4096, 0)),
        Row("latent prompt 1024 after 15360", lambda: latents.prompt(1024, 15360)),
        *map(chosen_decode, ("32 x 4k", "1 x 32k")),
        Row("chosen latents, prompt 1024 after 15360", lambda: of_chosen.prompt(1024, 15360)),
        *(adapters(32, num) for num in (1, 8, 32)),
        adapters(64 if bench.is_interpreted else 2048, 4),
        *scaled[:3],
        decode("32 x 4k", "bfloat16", VERIFIED),
        *plain[5:],
        *prompts[2:],
        Row("layer rest, 32 rows", lambda: bench.small(32)),
        *scaled[3:],
        matrices(64 if bench.is_interpreted else 8192),
        Row("layer rest, 256 rows", lambda: bench.small(256)),
    ]


TINY_ROWS = (
    "decode 32 x 4k, bfloat16",
    "decode 1 x 32k, int4",
    "latent decode 1 x 32k",
    "chosen latents, decode 1 x 32k",
    "delta nets, 1 tokens of 32",
    "prompt 1024 after 0",
    "layer rest",
    "adapters, 32 rows of 8",
)


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    rows = rows_of(Bench(arguments))
    if arguments.tiny:
        rows = [row for row in rows if row.name.startswith(TINY_ROWS)]
    run_part("gpu_kernels", rows, arguments)


if __name__ == "__main__":
    main()
