"""Every family equals transformers: whole prompts, chunks, decoding, prefix hits, mixed batches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.random_models import random_decoder
from disagg.errors import ModelError
from disagg.models import description, model_config
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import describe_model
from disagg.models.families import FAMILIES
from disagg.models.model_config import ModelConfig
from tests.grids import some
from tests.models import checkpoints
from tests.models.checkpoints import VARIANTS, Checkpoint, write_checkpoint
from tests.models.paging import SMALL, Tokens, make_batch, new_slab, run_step
from tests.models.roundings import all_experts, assert_as_far_as_roundings

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[Decoder, ModelConfig]:
    model = describe_model(checkpoint.directory)
    return load_model(model, dtype, CPU), model.config


def _sequences(num_seqs: int, length: int, num_blocks: int) -> list[Tokens]:
    """Random tokens in shuffled blocks, so that no two neighbours lie next to each other."""
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    per_sequence = math.ceil(length / BLOCK_SIZE)
    return [
        Tokens(
            ids=torch.randint(0, 97, (length,), generator=generator).tolist(),
            block_ids=order[index * per_sequence : (index + 1) * per_sequence],
        )
        for index in range(num_seqs)
    ]


def _worst(sequences: list[Tokens], checkpoint: Checkpoint, ends: list[list[int]]) -> float:
    """Largest difference from transformers over all steps; `ends` are tokens seen at each."""
    return max(
        float((logits - checkpoint.logits(sequence.ids)[end - 1]).abs().max())
        for sequence, own_ends in zip(sequences, ends, strict=True)
        for logits, end in zip(sequence.logits, own_ends, strict=True)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_equals_transformers(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    decoder, config = _load(checkpoint, torch.float32)
    slab = new_slab(config, 64, BLOCK_SIZE, torch.float32, fill=math.nan)
    whole, chunked, late = sequences = _sequences(3, 48, 64)
    steps = [
        [(whole, 40)],  # a whole prompt
        [(whole, 1), (chunked, 7), (late, 30)],  # decoding beside two prompts
        [(whole, 1), (late, 1), (chunked, 13)],  # a chunk that begins inside a block
        [(whole, 1), (late, 1), (chunked, 20)],  # a chunk that ends with one
        *([(whole, 1), (late, 1), (chunked, 1)] for _ in range(4)),
    ]
    ends: dict[int, list[int]] = {id(sequence): [] for sequence in sequences}
    for step in steps:
        run_step(decoder, slab, step, BLOCK_SIZE)
        for sequence, _ in step:
            ends[id(sequence)].append(sequence.num_computed)
    worst = _worst(sequences, checkpoint, [ends[id(sequence)] for sequence in sequences])
    assert worst <= 1e-4


def test_a_family_whose_layers_have_nothing_new_is_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helium, which is not in the table: neighbours are rotated as in GLM."""
    monkeypatch.setitem(checkpoints.VARIANTS, "helium", ("Helium", {"head_dim": 8}))
    checkpoint = write_checkpoint(tmp_path, "helium", pad_token_id=0)
    with pytest.raises(ModelError, match="HeliumForCausalLM; supported are Llama"):
        describe_model(tmp_path)
    helium = replace(FAMILIES["LlamaForCausalLM"], model_type="helium", rotates_pairs=True)
    table = {**FAMILIES, "HeliumForCausalLM": helium}
    for module in (model_config, description):
        monkeypatch.setattr(module, "FAMILIES", table)
    decoder, config = _load(checkpoint, torch.float32)
    (tokens,) = _sequences(1, 40, 16)
    run_step(decoder, new_slab(config, 16, BLOCK_SIZE, torch.float32), [(tokens, 40)], BLOCK_SIZE)
    assert _worst([tokens], checkpoint, [[40]]) <= 1e-4


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "qwen3-mixed-windows",
        "qwen2-moe",
        "gpt-oss",
        "deepseek-v3",
        "minimax-m2",
        "gemma2",
        "gemma3",
        "olmo3-yarn",
    ],
)
def test_prefix_hit_equals_computing_everything(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    decoder, config = _load(checkpoint, torch.float32)
    slab = new_slab(config, 64, BLOCK_SIZE, torch.float32, fill=math.nan)
    first, second = _sequences(2, 40, 64)
    run_step(decoder, slab, [(first, 40)], BLOCK_SIZE)
    shared = 6
    second.ids[: shared * BLOCK_SIZE] = first.ids[: shared * BLOCK_SIZE]
    second.block_ids[:shared] = first.block_ids[:shared]
    second.num_computed = shared * BLOCK_SIZE
    run_step(decoder, slab, [(second, 40 - shared * BLOCK_SIZE)], BLOCK_SIZE)
    assert _worst([second], checkpoint, [[40]]) <= 1e-4


ROUNDED = ["llama", "qwen3", "qwen3-moe", "deepseek-v3", "gemma2", "gpt-oss", "olmo3-yarn"]


@pytest.mark.parametrize(
    "variant",
    some(ROUNDED, (name for name, (family, _) in VARIANTS.items() if family != "Phi3")),
)
def test_bfloat16_is_as_far_from_exact_as_its_roundings(variant: str, tmp_path: Path) -> None:
    changes = all_experts(VARIANTS[variant][1])
    checkpoint = write_checkpoint(tmp_path, variant, dtype=torch.bfloat16, **changes)
    decoder, config = _load(checkpoint, torch.bfloat16)
    slab = new_slab(config, 64, BLOCK_SIZE, torch.bfloat16)
    sequences = _sequences(3, 48, 64)
    for sequence in sequences:
        for count in [24] + [1] * 20:
            run_step(decoder, slab, [(sequence, count)], BLOCK_SIZE)
    assert_as_far_as_roundings(sequences, checkpoint, range(24, 45))


def test_skewed_decodes_are_cut_into_groups_and_come_back_in_order(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama")
    decoder, config = _load(checkpoint, torch.float32)
    slab = new_slab(config, 256, BLOCK_SIZE, torch.float32, fill=math.nan)
    sequences = _sequences(7, 144, 256)
    lengths = [5, 140, 1, 64, 4, 130, 9]
    for sequence, length in zip(sequences, lengths, strict=True):
        run_step(decoder, slab, [(sequence, length)], BLOCK_SIZE)
    run_step(decoder, slab, [(sequence, 1) for sequence in sequences], BLOCK_SIZE)
    ends = [[length, length + 1] for length in lengths]
    assert _worst(sequences, checkpoint, ends) <= 1e-4


def test_long_prompt_over_a_prefix_is_attended_in_pieces() -> None:
    config = replace(SMALL, max_model_len=1024)
    decoder = random_decoder(config, torch.float32, CPU, seed=3)
    ids = torch.randint(0, config.vocab_size, (700,), generator=torch.Generator().manual_seed(1))
    blocks = list(range(175))
    at_once, pieces = Tokens(ids.tolist(), blocks), Tokens(ids.tolist(), blocks)
    run_step(decoder, new_slab(config, 175, 4, torch.float32), [(at_once, 700)], 4)
    slab = new_slab(config, 175, 4, torch.float32)
    for count in (10, 690):
        run_step(decoder, slab, [(pieces, count)], 4)
    torch.testing.assert_close(pieces.logits[-1], at_once.logits[-1], atol=1e-4, rtol=0)


def test_other_sequences_blocks_never_matter() -> None:
    """A sequence's logits are the same bits whether the rest of the slab is zero or NaN."""
    config = SMALL
    decoder = random_decoder(config, torch.float32, CPU)
    results = []
    for fill in (0.0, math.nan):
        slab = new_slab(config, 32, 4, torch.float32, fill=fill)
        short, long = Tokens([5, 6, 7, 8, 9], [3, 9]), Tokens(list(range(20)), [30, 2, 8, 1, 11])
        run_step(decoder, slab, [(short, 4)], 4)
        run_step(decoder, slab, [(long, 19)], 4)
        run_step(decoder, slab, [(short, 1), (long, 1)], 4)
        results.append(torch.stack((short.logits[-1], long.logits[-1])))
    assert torch.equal(results[0], results[1])
    assert torch.isfinite(results[0]).all()


def test_logits_come_only_for_the_rows_asked_for() -> None:
    config = SMALL
    decoder = random_decoder(config, torch.float32, CPU)
    sequence = Tokens(list(range(12)), [0, 1, 2])
    batch = make_batch([(sequence, 12)], 4)
    every = make_batch([(sequence, 12)], 4, every_row=True)
    slab = new_slab(config, 4, 4, torch.float32)
    last = decoder.forward(batch, slab)
    all_rows = decoder.forward(every, slab)
    assert last.dtype == torch.float32
    assert last.shape == (1, config.vocab_size)
    assert all_rows.shape == (12, config.vocab_size)
    torch.testing.assert_close(all_rows[-1:], last, atol=1e-5, rtol=1e-5)


class _LogitTables(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the memory of each float32 tensor with a column per token of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size = vocab_size
        self.places: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        is_float = isinstance(found, Tensor) and found.dtype == torch.float32
        if is_float and found.shape[-1:] == (self.vocab_size,):
            self.places.add(found.data_ptr())
        return found


def test_capped_logits_need_no_memory_beside_the_result() -> None:
    """The plan of a GPU's memory counts one float32 table of logits per graph."""
    config = replace(SMALL, logit_cap=0.5)
    decoder = random_decoder(config, torch.bfloat16, CPU)
    batch = make_batch([(Tokens(list(range(12)), [0, 1, 2]), 12)], 4)
    logits = torch.zeros(1, config.vocab_size)
    with _LogitTables(config.vocab_size) as tables:
        decoder.forward(batch, new_slab(config, 4, 4, torch.bfloat16), logits=logits)
    assert tables.places == {logits.data_ptr()}
    assert 0.1 < float(logits.abs().max()) < 0.5


def test_a_chunk_that_ends_inside_a_prompt_has_no_logits() -> None:
    config = SMALL
    decoder = random_decoder(config, torch.bfloat16, CPU)
    batch = make_batch([(Tokens(list(range(12)), [0, 1, 2]), 8)], 4)
    batch = replace(batch, logits_rows=torch.empty(0, dtype=torch.int64))
    logits = decoder.forward(batch, new_slab(config, 4, 4, torch.bfloat16))
    assert logits.shape == (0, config.vocab_size)
