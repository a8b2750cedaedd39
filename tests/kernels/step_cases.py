"""Models and sequences for tests of the compiled steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.random_models import random_weights
from disagg.kernels.kv_pages import KVPages
from disagg.models.decoder import CpuDecoder, Decoder
from disagg.models.model_config import ModelConfig
from disagg.models.weights import DecoderWeights
from tests.models.paging import SMALL, Tokens, make_batch, new_slab, run_step

CPU = torch.device("cpu")
NewDecoder = Callable[..., CpuDecoder]
LLAMA = replace(SMALL, qkv_bias=False, qk_norm=False, sliding_windows=(None, None))


def loud_weights(config: ModelConfig) -> DecoderWeights:
    """Weights whose biases and norms matter, of which attention is not flat."""
    weights = random_weights(config, torch.bfloat16, CPU, seed=2)
    generator = torch.Generator().manual_seed(3)

    def louder(tensor: Any) -> Any:
        if tensor is None:
            return None
        if tensor.dim() == 2:
            return tensor * 6
        return (1 + torch.randn(tensor.shape, generator=generator) / 2).to(tensor.dtype)

    layers = [
        replace(
            layer, **{name: louder(getattr(layer, name)) for name in layer.__dataclass_fields__}
        )
        for layer in weights.layers
    ]
    embedding, head = weights.embedding * 20, weights.lm_head * 6
    if config.tie_word_embeddings:
        embedding = head = weights.embedding * 5
    return replace(weights, layers=layers, embedding=embedding, lm_head=head)


def in_float32(weights: DecoderWeights) -> DecoderWeights:
    def wide(each: Any) -> Any:
        return each.float() if isinstance(each, Tensor) else each

    layers = [
        replace(layer, **{name: wide(getattr(layer, name)) for name in layer.__dataclass_fields__})
        for layer in weights.layers
    ]
    names = ("embedding", "norm", "lm_head")
    tables = {name: wide(getattr(weights, name)) for name in names}
    return replace(weights, layers=layers, dtype=torch.float32, **tables)


def random_sequences(lengths: list[int], block_size: int, vocab_size: int) -> list[Tokens]:
    """Random tokens in shuffled blocks."""
    generator = torch.Generator().manual_seed(5)
    counts = [-(-(length + 2) // block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator).tolist()
    sequences = []
    for length, count in zip(lengths, counts, strict=True):
        ids = torch.randint(0, vocab_size, (length + 2,), generator=generator).tolist()
        sequences.append(Tokens(ids, [order.pop() for _ in range(count)]))
    return sequences


def slab_of(
    config: ModelConfig,
    sequences: list[Tokens],
    block_size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> KVPages:
    num_blocks = sum(len(sequence.block_ids) for sequence in sequences)
    return new_slab(config, num_blocks, block_size, dtype, fill=math.nan)


CASES: dict[str, tuple[ModelConfig, list[int], int]] = {
    # A model, the lengths of its sequences, and the size of blocks.
    "one sequence": (SMALL, [40], 16),
    "windows, groups, biases, norms of heads": (SMALL, [3, 30, 1, 17, 100, 64, 15, 16], 4),
    "blocks of an odd size": (SMALL, [25, 7, 12, 13], 12),
    "llama": (LLAMA, [20, 31, 32, 33, 5, 6, 7], 16),
    "biases of everything": (
        replace(LLAMA, family="LlamaForCausalLM", qkv_bias=True, output_bias=True, mlp_bias=True),
        [9, 50],
        16,
    ),
    "one head for each KV head": (replace(LLAMA, num_kv_heads=6), [9, 50, 23], 16),
    "one KV head for six": (replace(SMALL, num_kv_heads=1), [9, 50, 23], 16),
    "heads of 48": (replace(SMALL, head_dim=48), [9, 50, 23], 16),
    "heads of 128": (replace(SMALL, head_dim=128), [9, 50], 16),
    "hidden sizes in no multiple of 16": (
        replace(SMALL, hidden_size=54, intermediate_size=74),
        [9, 50],
        16,
    ),
    "a context in several chunks": (
        replace(SMALL, max_model_len=2048, sliding_windows=(None, 600)),
        [511, 512, 513, 1100, 1500],
        64,
    ),
}


def assert_as_close(truth: Tensor, own: Tensor, other: Tensor) -> None:
    """`own` is as close to the truth as `other`."""
    own_error, other_error = ((each - truth).square().mean() for each in (own, other))
    assert truth.abs().max() > 0.5
    # Both are random, and another processor rounds the other one differently. The logarithm of such
    # a ratio has a standard deviation of about 0.35: four of them. A wrong one is off by far more.
    assert own_error <= 4 * other_error
    assert (own - truth).abs().max() <= 4 * (other - truth).abs().max()


def assert_as_close_as_torch(
    case: str,
    new_decoder: NewDecoder,
    compute: Callable[[Decoder, KVPages, list[Tokens]], Tensor],
) -> None:
    """The logits that `compute` returns of a case's sequences, and the KV that it writes: those of
    the compiled program are as close to float32 as torch's."""
    config, lengths, block_size = CASES[case]
    weights = loud_weights(config)
    exact = Decoder(config, in_float32(weights))
    ours, torchs = new_decoder(config, weights), Decoder(config, weights)
    logits, caches = [], []
    for decoder in (exact, ours, torchs):
        sequences = random_sequences(lengths, block_size, config.vocab_size)
        slab = slab_of(config, sequences, block_size, decoder.dtype)
        logits.append(compute(decoder, slab, sequences))
        caches.append(slab.values.float())
    for found in (logits, caches):
        assert_as_close(*(each.nan_to_num(0.0) for each in found))
    written = [~cache.isnan() for cache in caches]
    assert torch.equal(written[1], written[2])


def prompts_and_step(
    decoder: Decoder, config: ModelConfig, lengths: list[int], block_size: int
) -> tuple[list[Tensor], Tensor]:
    """Logits of prompts, and of a step after them; in a compiled one neighbours change no bit."""
    sequences = random_sequences(lengths, block_size, config.vocab_size)
    slab = slab_of(config, sequences, block_size, decoder.dtype)
    for sequence, length in zip(sequences, lengths, strict=True):
        run_step(decoder, slab, [(sequence, length)], block_size)
    batch = make_batch([(sequence, 1) for sequence in sequences], block_size)
    after = decoder.forward(batch, slab)
    if isinstance(decoder, CpuDecoder):
        alone = make_batch([(sequences[0], 1)], block_size)
        assert torch.equal(decoder.forward(alone, slab)[0], after[0])
    return [row for sequence in sequences for row in sequence.logits], after
