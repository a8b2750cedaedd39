"""Steps with prompts as one compiled program: what every cut and every neighbour has in common."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from disagg.kernels.dispatch import Quantization
from disagg.kernels.kv_pages import FORMATS, KVPages, new_pages
from disagg.models.decoder import Decoder
from tests.grids import examples
from tests.kernels.step_cases import (
    CASES,
    CPU,
    NewDecoder,
    assert_as_close_as_torch,
    loud_weights,
    random_sequences,
    slab_of,
)
from tests.models.paging import SMALL, Tokens, make_batch

LONG = replace(SMALL, hidden_size=96, intermediate_size=576, max_model_len=1024)


def _hidden(decoder: Decoder, slab: KVPages, work: list[tuple[Tokens, int]]) -> Tensor:
    """Of all tokens, after the last norm."""
    hidden = decoder.hidden(make_batch(work, 16, every_row=True), slab)
    for sequence, count in work:
        sequence.num_computed += count
    return hidden


@pytest.mark.parametrize("case", CASES)
def test_logits_of_all_tokens_are_as_close_to_float32_as_torchs(
    case: str, new_decoder: NewDecoder
) -> None:
    """And the KV that they write, also behind cached tokens, in one step with all sequences."""
    _, lengths, block_size = CASES[case]

    def compute(decoder: Decoder, slab: KVPages, sequences: list[Tokens]) -> Tensor:
        found = []
        for share in (3, 1):  # a third of each, and the rest
            work = [
                (each, length // share - each.num_computed)
                for each, length in zip(sequences, lengths, strict=True)
            ]
            work = sorted((each for each in work if each[1]), key=lambda each: each[1] != 1)
            batch = make_batch(work, block_size, every_row=True)
            found.append(decoder.forward(batch, slab))
            for sequence, count in work:
                sequence.num_computed += count
        return torch.cat(found)

    assert_as_close_as_torch(case, new_decoder, compute)


@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_prompt_may_be_cut_anywhere(data: st.DataObject, new_decoder: NewDecoder) -> None:
    """To the bit: what it computes, with other sequences in the steps, on other threads."""
    quantization = data.draw(st.sampled_from([None, "int8", "int4"]))
    decoder = new_decoder(LONG, loud_weights(LONG), quantization)
    length = 2 * data.draw(st.integers(1, 75))
    cuts = [2 * cut for cut in sorted(data.draw(st.sets(st.integers(1, 74), max_size=3)))]
    cuts = [cut for cut in cuts if cut < length]  # none leaves a single token, which is a decode
    lengths = [length, *data.draw(st.lists(st.integers(2, 90), max_size=3))]
    name = data.draw(st.sampled_from(["bfloat16", "int8", "int4", "fp8"]))
    heads = LONG.num_layers, LONG.num_kv_heads, 16, LONG.head_dim

    def slab_for(sequences: list[Tokens]) -> KVPages:
        num_blocks = sum(len(each.block_ids) for each in sequences)
        return new_pages(FORMATS[name], num_blocks, *heads, CPU)

    sequences = random_sequences(lengths, 16, LONG.vocab_size)
    slab = slab_for(sequences)
    whole = _hidden(decoder, slab, [(sequences[0], length)])
    again = random_sequences(lengths, 16, LONG.vocab_size)
    other_slab = slab_for(again)
    torch.set_num_threads(data.draw(st.integers(1, 4)))
    parts = []
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        work = [(again[0], end - start)]
        if len(again) > 1:
            neighbour = again.pop()
            work.append((neighbour, len(neighbour.ids) - 2))
        parts.append(_hidden(decoder, other_slab, work)[: end - start])
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_large_step_computes_what_small_ones_do(
    quantization: Quantization | None, new_decoder: NewDecoder
) -> None:
    """To the bit, of more tokens than columns are widened for at once."""
    decoder = new_decoder(LONG, loud_weights(LONG), quantization)
    lengths = [500, 2, 333, 450]
    alone, together = (random_sequences(lengths, 16, LONG.vocab_size) for _ in range(2))
    slab = slab_of(LONG, alone, 16)
    parts = [_hidden(decoder, slab, [each]) for each in zip(alone, lengths, strict=True)]
    slab = slab_of(LONG, together, 16)
    whole = _hidden(decoder, slab, list(zip(together, lengths, strict=True)))
    assert torch.equal(whole, torch.cat(parts))


def _is_close(own: Tensor, other: Tensor) -> bool:
    return bool((own - other).abs().max() <= 0.05 * other.abs().max())


def test_a_decode_beside_a_prompt_has_the_same_logits(new_decoder: NewDecoder) -> None:
    """Up to the order in which attention adds up."""
    decoder = new_decoder(LONG, loud_weights(LONG))
    lengths = [40, 300]
    sequences = random_sequences(lengths, 16, LONG.vocab_size)
    slab = slab_of(LONG, sequences, 16)
    _hidden(decoder, slab, [(sequences[0], 40)])
    alone = decoder.forward(make_batch([(sequences[0], 1)], 16), slab)
    both = decoder.forward(make_batch([(sequences[0], 1), (sequences[1], 300)], 16), slab)
    assert _is_close(both[0], alone[0])


def test_logits_may_be_wanted_of_any_tokens(new_decoder: NewDecoder) -> None:
    decoder = new_decoder(LONG, loud_weights(LONG))
    (sequence,) = random_sequences([70], 16, LONG.vocab_size)
    slab = slab_of(LONG, [sequence], 16)
    batch = make_batch([(sequence, 70)], 16, every_row=True)
    every = decoder.forward(batch, slab)
    rows = torch.tensor([3, 68, 17])
    assert torch.equal(decoder.forward(replace(batch, logits_rows=rows), slab), every[rows])


def test_what_is_behind_a_prompt_in_its_last_block_is_zero(new_decoder: NewDecoder) -> None:
    decoder = new_decoder(SMALL)
    (sequence,) = random_sequences([21], 16, SMALL.vocab_size)
    slab = slab_of(SMALL, [sequence], 16)
    _hidden(decoder, slab, [(sequence, 21)])
    block = sequence.block_ids[1]
    assert (slab.values[block][:, :, :, 5:] == 0).all()
    assert (slab.values[block][:, :, :, :5] != 0).any()
    assert not math.isnan(float(slab.values[sequence.block_ids[0]].sum()))
