"""Whatever is proposed, an answer is the one without drafts: to the token, for each seed.

Tokens are drawn with noise that depends on seed and position only. So the law of answers with
drafts is that without, also where a draft depends on the same noise, if for each seed and every
draft the answer is the same. Over a tiny vocabulary that is enumerated here.
"""

from __future__ import annotations

import random
import time
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from disagg.config import SpeculativeConfig
from disagg.engine.device.build import build_engine
from disagg.engine.device.check import check_engine
from disagg.engine.device.draft_model import DraftModel
from disagg.engine.device.medusa_drafts import MedusaDrafts
from disagg.engine.engine import Engine
from disagg.engine.sched import drafting
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Sampled, SequencesFailed, StepPlan
from disagg.errors import StartupError
from disagg.messages import Grammar
from disagg.models.adapter import find_adapter
from disagg.models.description import describe_model
from disagg.time_model import StepTimeFit
from tests.engine.device.tiny_engine import CONFIG, EOS_ID, answer, run, sequence
from tests.grids import some
from tests.models.checkpoints import write_checkpoint
from tests.models.heads import add_mtp_layer, write_eagle3, write_medusa
from tests.tiny_model import write_tiny_adapters, write_tiny_model, write_tiny_tokenizer

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=1)
FIRST_LAYER = SpeculativeConfig(method="early_exit", exit_layer=1, num_speculative_tokens=3)
SHORT_OF_BLOCKS = replace(CONFIG, num_gpu_blocks_override=24, max_model_len=88)
TOKENS = (64, 65, 66)  # all that the model may say: a, b, c
WORDS = Grammar("regex", "[abc]{2,5}c")
RECORD = Grammar(
    "regex",
    r'\{"customer_name": "(Ada Lovelace|Alan Turing)", "is_subscribed": (true|false), "tags":'
    r' \[("red"|"green")(, ("red"|"green")){0,2}\]\}',
)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.4},
    "top-k": {"temperature": 1.4, "top_k": 2},
    "top-p": {"temperature": 2.8, "top_p": 0.9},
    "min-p": {"temperature": 2.8, "min_p": 0.1},
    "bias": {"temperature": 1.4, "logit_bias": ((65, 1.0),)},
    "bad words": {"bad_words_token_ids": ((64, 65), (66, 66), (65, 64, 66))},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "at least": {"temperature": 1.4, "stop_token_ids": (65,), "min_tokens": 2},
    "log-probabilities": {"temperature": 1.4, "logprobs": 2},
    "grammar": {"temperature": 1.4, "grammar": WORDS},
}


def draft_of(model: str) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=model, num_speculative_tokens=3)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return build_engine(replace(CONFIG, max_num_batched_tokens=64), describe_model(directory))[0]


def said(engine: Engine, sequences: list[Sequence]) -> list[tuple[list[int], Any, list[float]]]:
    """Of each: its answer, how it ended, and the answer's log-probabilities."""
    logprobs: dict[Sequence, list[float]] = {each: [] for each in sequences}
    ends = dict[Sequence, Any]()
    for each in sequences:
        engine.submit(each)
    while engine.has_work:
        for event in engine.step():
            logprobs[event.sequence] += [each.logprob for each in event.logprobs or ()]
            ends[event.sequence] = event.finish_reason or event.error
    return [(answer(each), ends[each], logprobs[each]) for each in sequences]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_draft(name: str, engine: Engine) -> None:
    asked = {"max_tokens": 6, **SAMPLINGS[name]}
    grammar = asked.pop("grammar", None)
    if grammar is None:
        asked["allowed_token_ids"] = TOKENS
    before = engine.scheduler.num_drafted, engine.scheduler.num_accepted
    told = set()
    for seed in range(3):
        drafts = [(), *product((*TOKENS, EOS_ID), repeat=2)]
        made = [sequence(grammar, draft=draft, seed=seed, **asked) for draft in drafts]
        (expected, wanted_end, wanted), *drafted = said(engine, made)
        told.add(tuple(expected))
        for draft, (tokens, end, logprobs) in zip(drafts[1:], drafted, strict=True):
            assert (tokens, end) == (expected, wanted_end), draft
            # The sums of a step in float32 depend on its rows.
            assert logprobs == pytest.approx(wanted, abs=1e-4), draft
    num_drafted = engine.scheduler.num_drafted - before[0]
    num_accepted = engine.scheduler.num_accepted - before[1]
    if name == "penalties":
        assert not num_drafted
    else:
        assert num_drafted > num_accepted > 0
    assert len(told) > 1 or name == "greedy", "the noise matters"


