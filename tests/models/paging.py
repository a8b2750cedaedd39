"""Builds slabs and batches by hand, as an engine would, for tests of models and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from disagg.kernels.kv_pages import KVPages, format_of, new_pages
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder
from disagg.models.model_config import LatentConfig, ModelConfig
from disagg.models.rope import RopeConfig

# With all that the kernels know: windows, grouped heads, biases, norms of queries and keys.
SMALL = ModelConfig(
    family="Qwen3ForCausalLM",
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=48,
    intermediate_size=80,
    vocab_size=61,
    max_model_len=128,
    dtype="float32",
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    sliding_windows=(None, 20),
    qkv_bias=True,
    qk_norm=True,
)

_LATENT = LatentConfig(
    rank=24,
    query_rank=10,
    rope_dim=8,
    nope_dim=12,
    value_dim=6,
    scale=0.25,
    is_interleaved=True,
)
# With latent attention, and no experts.
SMALL_LATENT = replace(
    SMALL,
    family="DeepseekV3ForCausalLM",
    num_heads=3,
    num_kv_heads=1,
    head_dim=_LATENT.cached_dim,
    latent=_LATENT,
    sliding_windows=(None, None),
    qkv_bias=False,
    qk_norm=False,
)


@dataclass
class Tokens:
    """One sequence: its tokens, how many have KV, and its blocks in order."""

    ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)  # of each step


def new_slab(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, fill: float = 0.0
) -> KVPages:
    heads = (config.num_layers, config.num_kv_heads, block_size, config.head_dim)
    cpu = torch.device("cpu")
    pages = new_pages(format_of(dtype), num_blocks, *heads, cpu, config.num_vectors)
    pages.values.fill_(fill)
    return pages


def make_batch(
    work: Sequence[tuple[Tokens, int]], block_size: int, *, every_row: bool = False
) -> Batch:
    """Batch the next `n` tokens of each (sequence, n); single tokens come first.

    Logits are wanted for the last token of each, or for every token.
    """
    counts = [count for _, count in work]
    assert counts == sorted(counts, key=lambda count: count != 1), "decodes come first"
    positions = [p for s, n in work for p in range(s.num_computed, s.num_computed + n)]
    owners = [s for s, n in work for _ in range(n)]
    slots = [
        s.block_ids[p // block_size] * block_size + p % block_size
        for s, p in zip(owners, positions, strict=True)
    ]
    lengths = [s.num_computed + n for s, n in work]
    tables = torch.zeros(len(work), max(len(s.block_ids) for s, _ in work), dtype=torch.int32)
    for row, (sequence, _) in enumerate(work):
        tables[row, : len(sequence.block_ids)] = torch.tensor(sequence.block_ids)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(
        token_ids=torch.tensor([s.ids[p] for s, p in zip(owners, positions, strict=True)]),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=starts,
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.arange(len(positions)) if every_row else starts[1:].long() - 1,
        num_decodes=sum(count == 1 for count in counts),
        max_query_len=max(counts),
        query_lens=tuple(counts),
        context_lens_host=tuple(lengths),
    )


def run_step(
    decoder: Decoder, slab: KVPages, work: Sequence[tuple[Tokens, int]], block_size: int
) -> None:
    """Compute the next tokens of some sequences and keep the logits that come out."""
    logits = decoder.forward(make_batch(work, block_size), slab)
    for row, (sequence, count) in zip(logits, work, strict=True):
        sequence.num_computed += count
        sequence.logits.append(row)


def logits_of(decoder: Decoder) -> Tensor:
    """Of a prompt in two chunks and of two tokens after it, in float32."""
    slab = new_slab(decoder.config, 16, 4, torch.float32)
    tokens = Tokens([3 * place % 97 for place in range(40)], list(range(10)))
    for count in (20, 13, 1, 1):
        run_step(decoder, slab, [(tokens, count)], 4)
    return torch.stack(tokens.logits)
