"""Measures other attention kernels on a GPU: torch's by backend, FlashInfer, FlashAttention-3.

    python -m bench.gpu_peers [--out build/gpu] [--only SDPA]

Shapes and shares are those of `gpu_kernels`. Times are those of replayed graphs and one layer.
torch reads dense keys of the same size, which a paged engine would have to gather first. Prompts
are causal. Backends that cannot run a shape, and libraries that are not installed, are named as
absent. FlashInfer compiles its kernels at first use, which takes a minute.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_device import UNCACHED_NBYTES, Ceilings, seconds
from bench.gpu_paged import Heads
from bench.gpu_rows import Absent, Row, parser_of, run_part
from disagg.kernels.kv_pages import FORMATS

WORKSPACE_NBYTES = 256 << 20
COMPILE_S = 150.0
DECODES = {"32 x 4k": (32, 4096), "1 x 32k": (1, 32768), "128 x 1k": (128, 1024)}
PROMPTS = {"4096": 4096, "16384": 16384}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Shapes:
    """Random tensors of Llama-3-8B's heads; on a CPU of fewer and shorter sequences."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.heads = torch.device(arguments.device), Heads()
        self._ceilings = Ceilings.of(arguments)

    def read(self, nbytes: float, taken_s: float) -> dict[str, Any]:
        """The figures of a decode step."""
        rate = nbytes / taken_s
        return {"us": taken_s * 1e6, "GB/s": rate / 1e9, **self._ceilings.reading(rate)}

    def multiplied(self, num_tokens: int, taken_s: float) -> dict[str, Any]:
        """The figures of a causal prompt."""
        heads = self.heads
        num_flops = 4 * heads.num_heads * heads.head_dim * num_tokens * (num_tokens + 1) / 2
        rate = num_flops / taken_s
        return {"us": taken_s * 1e6, "TFLOP/s": rate / 1e12, **self._ceilings.multiplying(rate)}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def decode(self, num_seqs: int, context: int) -> tuple[int, int, int]:
        """Sequences, context, and layers that nothing is cached of."""
        if self.device.type == "cpu":
            return min(num_seqs, 2), context // 64, 2
        bfloat16 = FORMATS["bfloat16"]
        layers = self.heads.uncached(num_seqs * context, bfloat16, UNCACHED_NBYTES).num_layers
        return num_seqs, context, layers

    def prompt(self, num_tokens: int) -> int:
        return num_tokens // 64 if self.device.type == "cpu" else num_tokens


def sdpa_decode(shapes: Shapes, backend: SDPBackend, num_seqs: int, context: int) -> dict[str, Any]:
    num_seqs, context, num_layers = shapes.decode(num_seqs, context)
    heads = shapes.heads
    kv = [
        shapes.random(2, num_seqs, heads.num_kv_heads, context, heads.head_dim)
        for _ in range(num_layers)
    ]
    q = shapes.random(num_seqs, heads.num_heads, 1, heads.head_dim)

    def run() -> None:
        for keys, values in kv:
            scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    taken_s = _pinned(run, backend, shapes.device) / num_layers
    return shapes.read(kv[0].nbytes, taken_s)


def sdpa_prompt(shapes: Shapes, backend: SDPBackend, num_tokens: int) -> dict[str, Any]:
    num_tokens, heads = shapes.prompt(num_tokens), shapes.heads
    q = shapes.random(1, heads.num_heads, num_tokens, heads.head_dim)
    keys, values = shapes.random(2, 1, heads.num_kv_heads, num_tokens, heads.head_dim)

    def run() -> None:
        scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)

    taken_s = _pinned(run, backend, shapes.device)
    return shapes.multiplied(num_tokens, taken_s)


def _pinned(run: Callable[[], None], backend: SDPBackend, device: torch.device) -> float:
    try:
        with sdpa_kernel(backend):
            return seconds(run, device)
    except RuntimeError as error:
        if str(error).startswith(("No available kernel", "No viable backend")):
            raise Absent(f"{backend.name} cannot run this shape: {error}") from error
        raise


