"""Measures what formats of weights, products and KV cost in quality: SmolLM2-135M-Instruct.

    python -m bench.formats [--text FILE] [--num-tokens 4096] [--tiny]

Each row computes the same text, in windows of `WINDOW` tokens, in float32 by plain torch; only what
the row names is rounded. Weights are those of the layers, rounded from the checkpoint's floats as
`--quantization` does on a GPU. MXFP4 and NVFP4, which are only read from checkpoints that their
makers have calibrated, are rounded to nearest. Products `in 8 bits` round activations too, as steps
of many tokens do. KV is rounded as it is stored.

- `perplexity`: of the text.
- `KL`: mean divergence of the next token's distribution from that of floats, in nats.
- `same first`: share of places whose likeliest next token is that of floats.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from bench.report import finish, print_table
from disagg.kernels import reference
from disagg.kernels.cpu.linear import Linear, PlainLinear, linear
from disagg.kernels.kv_pages import FORMATS, new_pages
from disagg.kernels.packed_matrix import Largest, PackedMatrix, quantized
from disagg.kernels.packed_sizes import FP4_KINDS, MXFP4_GROUP, NVFP4_GROUP, Kind
from disagg.kernels.torch.ops import TorchOps
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import ModelDescription, describe_model
from disagg.models.fetched import cached_file, fetch
from disagg.text.tokenizer import Tokenizer
from tests.models.paging import Tokens, make_batch

TEXT = Path(__file__).parent.parent / "docs" / "planning.md"
WINDOW, BLOCK_SIZE = 1024, 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LARGEST_E2M1, LARGEST_E4M3 = 6.0, 448.0


class Row(NamedTuple):
    """weights: None: floats."""

    weights: Kind | None = None
    in_8_bits: bool = False
    kv: str = "float32"


ROWS = (
    Row(),
    Row("fp8"),
    Row("fp8", in_8_bits=True),
    Row("int8"),
    Row("int8", in_8_bits=True),
    Row("int4"),
    Row("mxfp4"),
    Row("nvfp4"),
    *(Row(kv=each.name) for each in FORMATS.values() if each.has_scales),
    Row("fp8", in_8_bits=True, kv="fp8"),
)


class EightBitLinear(PlainLinear):
    """A product whose activations are rounded as `reference.eight_bit_linear` does."""

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None) -> None:
        super().__init__(matrix.widened(torch.float32), bias)
        self._matrix = replace(matrix, input_scale=0.0)  # each row has its own

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = reference.quantize_rows(x, self._matrix)
        return super().__call__(numbers * scales)


class RoundingOps(TorchOps):
    """Plain torch in which the matrices of layers are rounded."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self._row = row

    def pack(
        self, weight: Tensor | PackedMatrix, bias: Tensor | None, largest: Largest | None = None
    ) -> Linear:
        kind = self._row.weights
        assert isinstance(weight, Tensor)
        if kind is None:
            return linear(weight, bias)
        if kind in FP4_KINDS:
            return linear(rounded_to_fp4(weight, kind), bias)
        matrix = quantized(weight, kind)
        if self._row.in_8_bits:
            return EightBitLinear(matrix, bias)
        return linear(matrix.widened(torch.float32), bias)

    def pack_table(self, weight: Tensor | PackedMatrix, bias: Tensor | None = None) -> Linear:
        assert isinstance(weight, Tensor)
        return linear(weight, bias)


def rounded_to_fp4(weight: Tensor, kind: Kind) -> Tensor:
    """The nearest e2m1 numbers with the scales of the format (OCP Microscaling 1.0; NVFP4)."""
    groups = weight.view(len(weight), -1, MXFP4_GROUP if kind == "mxfp4" else NVFP4_GROUP)
    peaks = groups.abs().amax(-1, keepdim=True)
    if kind == "mxfp4":
        scales = (peaks.log2().floor() - 2).exp2()  # the largest e2m1 has exponent 2
    else:
        of_all = weight.abs().max() / (LARGEST_E2M1 * LARGEST_E4M3)
        scales = (peaks / LARGEST_E2M1 / of_all).to(torch.float8_e4m3fn).float() * of_all
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (groups / scales).clamp(-LARGEST_E2M1, LARGEST_E2M1)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    nearest = E2M1[torch.bucketize(scaled.abs().contiguous(), middles)].copysign(scaled)
    return (nearest * scales).view_as(weight)


def log_probabilities(decoder: Decoder, kv: str, windows: Tensor) -> Tensor:
    """Of the next token at each place: [num_windows, window, vocab_size]."""
    config = decoder.config
    found = []
    for ids in windows.tolist():
        num_blocks = -(-len(ids) // BLOCK_SIZE)
        heads = (config.num_kv_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        pages = new_pages(FORMATS[kv], num_blocks, *heads, torch.device("cpu"))
        tokens = Tokens(ids, list(range(num_blocks)))
        batch = make_batch([(tokens, len(ids))], BLOCK_SIZE, every_row=True)
        found.append(log_softmax(decoder.forward(batch, pages).float(), -1))
    return torch.stack(found)


def measured(row: Row, model: ModelDescription, windows: Tensor) -> Tensor:
    """The log-probabilities with a row's formats."""
    decoder = load_model(model, torch.float32, torch.device("cpu"), ops=RoundingOps(row))
    return log_probabilities(decoder, row.kv, windows)


def compared(row: Row, found: Tensor, exact: Tensor, windows: Tensor) -> dict[str, Any]:
    wanted = windows[:, 1:].flatten()
    loss = cross_entropy(found[:, :-1].flatten(0, 1), wanted)
    each = zip(found, exact, strict=True)  # window by window, for less memory at a time
    divergence = sum(kl_div(*pair, reduction="sum", log_target=True) for pair in each)
    return {
        "weights": row.weights or "floats",
        "products": "in 8 bits" if row.in_8_bits else "floats",
        "KV": row.kv,
        "perplexity": math.exp(loss),
        "KL": float(divergence) / windows.numel(),
        "same first %": 100 * float((found.argmax(-1) == exact.argmax(-1)).float().mean()),
    }


def windows_of(model: ModelDescription, text: str, num_tokens: int, window: int) -> Tensor:
    """[num_tokens / window, window] tokens of a text."""
    tokenizer = Tokenizer.from_json(model.read_tokenizer(), "smollm2")
    ids = tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    return torch.tensor(ids[: len(ids) // window * window]).view(-1, window)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=TEXT, metavar="FILE")
    parser.add_argument("--num-tokens", type=int, default=4 * WINDOW)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    fetch("smollm2", lambda event, message, **fields: None, lambda: False)
    model = describe_model(cached_file("smollm2"))
    text = arguments.text.read_text(encoding="utf-8")
    sizes = (64, 32) if arguments.tiny else (arguments.num_tokens, WINDOW)
    windows = windows_of(model, text, *sizes)
    exact = measured(ROWS[0], model, windows)
    rows = [compared(ROWS[0], exact, exact, windows)]
    rows += [compared(row, measured(row, model, windows), exact, windows) for row in ROWS[1:]]
    print_table(rows)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    finish("formats", rows, text=arguments.text.name, sha256=digest, num_tokens=windows.numel())


if __name__ == "__main__":
    main()
