"""Builds slabs and batches by hand, as an engine would, for tests of models and kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from disagg.kernels.kv_pages import KVPages, format_of, new_pages
from disagg.kernels.recurrent_state import DeltaHeads
from disagg.kv_groups import one_group, state_places
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder
from disagg.models.model_config import IndexConfig, LatentConfig, ModelConfig
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
_INDEX = IndexConfig(
    num_heads=10,
    head_dim=12,
    num_chosen=7,
    is_interleaved=True,
    sharing_layers=frozenset((1,)),
)
_INDEXED = replace(_LATENT, index=_INDEX)
# The first layer chooses the tokens to which both attend.
SMALL_SPARSE = replace(
    SMALL_LATENT,
    family="GlmMoeDsaForCausalLM",
    head_dim=_INDEXED.cached_dim,
    latent=_INDEXED,
)
# With recurrent states, and gates of attention.
SMALL_HYBRID = replace(
    SMALL,
    family="Qwen3NextForCausalLM",
    num_layers=3,
    sliding_windows=(None,) * 3,
    delta_layers=(0, 2),
    delta_heads=DeltaHeads(num_key_heads=1, num_heads=2, key_dim=8, value_dim=6, taps=4),
    gates_output=True,
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
    """Blocks for KV, and behind them those for the states of as many sequences, if a model has
    states."""
    heads = (config.num_kv_layers, config.num_kv_heads, block_size, config.head_dim)
    cpu, format, places = torch.device("cpu"), format_of(dtype), None
    if config.num_shared_layers:
        places = one_group(config.kv_sources).places
    if config.states is not None:
        places = state_places(config.num_layers, config.delta_layers)
        block_nbytes = math.prod(heads) * config.num_vectors * format.itemsize
        num_blocks *= 1 + config.states.num_blocks(block_nbytes)
    pages = new_pages(
        format, num_blocks, *heads, cpu, config.num_vectors, places=places, states=config.states
    )
    pages.values.fill_(fill)
    return pages


def make_batch(
    work: Sequence[tuple[Tokens, int]],
    block_size: int,
    *,
    every_row: bool = False,
    slab: KVPages | None = None,
) -> Batch:
    """Batch the next `n` tokens of each (sequence, n); single tokens come first.

    Logits are wanted for the last token of each, or for every token.

    Args:
        slab: for a model with recurrent states: the state of a sequence stays where it is.
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
    if slab is not None and slab.states is not None:
        num_states = slab.states.num_blocks
        num_sequences = len(slab.values) // (1 + num_states)
        firsts = [num_sequences + s.block_ids[0] * num_states for s, _ in work]
        own = torch.tensor(firsts)[:, None] + torch.arange(num_states)
        of_states = own[:, :, None].expand(-1, -1, tables.shape[1])
        tables = torch.cat((tables[:, None], of_states), 1).flatten(1).int()
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
    logits = decoder.forward(make_batch(work, block_size, slab=slab), slab)
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