def _pages(shapes: Shapes, num_seqs: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of one layer [num_blocks, 2, heads, block, size], shuffled block ids, where each begins."""
    heads, size = shapes.heads, shapes.heads.block_size
    count = -(-context // size)
    pages = shapes.random(num_seqs * count, 2, heads.num_kv_heads, size, heads.head_dim)
    order = torch.randperm(num_seqs * count, device=shapes.device, dtype=torch.int32)
    starts = torch.arange(0, (num_seqs + 1) * count, count, device=shapes.device).int()
    return pages, order, starts


def flashinfer_decode(shapes: Shapes, num_seqs: int, context: int) -> dict[str, Any]:
    import flashinfer

    num_seqs, context, num_layers = shapes.decode(num_seqs, context)
    heads, size = shapes.heads, shapes.heads.block_size
    layers = [_pages(shapes, num_seqs, context)[0] for _ in range(num_layers)]
    _, order, starts = _pages(shapes, num_seqs, context)
    workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=shapes.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    last = torch.full((num_seqs,), (context - 1) % size + 1, device=shapes.device).int()
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    counts = (heads.num_heads, heads.num_kv_heads, heads.head_dim, size)
    wrapper.plan(starts, order, last, *counts, **types)
    q = shapes.random(num_seqs, heads.num_heads, heads.head_dim)

    def run() -> None:
        for layer in layers:
            wrapper.run(q, layer)

    taken_s = seconds(run, shapes.device) / num_layers
    nbytes = num_seqs * context * heads.token_nbytes(FORMATS["bfloat16"])
    return shapes.read(nbytes, taken_s)


def flashinfer_prompt(shapes: Shapes, num_tokens: int) -> dict[str, Any]:
    import flashinfer

    num_tokens, heads = shapes.prompt(num_tokens), shapes.heads
    pages, order, starts = _pages(shapes, 1, num_tokens)
    workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=shapes.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    last = torch.tensor([(num_tokens - 1) % heads.block_size + 1], device=shapes.device).int()
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    counts = (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.block_size)
    query_starts = torch.tensor([0, num_tokens], device=shapes.device).int()
    wrapper.plan(query_starts, starts, order, last, *counts, causal=True, **types)
    q = shapes.random(num_tokens, heads.num_heads, heads.head_dim)
    taken_s = seconds(lambda: wrapper.run(q, pages), shapes.device)
    # "fa3" on a Hopper, unless it says otherwise.
    return {**shapes.multiplied(num_tokens, taken_s), "backend": getattr(wrapper, "_backend", None)}


def fa3_prompt(shapes: Shapes, num_tokens: int) -> dict[str, Any]:
    from flash_attn_interface import flash_attn_func

    num_tokens, heads = shapes.prompt(num_tokens), shapes.heads
    q = shapes.random(1, num_tokens, heads.num_heads, heads.head_dim)
    keys, values = shapes.random(2, 1, num_tokens, heads.num_kv_heads, heads.head_dim)
    taken_s = seconds(lambda: flash_attn_func(q, keys, values, causal=True), shapes.device)
    return shapes.multiplied(num_tokens, taken_s)


def rows_of(shapes: Shapes) -> list[Row]:
    rows = []
    for called, backend in BACKENDS.items():
        rows += [
            Row(f"SDPA {called}, prompt {name}", partial(sdpa_prompt, shapes, backend, size))
            for name, size in PROMPTS.items()
        ]
        rows += [
            Row(f"SDPA {called}, decode {name}", partial(sdpa_decode, shapes, backend, *each))
            for name, each in DECODES.items()
        ]
    for name, each in DECODES.items():
        measure = partial(flashinfer_decode, shapes, *each)
        rows.append(Row(f"FlashInfer, decode {name}", measure, COMPILE_S))
    for name, size in PROMPTS.items():
        measure = partial(flashinfer_prompt, shapes, size)
        rows.append(Row(f"FlashInfer, prompt {name}", measure, COMPILE_S))
        rows.append(Row(f"FA3, prompt {name}", partial(fa3_prompt, shapes, size)))
    return rows


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    run_part("gpu_peers", rows_of(Shapes(arguments)), arguments)


if __name__ == "__main__":
    main()
