"""What a head proposes in an engine is what it says of the whole sequence, computed at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import load_file

from disagg.blocks import hash_blocks
from disagg.config import SpeculativeConfig
from disagg.engine.device.build import build_engine
from disagg.engine.device.check import check_engine
from disagg.engine.device.head_drafts import HeadDrafts
from disagg.engine.sched.sequence import Sequence
from disagg.models.decoder import load_model
from disagg.models.description import describe_model
from disagg.models.draft_layers import eagle3_head, mtp_layer
from disagg.models.heads import HeadDecoder
from tests.engine.device.tiny_engine import CONFIG, run, sequence
from tests.models.checkpoints import write_checkpoint
from tests.models.heads import add_mtp_layer, write_eagle3
from tests.models.paging import Tokens, make_batch, new_slab
from tests.tiny_model import write_tiny_tokenizer

ALLOWED = [64, 66, 68]  # all that is said, so that many drafts are right
Expect = Callable[[list[int], int, int], list[int]]


def expecting(model: Path, head: Path | None) -> Expect:
    """Gives the draft of a head that sees a sequence from the token after position `base` on."""
    described = describe_model(model)
    whole = load_model(described, torch.float32, torch.device("cpu"))
    drafts = mtp_layer(described) if head is None else eagle3_head(head, described)
    of_head = HeadDecoder(whole, drafts)
    kept = of_head.keep_states(whole, 128)

    def expect(tokens: list[int], base: int, num: int) -> list[int]:
        blocks = [*range(32)]
        batch = make_batch([(Tokens(tokens[:-1], blocks), len(tokens) - 1)], 4)
        whole.forward(batch, new_slab(whole.config, 32, 4, torch.float32))
        given, slab = (
            kept.by_slot[base : len(tokens) - 1],
            new_slab(drafts.config, 32, 4, torch.float32),
        )
        known, found = Tokens(tokens[base + 1 :], blocks), list[int]()
        size = len(known.ids)
        for _ in range(num):
            of_head.given = given
            logits = of_head.forward(make_batch([(known, size)], 4), slab)
            known.num_computed, size = len(known.ids), 1
            found.append(ALLOWED[int(logits[-1, ALLOWED].argmax())])
            known.ids.append(found[-1])
            assert of_head.made is not None
            given = of_head.made[-1:]
        return found

    return expect


@pytest.mark.usefixtures("no_room_to_grow")
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_drafts(method: str, directory: Path, tmp_path: Path) -> None:
    """Also of prompts in chunks, behind cached prefixes, and after preemptions."""
    model, head = directory, None
    if method == "eagle3":
        head = write_eagle3(tmp_path / "head", directory, num_draft_tokens=130)
        asked = SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=3)
    else:
        write_checkpoint(tmp_path, "deepseek-v3", vocab_size=260)
        write_tiny_tokenizer(tmp_path)
        model, asked = add_mtp_layer(tmp_path), SpeculativeConfig(method="mtp")
    config = replace(CONFIG, num_gpu_blocks_override=16, max_model_len=64, speculative_config=asked)
    engine = build_engine(config, describe_model(model))[0]
    proposer = engine.scheduler.drafting.proposer
    assert isinstance(proposer, HeadDrafts)
    expect, propose, bases = expecting(model, head), proposer.propose, list[int]()

    def checked(limits: dict[Sequence, int]) -> list[tuple[Sequence, tuple[int, ...]]]:
        made = [*propose(limits)]
        for each, draft in made:
            base = each.num_cached_tokens
            assert [*draft] == expect(each.tokens, base, len(draft))
            bases.append(base)
        return made

    proposer.propose = checked  # type: ignore[method-assign, assignment]
    prefix = tuple(range(40, 61))
    for some in ((0,), range(1, 5)):
        made = [
            sequence(
                None,
                (*prefix, i, 7 * i),
                max_tokens=12,
                temperature=0.0,
                allowed_token_ids=tuple(ALLOWED),
            )
            for i in some
        ]
        for each in made:
            each.block_hashes = hash_blocks(each.hash_root, each.tokens, 4)
        run(engine, *made)
    assert {0, 20} == set(bases) and len(bases) > 20
    assert engine.scheduler.num_preempted > 0
    assert 0 < engine.scheduler.num_accepted < engine.scheduler.num_drafted


def test_a_head_is_counted_before_it_is_loaded(directory: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, directory)
    asked = SpeculativeConfig(method="eagle3", model=str(head))
    model = describe_model(directory)
    alone = check_engine(CONFIG, model)
    both = check_engine(replace(CONFIG, speculative_config=asked), model)
    assert alone is not None and both is not None
    assert both.drafts_nbytes == sum(
        each.nbytes for each in load_file(head / "model.safetensors").values()
    )
    kv_nbytes, states_nbytes = 4 * 2 * 3 * 8 * 4, 4 * 128 * 4  # of 4 tokens in float32
    assert both.block_nbytes == alone.block_nbytes + kv_nbytes + states_nbytes
