"""The ranks of a worker together compute what transformers does, each from its part of the file.

Ranks are threads here, with a slab each. Two talk by gloo, as processes do, and so do four of the
first model; others of four, by memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.errors import StartupError
from disagg.models.communicator import Communicator
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import ModelDescription, describe_model
from disagg.models.model_config import ModelConfig
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.parts import all_parts
from disagg.models.share import Share, check_ranks
from tests.grids import some
from tests.models.checkpoints import DIVISIBLE, Checkpoint, write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.paging import Tokens, make_batch, new_slab
from tests.models.quantized_files import GPT_OSS, write_quantized
from tests.models.rank_threads import on_ranks

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_TOKENS = 30  # of the prompt, of which the last ones decode


def eight_heads(variant: str) -> dict[str, Any]:
    """Of which 4 ranks have two each, and KV heads for two ranks, or for all."""
    if variant.startswith(("deepseek", "glm4", "glm-moe-dsa", "olmoe")):
        return {"num_attention_heads": 8, "num_key_value_heads": 8}
    heads: dict[str, Any] = {"num_attention_heads": 8, "head_dim": 16}
    if "longrope" in variant:  # it has a factor for each frequency of a head; ranks change none
        heads["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
        heads["num_key_value_heads"] = 4
    return {**heads, "num_key_value_heads": 8} if "no-groups" in variant else heads


@dataclass
class Computed:
    """What a decoder makes of a prompt in two chunks, two forced tokens, and what it then chooses.

    logits: of each step.
    """

    tokens: Tokens
    logits: list[Tensor] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)


def compute(decoder: Decoder, ids: list[int], agree: Callable[[Tensor], Tensor]) -> Computed:
    slab = new_slab(decoder.config, 16, BLOCK_SIZE, torch.float32, fill=math.nan)
    own = Computed(Tokens(list(ids), list(reversed(range(16)))))
    for count in (17, 11, 1, 1, 1, 1, 1):
        if own.tokens.num_computed == len(own.tokens.ids):
            token = agree(own.logits[-1][0].argmax().reshape(1))
            own.tokens.ids.append(int(token))
            own.chosen.append(int(token))
        batch = make_batch([(own.tokens, count)], BLOCK_SIZE)
        own.logits.append(decoder.forward(batch, slab))
        own.tokens.num_computed += count
    return own


def compare(
    model: ModelDescription,
    checkpoint: Checkpoint,
    num_ranks: int,
    place: Path | None,
    *,
    has_whole_experts: bool = False,
) -> None:
    ids = torch.randint(0, 97, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()

    def rank(communicator: Communicator) -> Computed:
        decoder = load_model(model, torch.float32, CPU, communicator=communicator)
        return compute(decoder, ids, communicator.broadcast_)

    first, *others = on_ranks(num_ranks, rank, place, has_whole_experts=has_whole_experts)
    wanted = checkpoint.logits(first.tokens.ids)
    assert first.chosen == wanted[NUM_TOKENS - 1 : NUM_TOKENS + 2].argmax(1).tolist()
    ends = (17, 28, 29, 30, 31, 32, 33)
    for logits, end in zip(first.logits, ends, strict=True):
        torch.testing.assert_close(logits[0], wanted[end - 1], atol=1e-4, rtol=0)
    vocabulary = [Share(each, num_ranks).of(97) for each in range(num_ranks)]
    for other, (begin, end) in zip(others, vocabulary[1:], strict=True):
        assert other.chosen == first.chosen
        torch.testing.assert_close(other.logits[0], first.logits[0][:, begin:end])


OF_FAMILIES = {
    family: name for name, (family, _) in reversed(DIVISIBLE.items())
}  # the first of each


# What ranks divide otherwise than the first variant of their family: biases, tables, experts.
ON_TWO = [
    "llama-tied-biased-llama3",
    "qwen2-moe-dense-between",
    "qwen3-moe-dense-first",
    "deepseek-v2-groups",
    "deepseek-v3-halves",
    "glm4-moe-odd",
    "gemma-untied-biased",
]


@pytest.mark.parametrize(
    ("variant", "num_ranks"),
    some(
        [*((name, 4) for name in OF_FAMILIES.values()), *((name, 2) for name in ON_TWO)],
        product(DIVISIBLE, (2, 4)),
    ),
)
def test_ranks_compute_what_transformers_does(variant: str, num_ranks: int, tmp_path: Path) -> None:
    """Of each family one on more ranks than it has KV heads."""
    checkpoint = write_checkpoint(tmp_path / "model", variant, **eight_heads(variant))
    by_gloo = num_ranks == 2 or variant == "llama"
    place = tmp_path if by_gloo else None
    compare(describe_model(checkpoint.directory), checkpoint, num_ranks, place)


def test_mxfp4_experts_are_divided_by_whole_scales(tmp_path: Path) -> None:
    """As of gpt-oss, whose 90 groups neither 4 nor 8 divide."""
    checkpoint = write_quantized(tmp_path, "gpt-oss", "mxfp4", **GPT_OSS)
    model = describe_model(checkpoint.directory)
    experts = model.config.experts
    assert experts is not None
    assert [Share(rank, 2).of_experts(experts) for rank in range(2)] == [(0, 64), (64, 96)]
    compare(model, checkpoint, 2, tmp_path)
    nbytes = [weights_nbytes(model.config, DeviceFormat(4), Share(rank, 2)) for rank in range(2)]
    assert nbytes[1] < nbytes[0] < weights_nbytes(model.config, DeviceFormat(4))
    with pytest.raises(StartupError, match=r"has 3 x 32 values .* too few for 4 ranks"):
        check_ranks(model.config, 4)


@pytest.mark.parametrize("variant", ["llama", "qwen2-moe"])
def test_ranks_read_their_part_of_a_gguf_file(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", variant, **eight_heads(variant))
    model = describe_model(write_gguf(tmp_path / "model.gguf", checkpoint.model))
    compare(model, checkpoint, 4, None)


@pytest.mark.parametrize("variant", DIVISIBLE)
def test_ranks_read_all_of_a_checkpoint_and_no_divided_tensor_twice(
    variant: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, variant, **eight_heads(variant))
    model = describe_model(tmp_path)
    read: dict[str, int] = {}
    for rank in range(2):
        for part in all_parts(model.config, Share(rank, 2)):
            if part.box:
                nbytes = math.prod(end - first for first, end in part.box)
                read[part.name] = read.get(part.name, 0) + nbytes
    whole = {name: stored.num_values for name, stored in model.tensors.items()}
    assert read == {name: whole[name] for name in read}
    assert len(read) > 0.5 * len(whole)
    own = [weights_nbytes(model.config, DeviceFormat(4), Share(rank, 2)) for rank in range(2)]
    index = [part for part in all_parts(model.config) if ".indexer." in part.name]  # all have it
    everywhere = 4 * sum(math.prod(part.shape) for part in index)
    total = weights_nbytes(model.config, DeviceFormat(4))
    assert max(own) - everywhere < 0.55 * (total - everywhere)


@pytest.mark.parametrize(
    ("num_ranks", "changes", "words"),
    [
        (
            4,
            {},
            r"size = 4 does not divide this model: 6 \(heads\) / 4 = 1\.5\. Possible .*: 1, 2\.",
        ),
        (3, {}, "neither do 3 ranks divide 2 KV heads evenly, nor is their number"),
        (2, {"intermediate_size": 81}, r"81 \(intermediate_size\) / 2 = 40\.5"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_arithmetic(
    num_ranks: int, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config: ModelConfig = describe_model(
        write_checkpoint(tmp_path, "llama", **changes).directory
    ).config
    with pytest.raises(StartupError, match=words):
        check_ranks(config, num_ranks)


def test_the_first_rank_waits_for_the_others_when_no_logits_are_wanted(tmp_path: Path) -> None:
    """A chunk of a prompt: its blocks may be read by another worker as soon as the step ends."""
    order: list[str] = []

    def chunk(communicator: Communicator) -> Tensor:
        if not communicator.share.is_first:
            time.sleep(0.1)
            order.append("computed")
        joined = communicator.gather(torch.zeros(0, 5), [5, 6])
        if communicator.share.is_first:
            order.append("ended")
        return joined

    first, other = on_ranks(2, chunk, tmp_path)
    assert order == ["computed", "ended"]
    assert first.shape == (0, 11) and other.shape == (0, 5)
