"""The compiled step and torch's operations are two ways to the same logits and the same KV."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.random_models import random_weights
from disagg.kernels import reference
from disagg.kernels.cpu.library import AVX2_STEP
from disagg.kernels.cpu.step import MOST_ROWS
from disagg.kernels.dispatch import Quantization
from disagg.kernels.kv_pages import FORMATS, KVPages, new_pages
from disagg.kernels.torch.ops import TorchOps
from disagg.models.decoder import CpuDecoder, Decoder, build_decoder
from disagg.models.model_config import ModelConfig
from tests.kernels.compiled import loaded
from tests.kernels.step_cases import (
    CASES,
    CPU,
    LLAMA,
    NewDecoder,
    assert_as_close,
    assert_as_close_as_torch,
    in_float32,
    loud_weights,
    prompts_and_step,
    random_sequences,
    slab_of,
)
from tests.models.paging import SMALL, Tokens, make_batch, new_slab, run_step


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("head_dim", [16, 48, 64])
def test_quantised_kv(format: str, head_dim: int, new_decoder: NewDecoder) -> None:
    """What a step writes is what the reference makes of the KV that it writes without scales; what
    it reads there, also in several chunks and in blocks that begin, gives logits as close to those
    of float32 as torch's."""
    config = replace(SMALL, head_dim=head_dim, max_model_len=1024, num_layers=1)
    config = replace(config, sliding_windows=(None,))
    weights = loud_weights(config)
    ours, torchs = new_decoder(config, weights), Decoder(config, weights)
    exact = Decoder(config, in_float32(weights))
    lengths, block_size = [7, 600, 15, 16], 16
    heads = (config.num_layers, config.num_kv_heads, block_size, head_dim)
    logits, slabs = {}, {}
    for name, decoder in (
        ("bfloat16", ours),
        (format, ours),
        ("torch", torchs),
        ("exact", exact),
    ):
        sequences = random_sequences(lengths, block_size, config.vocab_size)
        num_blocks = sum(len(sequence.block_ids) for sequence in sequences)
        slab = new_pages(FORMATS[name if name in FORMATS else format], num_blocks, *heads, CPU)
        for sequence, length in zip(sequences, lengths, strict=True):
            run_step(torchs, slab, [(sequence, length)], block_size)
        batch = make_batch([(sequence, 1) for sequence in sequences], block_size)
        logits[name], slabs[name] = decoder.forward(batch, slab), slab
    assert_as_close(logits["exact"], logits[format], logits["torch"])
    found, plain = slabs[format], slabs["bfloat16"]
    assert found.scales is not None and slabs["torch"].scales is not None
    for slot in batch.slots.tolist():
        at = slot // block_size, 0, slice(None), slice(None), slot % block_size
        values, scales = reference.quantize(plain.values[at], found.format)
        assert torch.equal(found.values[at].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(found.scales[at], scales)
    assert torch.equal(found.scales != 0, slabs["torch"].scales != 0)


@pytest.mark.parametrize("case", [*CASES, "tied", "odd sizes"])
def test_weights_of_8_bits(case: str, new_decoder: NewDecoder) -> None:
    """The logits of torch with the same int8 weights, and in float32 with what they stand for."""
    config, lengths, block_size = CASES["llama" if case in ("tied", "odd sizes") else case]
    if case == "tied":
        config = replace(config, tie_word_embeddings=True)
    if case == "odd sizes":
        config = replace(config, hidden_size=53, intermediate_size=75)
    weights = loud_weights(config)
    ours, torchs = new_decoder(config, weights, "int8"), Decoder(config, weights, None, "int8")
    exact = Decoder(config, in_float32(weights), TorchOps(bits=8))
    decoders = exact, ours, torchs
    assert_as_close(*(prompts_and_step(each, config, lengths, block_size)[1] for each in decoders))


WITH_4_BITS = {
    **{name: case for name, case in CASES.items() if case[0].hidden_size % 8 == 0},
    "several groups, the last one shorter": (
        replace(SMALL, hidden_size=192, intermediate_size=328),
        [9, 50],
        16,
    ),
    "tied": (replace(LLAMA, tie_word_embeddings=True), [20, 5], 16),
}


@pytest.mark.parametrize("case", WITH_4_BITS)
def test_weights_of_4_bits(case: str, new_decoder: NewDecoder) -> None:
    """Prompts and steps: the logits of torch with the same numbers, widened, and in float32."""
    config, lengths, block_size = WITH_4_BITS[case]
    weights = loud_weights(config)
    ours = new_decoder(config, weights, "int4")
    torchs = Decoder(config, weights, quantization="int4")
    exact = Decoder(config, in_float32(weights), TorchOps(bits=4))
    found = (prompts_and_step(each, config, lengths, block_size) for each in (exact, ours, torchs))
    assert_as_close(*(torch.stack([*prompts, *after]) for prompts, after in found))


@pytest.mark.parametrize("case", CASES)
def test_as_close_to_float32_as_torch(case: str, new_decoder: NewDecoder) -> None:
    """The logits of two steps, and the KV that they write."""
    _, lengths, block_size = CASES[case]

    def compute(decoder: Decoder, slab: KVPages, sequences: list[Tokens]) -> Tensor:
        for sequence, length in zip(sequences, lengths, strict=True):
            run_step(decoder, slab, [(sequence, length)], block_size)
            sequence.logits.clear()
        for _ in range(2):
            run_step(decoder, slab, [(sequence, 1) for sequence in sequences], block_size)
        return torch.stack([row for sequence in sequences for row in sequence.logits])

    assert_as_close_as_torch(case, new_decoder, compute)


def test_a_gate_far_away_is_open_or_closed(new_decoder: NewDecoder) -> None:
    """silu of what is huge is itself or nothing; its exponential is beyond what a float32 has."""
    config = replace(LLAMA, num_layers=1, sliding_windows=(None,))
    weights = loud_weights(config)
    (layer,) = weights.layers
    gate, up = layer.gate_up.chunk(2)
    weights = replace(weights, layers=[replace(layer, gate_up=torch.cat((gate * 2.0**48, up)))])
    exact = Decoder(config, in_float32(weights))
    ours, torchs = new_decoder(config, weights), Decoder(config, weights)
    logits = []
    for decoder in (exact, ours, torchs):
        (sequence,) = random_sequences([5], 16, config.vocab_size)
        slab = slab_of(config, [sequence], 16, decoder.dtype)
        run_step(decoder, slab, [(sequence, 5)], 16)
        logits.append(decoder.forward(make_batch([(sequence, 1)], 16), slab))
    assert_as_close(*logits)


def test_neither_threads_nor_neighbours_change_a_bit(new_decoder: NewDecoder) -> None:
    lengths = [3, 30, 1, 17, 100, 64, 15, 16, 9]
    decoder = new_decoder(SMALL, loud_weights(SMALL))
    sequences = random_sequences(lengths, 4, SMALL.vocab_size)
    slab = slab_of(SMALL, sequences, 4)
    for sequence, length in zip(sequences, lengths, strict=True):
        run_step(decoder, slab, [(sequence, length)], 4)
    before = slab.values.clone()
    together = decoder.forward(make_batch([(each, 1) for each in sequences], 4), slab)
    cache = slab.values.clone()
    for threads in (2, 3, 1, 5):
        torch.set_num_threads(threads)
        slab.values.copy_(before)
        again = decoder.forward(make_batch([(each, 1) for each in sequences], 4), slab)
        assert torch.equal(again, together)
        assert torch.equal(slab.values.view(torch.int16), cache.view(torch.int16))
    for row, each in enumerate(sequences):
        alone = decoder.forward(make_batch([(each, 1)], 4), slab)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("format", ["bfloat16", "int8"])
def test_the_tokens_of_a_draft_change_no_bit(
    format: str, quantization: Quantization | None, new_decoder: NewDecoder
) -> None:
    """Computed in one step, beside others, in blocks that are used again, by any threads."""
    decoder = new_decoder(SMALL, loud_weights(SMALL), quantization=quantization)
    assert isinstance(decoder, CpuDecoder)
    lengths, counts = [30, 3, 17, 9], [1, 1, 7, 4]
    sequences = random_sequences([n + 8 for n in lengths], 4, SMALL.vocab_size)
    num_blocks = sum(len(sequence.block_ids) for sequence in sequences)
    heads = (SMALL.num_layers, SMALL.num_kv_heads, 4, SMALL.head_dim)
    slab = new_pages(FORMATS[format], num_blocks, *heads, CPU)
    for sequence, length in zip(sequences, lengths, strict=True):
        run_step(decoder, slab, [(sequence, length)], 4)
    work = [*zip(sequences, counts, strict=True)]
    batch, expected = make_batch(work, 4, every_row=True), []
    for sequence, count in work:
        for _ in range(count):
            expected.append(decoder.forward(make_batch([(sequence, 1)], 4), slab)[0])
            sequence.num_computed += 1
    cache = slab.values.clone()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(decoder.forward(batch, slab), torch.stack(expected))
        assert torch.equal(slab.values.view(torch.uint8), cache.view(torch.uint8))
    if quantization is None:  # narrow weights round otherwise in a step with a prompt
        (prompt,) = random_sequences([40], 4, SMALL.vocab_size)
        prompt.block_ids = [*range(num_blocks, num_blocks + 10)]
        larger = new_pages(FORMATS[format], num_blocks + 10, *heads, CPU)
        larger.blocks[:num_blocks] = slab.blocks
        for sequence, count in work:
            sequence.num_computed -= count
        beside = make_batch([*work, (prompt, 40)], 4, every_row=True)
        rows = torch.tensor([*range(len(expected)), len(expected) + 39])
        logits = decoder.forward(replace(beside, logits_rows=rows), larger)
        assert torch.equal(logits[:-1], torch.stack(expected))


def test_threads_meet_in_every_step(new_decoder: NewDecoder) -> None:
    """Many short steps of changing numbers of threads, more of them than processors."""
    decoder = new_decoder(LLAMA)
    (sequence,) = random_sequences([5], 16, LLAMA.vocab_size)
    slab = slab_of(LLAMA, [sequence], 16)
    run_step(decoder, slab, [(sequence, 5)], 16)
    batch = make_batch([(sequence, 1)], 16)
    expected = decoder.forward(batch, slab)
    for step in range(400):
        torch.set_num_threads(1 + step % 4)
        assert torch.equal(decoder.forward(batch, slab), expected)


def test_many_decodes_have_the_logits_of_few(new_decoder: NewDecoder) -> None:
    """To the bit, though their products are computed in another way."""
    decoder = new_decoder(LLAMA, loud_weights(LLAMA))
    sequences = random_sequences([4] * (MOST_ROWS + 1), 16, LLAMA.vocab_size)
    slab = slab_of(LLAMA, sequences, 16)
    for sequence in sequences:
        run_step(decoder, slab, [(sequence, 4)], 16)
    decodes = [(sequence, 1) for sequence in sequences]
    many = decoder.forward(make_batch(decodes, 16), slab)
    assert torch.equal(many[1:], decoder.forward(make_batch(decodes[1:], 16), slab))


def test_a_token_that_does_not_exist_is_an_error(new_decoder: NewDecoder) -> None:
    decoder = new_decoder(LLAMA)
    sequence = Tokens([LLAMA.vocab_size], [0])
    batch = make_batch([(sequence, 1)], 16)
    with pytest.raises(IndexError, match="not between 0 and 60"):
        decoder.forward(batch, new_slab(LLAMA, 1, 16, torch.bfloat16))


@pytest.mark.parametrize(
    ("config", "dtype", "reason"),
    [
        (LLAMA, torch.float32, "the model computes in float32"),
        (replace(LLAMA, head_dim=24), torch.bfloat16, "the head size 24 is not a multiple of 16"),
        (
            replace(LLAMA, hidden_size=54),
            torch.bfloat16,
            "a 4-bit weight has rows whose length is no multiple of 8",
        ),
    ],
)
def test_what_it_does_not_compute_is_torchs_and_says_so(
    config: ModelConfig, dtype: torch.dtype, reason: str, new_decoder: NewDecoder
) -> None:
    quantization: Quantization | None = "int4" if "4-bit" in reason else None
    weights = random_weights(config, dtype, CPU, seed=2)
    decoder = build_decoder(config, weights, quantization=quantization)
    assert not isinstance(decoder, CpuDecoder)
    assert decoder.step_sentence == f"torch, because {reason}"
    sequence = Tokens([1], [0])
    slab = new_slab(config, 1, 16, dtype)
    assert decoder.forward(make_batch([(sequence, 1)], 16), slab).isfinite().all()


def test_the_step_for_avx2_has_no_instructions_of_avx512() -> None:
    """None of their registers either: vectors of 512 bits, masks, and the upper 16 vectors."""
    command = ["objdump", "--disassemble", loaded(AVX2_STEP)._name]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "%ymm15" in code
    assert not re.search(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b", code)