@pytest.mark.parametrize("asked", some([{"temperature": 1.2}], [{"temperature": 0.0}]), ids=str)
def test_tokens_that_a_grammar_forces(
    asked: dict[str, Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are all accepted, so names and punctuation of JSON cost few steps; also ahead."""
    scheduler, found = engine.scheduler, []
    for max_forced, launcher in ((0, None), (15, None), (15, engine.runner)):
        monkeypatch.setattr(drafting, "MAX_FORCED", max_forced)
        monkeypatch.setattr(engine, "launcher", launcher)
        before = scheduler.num_drafted, scheduler.num_accepted
        made = [sequence(RECORD, prompt=(9, i), seed=i, **asked) for i in range(3)]
        made += [sequence(None, prompt=(8, i), seed=i, max_tokens=40, **asked) for i in range(3)]
        ends = run(engine, *made)
        found.append((ends, [answer(each) for each in made]))
        num_drafted = scheduler.num_drafted - before[0]
        assert scheduler.num_accepted - before[1] == num_drafted
        assert (num_drafted > 60) == (max_forced > 0)
    assert found[0] == found[1] == found[2]
    assert found[0][0][:3] == ["stop"] * 3


def draft_at(how: str, directory: Path, place: Path) -> str:
    """The path of a draft model that is as often right as `how` says."""
    if how == "same":
        return str(directory)
    other = write_tiny_model(place / "tiny", seed=11, inner=96)
    if how == "alike":
        weights = load_file(directory / "model.safetensors")
        rng = np.random.default_rng(1)
        for name, each in weights.items():
            weights[name] = each * rng.normal(1.0, 0.1, each.shape).astype(each.dtype)
        save_file(weights, other / "model.safetensors", {"format": "pt"})
    return str(other)


def mixed(num: int, seed: int) -> list[Sequence]:
    """Sequences with all kinds of sampling, of which many repeat their prompts."""
    rng, made = random.Random(seed), []
    for i in range(num):
        asked = {"max_tokens": rng.randint(1, 24), "seed": i, **[*SAMPLINGS.values()][i % 11]}
        grammar = asked.pop("grammar", None)
        prompt = tuple(rng.randrange(60, 80) for _ in range(rng.randint(2, 30)))
        made.append(sequence(grammar, prompt=(*prompt, i, *prompt), **asked))
    return made


def play(engine: Engine, todo: list[Sequence]) -> list[tuple[list[int], str | None]]:
    """The answers. New ones arrive while others run; each tenth is cancelled."""
    ends: dict[Sequence, str | None] = {}
    waiting, num_steps = todo[::-1], 0
    while waiting or engine.has_work:
        if waiting and num_steps % 2 == 0:
            engine.submit(waiting.pop())
        if num_steps % 10 == 9 and engine.scheduler.running:
            engine.abort(engine.scheduler.running[-1].request_id)
        for event in engine.step():
            if event.is_last:
                ends[event.sequence] = event.finish_reason or str(event.error)
        engine.check()
        num_steps += 1
    assert engine.pool.num_free == engine.pool.num_blocks
    return [(answer(each), ends.get(each)) for each in todo]


@pytest.mark.usefixtures("no_room_to_grow")
@pytest.mark.parametrize(
    ("how", "is_ahead"),
    some([("same", False), ("alike", True)], [("alike", False), ("unlike", False)]),
)
def test_a_draft_model(how: str, is_ahead: bool, directory: Path, tmp_path: Path) -> None:
    compare(draft_of(draft_at(how, directory, tmp_path)), directory, how, is_ahead)


def test_a_speculative_cascade_lets_all_stand_that_is_not_much_less_likely(
    directory: Path, tmp_path: Path
) -> None:
    """Here all that is allowed is: only what a grammar, bad words or an early end forbid falls."""
    drafts = replace(draft_of(draft_at("unlike", directory, tmp_path)), deferral=1 - 1e-9)
    engine = build_engine(replace(CONFIG, speculative_config=drafts), describe_model(directory))[0]
    asked = [
        sequence(None, (9, i), seed=i, max_tokens=25, allowed_token_ids=TOKENS) for i in range(3)
    ]
    assert run(engine, *asked) == ["length"] * 3
    assert engine.scheduler.num_accepted == engine.scheduler.num_drafted > 30
    plain = build_engine(CONFIG, describe_model(directory))[0]
    alone = [
        sequence(None, (9, i), seed=i, max_tokens=25, allowed_token_ids=TOKENS) for i in range(3)
    ]
    run(plain, *alone)
    assert [answer(each) for each in asked] != [answer(each) for each in alone]


@pytest.mark.usefixtures("no_room_to_grow")
def test_prompt_lookup(directory: Path) -> None:
    compare(NGRAM, directory, "alike")


@pytest.mark.usefixtures("no_room_to_grow")
@pytest.mark.parametrize("is_ahead", some([True], [False]))
def test_first_layers(is_ahead: bool, directory: Path) -> None:
    compare(FIRST_LAYER, directory, "alike", is_ahead)


@pytest.mark.usefixtures("no_room_to_grow")
@pytest.mark.parametrize("is_ahead", some([True], [False]))
def test_an_eagle3_head(is_ahead: bool, directory: Path, tmp_path: Path) -> None:
    compare(head_for(directory, tmp_path), directory, "alike", is_ahead)


@pytest.mark.usefixtures("no_room_to_grow")
def test_an_mtp_layer(tmp_path: Path) -> None:
    place = glm_with_mtp(tmp_path)
    compare(SpeculativeConfig(method="mtp", num_speculative_tokens=3), place, "alike")


@pytest.mark.usefixtures("no_room_to_grow")
@pytest.mark.parametrize("is_ahead", some([True], [False]))
def test_medusa_heads(is_ahead: bool, directory: Path, tmp_path: Path) -> None:
    compare(repeating_heads(directory, tmp_path), directory, "alike", is_ahead)


def repeating_heads(model: Path, place: Path) -> SpeculativeConfig:
    """Of Medusa heads that say again what the model has said last: answers often repeat a token."""
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    tensors = {f"lm_heads.{i}.weight": table for i in range(3)}
    for i, j in product(range(3), range(2)):
        tensors[f"blocks.{i}.layers.{j}.weight"] = np.zeros((128, 128), np.float32)
    heads = write_medusa(place, model, tensors=tensors)
    return SpeculativeConfig(method="medusa", model=str(heads))


def head_for(model: Path, place: Path) -> SpeculativeConfig:
    """Of a head that is right now and then: its logits are small, so the noise often decides."""
    small = np.random.default_rng(4).normal(0, 0.03, (130, 128)).astype(np.float32)
    head = write_eagle3(place, model, num_draft_tokens=130, tensors={"lm_head.weight": small})
    return SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=3)


def glm_with_mtp(place: Path) -> Path:
    write_checkpoint(
        place, "glm4-moe", vocab_size=260, max_position_embeddings=512, eos_token_id=EOS_ID
    )
    write_tiny_tokenizer(place)
    return add_mtp_layer(place)


@cache
def played_without_drafts(directory: Path) -> list[tuple[list[int], str | None]]:
    return play(build_engine(SHORT_OF_BLOCKS, describe_model(directory))[0], mixed(33, 1))


def compare(asked: SpeculativeConfig, directory: Path, how: str, is_ahead: bool = False) -> None:
    """The answers of an engine with drafts and of one without, both short of blocks."""
    config = replace(SHORT_OF_BLOCKS, speculative_config=asked)
    drafting = build_engine(config, describe_model(directory))[0]
    if is_ahead:  # each sequence takes part in every other step, however many have drafts
        drafting.launcher = drafting.runner  # type: ignore[assignment]
        drafting.scheduler.most_drafts_ahead = 1.0
    expected = played_without_drafts(directory)
    found = play(drafting, mixed(33, 1))
    # Who is cancelled, and when, depends on the steps.
    for (tokens, end), (wanted, wanted_end) in zip(found, expected, strict=True):
        if end and wanted_end:
            assert (tokens, end) == (wanted, wanted_end)
        else:
            num_both = min(len(tokens), len(wanted))
            assert tokens[:num_both] == wanted[:num_both]
    scheduler = drafting.scheduler
    assert scheduler.num_preempted > 0
    assert scheduler.num_drafted > 20
    share = scheduler.num_accepted / scheduler.num_drafted
    assert share == 1.0 if how == "same" else 0.0 < share < 1.0


@pytest.mark.parametrize("method", some(["draft_model", "medusa"], ["early_exit", "eagle3"]))
def test_drafts_beside_adapters(method: str, tmp_path: Path) -> None:
    """What drafts has no adapters; each answer is that of a merged model."""
    place = write_tiny_adapters(tmp_path, ("red", "green"))
    model = describe_model(place / "tiny")
    drafts = {
        "draft_model": draft_of(str(place / "tiny")),
        "early_exit": FIRST_LAYER,
        "eagle3": head_for(place / "tiny", tmp_path / "head"),
        "medusa": repeating_heads(place / "tiny", tmp_path / "heads"),
    }[method]
    config = replace(CONFIG, enable_lora=True, max_loras=2, speculative_config=drafts)
    engine = build_engine(config, model)[0]
    prompts = [(i % 250, 3 * i % 241, i % 7) for i in range(12)]
    made = []
    for i, prompt in enumerate(prompts):
        one = sequence(None, prompt, temperature=0.7, seed=i, max_tokens=20)
        if name := ("", "red", "green")[i % 3]:
            one.adapter = find_adapter(name, str(place / name), "m", model, 16)
        while not engine.is_ready(one):
            time.sleep(0.01)  # a thread reads the adapter
        made.append(one)
    ends = run(engine, *made)
    for i, merged in enumerate(("tiny", "merged-red", "merged-green")):
        plain = build_engine(CONFIG, describe_model(place / merged))[0]
        alone = [
            sequence(None, prompts[j], temperature=0.7, seed=j, max_tokens=20)
            for j in range(i, 12, 3)
        ]
        assert run(plain, *alone) == ends[i::3]
        assert [answer(each) for each in alone] == [answer(each) for each in made[i::3]]
    scheduler = engine.scheduler
    assert scheduler.num_drafted > scheduler.num_accepted > 0


@pytest.mark.parametrize(("method", "num_looks"), [("draft_model", 7), ("medusa", 1)])
def test_what_drafts_cost_is_what_they_took(
    method: str, num_looks: int, directory: Path, tmp_path: Path
) -> None:
    """Each look at the clock takes a millisecond. A draft of three tokens takes so many looks, of
    which each step of a draft model sees one."""
    heads = method == "medusa"
    drafts = repeating_heads(directory, tmp_path) if heads else draft_of(str(directory))
    drafts = replace(drafts, num_speculative_tokens=3)
    engine = build_engine(replace(CONFIG, speculative_config=drafts), describe_model(directory))[0]
    proposer = engine.scheduler.drafting.proposer
    assert isinstance(proposer, DraftModel | MedusaDrafts)
    proposer._times = StepTimeFit()  # without what another clock has measured at the start
    proposer._timer = partial(next, count(0.0, 0.001))
    run(engine, sequence(None, (5, 6, 7), max_tokens=480))
    costs_s = [proposer.token_s(1, place) for place in range(3)]
    assert sum(costs_s) == pytest.approx(0.001 * num_looks, rel=0.02)
    assert costs_s[1] == costs_s[2] < 0.0011, "what is done once is a part of the first"


def test_a_model_that_fails_drafts_no_more(directory: Path) -> None:
    """Its host code fails for one sequence, which goes on without drafts as the others with."""
    config = replace(CONFIG, speculative_config=draft_of(str(directory)))
    engine = build_engine(config, describe_model(directory))[0]
    proposer = engine.scheduler.drafting.proposer
    assert isinstance(proposer, DraftModel)
    launched = proposer._runner.run

    def fails(plan: StepPlan) -> list[Sampled]:
        broken = [each for each in plan.sequences if each.sampling.seed == 666]
        if broken:
            raise SequencesFailed({each: IndexError("planted") for each in broken})
        return launched(plan)

    proposer._runner.run = fails  # type: ignore[method-assign]
    made = [sequence(None, (5, i), max_tokens=20, seed=seed) for i, seed in enumerate((666, 3))]
    assert run(engine, *made) == ["length", "length"]
    assert engine.scheduler.num_accepted > 10


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tensor_parallel_size": 2}, "runs on one device"),
        ({"speculative_config": draft_of("demo-small")}, "their tokenizers differ"),
        ({"speculative_config": draft_of("nowhere")}, "no model directory 'nowhere'"),
    ],
)
def test_what_cannot_draft_is_refused_before_weights_load(
    config: dict[str, Any], reason: str, directory: Path
) -> None:
    asked = {"speculative_config": draft_of(str(directory)), **config}
    with pytest.raises(StartupError, match=reason):
        check_engine(replace(CONFIG, **asked), describe_model(directory))
