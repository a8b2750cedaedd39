"""LoRA adapters compute what PEFT computes, in every family and way that a step can be divided."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.errors import ModelError
from disagg.models.adapter import describe_adapter, digest_of, slots_nbytes
from disagg.models.adapter_weights import AdapterTables, read_adapter
from disagg.models.communicator import Communicator
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import ModelDescription, describe_model
from disagg.models.share import WHOLE, Share
from tests.grids import some
from tests.models import test_ranks
from tests.models.adapters import ALL, targets_of, write_adapter
from tests.models.checkpoints import VARIANTS, WITHOUT_STATES, write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.paging import Tokens, make_batch, new_slab
from tests.models.quantized_files import write_quantized
from tests.models.rank_threads import on_ranks
from tests.models.roundings import all_experts, assert_as_far_as_roundings
from tests.models.test_ranks import eight_heads

BLOCK_SIZE = 4
CPU = torch.device("cpu")
NO_ADAPTER = -1
Q_A = torch.zeros(5, 48)
NUM_SLOTS, MAX_RANK = 3, 16


def enable(
    decoder: Decoder,
    model: ModelDescription,
    adapters: dict[int, Path],
    share: Share = WHOLE,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """Give a decoder adapters, by slot."""
    decoder.adapters = AdapterTables(model.config, share, NUM_SLOTS, MAX_RANK, dtype, CPU)
    for slot, directory in adapters.items():
        described = describe_adapter(directory, model)
        decoder.adapters.write(slot, read_adapter(described, model.config, dtype, share))
    return decoder


def step(
    decoder: Decoder, slab: object, work: list[tuple[Tokens, int]], slots: list[int]
) -> Tensor:
    batch = make_batch(work, BLOCK_SIZE)
    batch = replace(batch, adapters=torch.tensor(slots, dtype=torch.int32))
    logits = decoder.forward(batch, slab)  # type: ignore[arg-type]
    for row, (tokens, count) in zip(logits, work, strict=True):
        tokens.num_computed += count
        tokens.logits.append(row)
    return logits


def some_tokens(num: int, length: int) -> list[Tokens]:
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(num * -(-length // BLOCK_SIZE), generator=generator)
    blocks = order.view(num, -1).tolist()
    return [
        Tokens(torch.randint(0, 97, (length,), generator=generator).tolist(), own) for own in blocks
    ]


SUPPORTED = [name for name, (_, config) in WITHOUT_STATES.items() if "kv_lora_rank" not in config]
OF_FAMILIES = [name for name in test_ranks.OF_FAMILIES.values() if name in SUPPORTED]


@pytest.mark.parametrize("variant", some(OF_FAMILIES, SUPPORTED))
def test_float32_equals_peft(variant: str, tmp_path: Path) -> None:
    """Whole prompts, chunks and decoding, with two adapters and without one, in the same steps."""
    base = write_checkpoint(tmp_path / "base", variant)
    model, targets = describe_model(base.directory), targets_of(variant)
    one = write_adapter(tmp_path / "one", base, targets)
    other = write_adapter(tmp_path / "other", base, targets[1:], rank=16, seed=2, use_rslora=True)
    decoder = enable(
        load_model(model, torch.float32, CPU), model, {0: tmp_path / "one", 2: tmp_path / "other"}
    )
    slab = new_slab(model.config, 64, BLOCK_SIZE, torch.float32, fill=math.nan)
    whole, chunked, plain = some_tokens(3, 44)
    step(decoder, slab, [(whole, 40)], [0])
    step(decoder, slab, [(whole, 1), (chunked, 7), (plain, 30)], [0, 2, NO_ADAPTER])
    step(decoder, slab, [(whole, 1), (plain, 1), (chunked, 33)], [0, NO_ADAPTER, 2])
    step(decoder, slab, [(whole, 1), (plain, 1), (chunked, 1)], [0, NO_ADAPTER, 2])
    ends = (
        (whole, one, (40, 41, 42, 43)),
        (chunked, other, (7, 40, 41)),
        (plain, base, (30, 31, 32)),
    )
    for tokens, checkpoint, own in ends:
        wanted = checkpoint.logits(tokens.ids)
        for logits, end in zip(tokens.logits, own, strict=True):
            torch.testing.assert_close(logits, wanted[end - 1], atol=1e-4, rtol=0)
        if checkpoint is not base:  # otherwise the adapter would be too small to be noticed
            assert float((wanted - base.logits(tokens.ids)).abs().max()) > 0.01


@pytest.mark.parametrize("variant", ["llama", "qwen3", "phi3", "gemma2", "olmo2", "qwen3-moe"])
def test_ranks_equal_peft(variant: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", variant, **eight_heads(variant))
    model = describe_model(base.directory)
    adapted = write_adapter(tmp_path / "one", base, targets_of(variant))
    (ids,) = (tokens.ids for tokens in some_tokens(1, 24))
    wanted = adapted.logits(ids)

    def rank(communicator: Communicator) -> Tensor:
        decoder = load_model(model, torch.float32, CPU, communicator=communicator)
        enable(decoder, model, {1: tmp_path / "one"}, communicator.share)
        slab = new_slab(decoder.config, 16, BLOCK_SIZE, torch.float32, fill=math.nan)
        tokens = Tokens(ids, list(range(6)))
        return torch.cat([step(decoder, slab, [(tokens, count)], [1]) for count in (13, 10, 1)])

    first, *_ = on_ranks(4, rank, None)
    torch.testing.assert_close(first, wanted[[12, 22, 23]], atol=1e-4, rtol=0)


def test_a_rank_holds_only_its_part_of_an_adapter(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama", **eight_heads("llama"))
    model = describe_model(base.directory)
    write_adapter(tmp_path / "one", base, rank=16)
    described = describe_adapter(tmp_path / "one", model)

    def nbytes(share: Share) -> int:
        read = read_adapter(described, model.config, torch.float32, share)
        tables = AdapterTables(model.config, share, 1, 16, torch.float32, CPU)
        assert tables.nbytes == read.nbytes == slots_nbytes(model.config, share, 1, 16, 4)
        return read.nbytes

    whole = nbytes(WHOLE)
    assert whole == 4 * sum(tensor.num_values for tensor in described.tensors.values())
    # Of each pair of matrices one is divided.
    assert whole / 2 < nbytes(Share(0, 2)) < 0.8 * whole


@pytest.mark.parametrize(
    ("variant", "kind"), [("llama", "gguf"), ("phi3", "float rows"), ("mistral-sliding", "int8")]
)
def test_a_quantised_base_equals_peft(variant: str, kind: str, tmp_path: Path) -> None:
    """PEFT's model has the values for which the numbers of the checkpoint stand."""
    if kind == "gguf":
        base = write_checkpoint(tmp_path / "base", variant)
        model = describe_model(write_gguf(tmp_path / "model.gguf", base.model))
    else:
        base = write_quantized(tmp_path, variant, kind)
        model = describe_model(base.directory)
    adapted = write_adapter(tmp_path / "one", base, targets_of(variant))
    decoder = enable(load_model(model, torch.float32, CPU), model, {2: tmp_path / "one"})
    (tokens,) = some_tokens(1, 24)
    slab = new_slab(model.config, 16, BLOCK_SIZE, torch.float32, fill=math.nan)
    for count in (15, 8, 1):
        step(decoder, slab, [(tokens, count)], [2])
    wanted = adapted.logits(tokens.ids)[[14, 22, 23]]
    torch.testing.assert_close(torch.stack(tokens.logits), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", some(["llama", "gemma2", "qwen3-moe"], ["qwen3", "gpt-oss"]))
def test_bfloat16_is_as_far_from_exact_as_its_roundings(variant: str, tmp_path: Path) -> None:
    """PEFT's modules round too."""
    changes = all_experts(VARIANTS[variant][1])
    base = write_checkpoint(tmp_path / "base", variant, dtype=torch.bfloat16, **changes)
    model = describe_model(base.directory)
    adapted = write_adapter(tmp_path / "one", base, targets_of(variant))
    decoder = load_model(model, torch.bfloat16, CPU)
    enable(decoder, model, {0: tmp_path / "one"}, dtype=torch.bfloat16)
    slab = new_slab(model.config, 64, BLOCK_SIZE, torch.bfloat16)
    sequences = some_tokens(3, 48)
    for tokens in sequences:
        for count in [24] + [1] * 20:
            step(decoder, slab, [(tokens, count)], [0])
    assert_as_far_as_roundings(sequences, adapted, range(24, 45))


def _rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")


Q1 = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "DoRA also normalises the columns .* Merge it"),
        ({"bias": "all"}, "its biases were trained"),
        ({"modules_to_save": ["lm_head"]}, "whole matrices are replaced"),
        ({"alpha_pattern": {"q_proj": 3}}, "its alpha differs by module"),
        ({"init_lora_weights": "pissa"}, "belongs to changed weights .* pissa"),
        ({"peft_type": "IA3"}, "describes no LoRA adapter: its peft_type is 'IA3'"),
        ({"lora_alpha": "big"}, "lora_alpha is 'big', which is no number"),
        (lambda it: it.pop(f"{Q1}.lora_B.weight"), r"lacks tensors: model.layers.1.self_attn.q"),
        (
            lambda it: [it.pop(f"{Q1}.lora_{side}.weight") for side in "AB"],
            r"lacks tensors of modules that its adapter_config.json names: .*layers.1.*q_proj",
        ),
        (
            lambda it: it.update({f"{Q1}.lora_A.weight": torch.zeros(5, 49)}),
            r"an adapter of another model .*q_proj has A \[5, 49\] and B .* not \[r, 48\]",
        ),
        (
            lambda it: it.update({"base_model.model.model.embed_tokens.lora_A.weight": Q_A}),
            "changes what cannot be adapted .*embed_tokens.* Supported are down_proj, gate_proj",
        ),
        (
            lambda it: it.update(
                {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": Q_A}
            ),
            "layers.7.mlp.up_proj.* of its 3 layers; is it an adapter of this model",
        ),
        (lambda it: it.update({f"{Q1}.lora_A.weight": Q_A.int()}), "must have floats, .* is I32"),
        (lambda it: it.clear(), "has no tensors of LoRA"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(change: Any, message: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    write_adapter(tmp_path / "one", base)
    if callable(change):
        _rewrite(tmp_path / "one", change)
    else:
        file = tmp_path / "one" / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        describe_adapter(tmp_path / "one", describe_model(base.directory))


def test_a_rank_above_the_limit_is_refused_and_so_are_latents(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    model = describe_model(base.directory)
    write_adapter(tmp_path / "one", base, rank=17)
    with pytest.raises(ModelError, match="has rank 17, but max_lora_rank is 16; set --max-lora"):
        describe_adapter(tmp_path / "one", model, max_rank=16)
    with pytest.raises(ModelError, match=r"is no LoRA adapter: it has no adapter_config.json"):
        describe_adapter(tmp_path / "base", model)
    latent = describe_model(write_checkpoint(tmp_path / "latent", "deepseek-v2").directory)
    with pytest.raises(ModelError, match=r"models with latent attention .* not supported"):
        describe_adapter(tmp_path / "one", latent)


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        write_adapter(tmp_path / name, base, seed=seed)
    one, same, other = (digest_of(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other


def test_a_slot_keeps_nothing_of_the_adapter_before(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    model = describe_model(base.directory)
    write_adapter(tmp_path / "large", base, ALL, rank=16)
    small = write_adapter(tmp_path / "small", base, ("k_proj", "down_proj"), rank=3, seed=2)
    decoder = enable(load_model(model, torch.float32, CPU), model, {0: tmp_path / "large"})
    assert decoder.adapters is not None
    described = describe_adapter(tmp_path / "small", model)
    decoder.adapters.write(0, read_adapter(described, model.config, torch.float32))
    (tokens,) = some_tokens(1, 20)
    slab = new_slab(model.config, 8, BLOCK_SIZE, torch.float32)
    logits = step(decoder, slab, [(tokens, 20)], [0])
    torch.testing.assert_close(logits[0], small.logits(tokens.ids)[-1], atol=1e-4, rtol=0)
