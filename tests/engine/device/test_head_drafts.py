"""What a head proposes in an engine is what it says of the whole sequence, computed at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import load_file

from disagg.blocks import hash_blocks
from disagg.config import SpeculativeConfig
from disagg.engine.device.build import build_engine
from disagg.engine.device.check import check_engine
from disagg.engine.device.head_drafts import HeadDrafts
from disagg.engine.device.runner import ModelRunner
from disagg.engine.sched import trials
from disagg.engine.sched.sequence import Sequence
from disagg.models.decoder import load_model
from disagg.models.description import describe_model
from disagg.models.draft_layers import eagle3_head, mtp_layer
from disagg.models.heads import HeadDecoder
from disagg.time_model import StepTimeModel
from tests.engine.device.tiny_engine import CONFIG, answer, run, sequence
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


def checking(proposer: Any, expect: Expect, base_of: Callable[[Sequence], int]) -> list[int]:
    """Check all drafts of a proposer, which sees a sequence from the token after a position on.

    Returns these positions, one for each draft.
    """
    propose, bases = proposer.propose, list[int]()

    def checked(limits: dict[Sequence, int]) -> list[tuple[Sequence, tuple[int, ...]]]:
        made = [*propose(limits)]
        for each, draft in made:
            bases.append(base_of(each))
            assert [*draft] == expect(each.tokens, bases[-1], len(draft))
        return made

    proposer.propose = checked
    return bases


def asked_of(prompt: tuple[int, ...], output: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    allowed = tuple(ALLOWED)
    return sequence(None, prompt, output, temperature=0.0, allowed_token_ids=allowed, **sampling)


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
    bases = checking(proposer, expecting(model, head), lambda each: each.num_cached_tokens)
    prefix = tuple(range(40, 61))
    for some in ((0,), range(1, 5)):
        made = [asked_of((*prefix, i, 7 * i), max_tokens=12) for i in some]
        for each in made:
            each.block_hashes = hash_blocks(each.hash_root, each.tokens, 4)
        run(engine, *made)
    assert {0, 20} == set(bases) and len(bases) > 20
    assert engine.scheduler.num_preempted > 0
    assert 0 < engine.scheduler.num_accepted < engine.scheduler.num_drafted


def test_the_model_keeps_no_states_for_a_head_that_rests(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the head is tried again, it sees the sequence from there on."""
    monkeypatch.setattr(trials, "SHARE", 0.1)  # a trial in 50 steps
    head = write_eagle3(tmp_path, directory)
    asked = SpeculativeConfig(method="eagle3", model=str(head))
    engine = build_engine(replace(CONFIG, speculative_config=asked), describe_model(directory))[0]
    never_pays = StepTimeModel(per_step_s=0.0, per_sequence_s=1.0)
    engine.scheduler.step_budget.times = lambda: never_pays
    proposer, runner = engine.scheduler.drafting.proposer, engine.runner
    assert isinstance(runner, ModelRunner) and isinstance(proposer, HeadDrafts)
    begun, keeps = list[int](), list[bool]()
    bases = checking(proposer, expecting(directory, head), lambda each: ([0, *begun])[-1])
    one = asked_of((5, 6, 7), max_tokens=120)
    engine.submit(one)
    while engine.has_work:
        num_computed = one.num_computed
        engine.step()
        keeps.append(runner.decoder.kept is not None)
        if keeps[-2:] == [False, True]:
            begun.append(num_computed)
    assert bases == [0, begun[0]] and begun[0] > 32
    assert keeps.count(False) > 16


def test_a_head_sees_nothing_of_an_answer_from_before_its_move(
    directory: Path, tmp_path: Path
) -> None:
    head = write_eagle3(tmp_path, directory, num_draft_tokens=130)
    asked = SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=3)
    config, model = replace(CONFIG, speculative_config=asked), describe_model(directory)
    (old, old_kv), (new, new_kv) = (build_engine(config, model) for _ in range(2))
    whole = asked_of((5, 6, 7), max_tokens=22)
    run(old, whole)
    moved = asked_of((5, 6, 7), tuple(answer(whole)[:9]), max_tokens=22)
    held = asked_of(tuple(moved.tokens), max_tokens=2)
    held.hand_over = True
    old.submit(held)
    while not any(event.left for event in old.step()):
        pass
    moved.num_computed = len(moved.tokens) - 1
    moved.block_ids = new.reserve(len(held.block_ids)) or []
    for source, target in zip(held.block_ids, moved.block_ids, strict=True):
        new_kv.copy_blocks(target, old_kv, source, 1)
    runner = new.runner
    assert isinstance(runner, ModelRunner) and runner.decoder.kept is not None
    runner.decoder.kept.by_slot.normal_()  # states of others that had these slots
    bases = checking(new.scheduler.drafting.proposer, expecting(directory, head), lambda _: 11)
    new.join(moved)
    while new.has_work:
        new.step()
    assert answer(moved) == answer(whole) and len(bases) > 2


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
