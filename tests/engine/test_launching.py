"""A model whose steps are launched before the last one is read gives the same tokens as in order.

`LateRunner` stands for a GPU: it computes when its results are waited for, when the engine has
planned the next step and blocks have changed hands. New blocks are NaN (`tests/poison.py`).
"""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Sequence as SequenceOf
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from disagg.config import EngineConfig
from disagg.engine.device.batching import StepInputs
from disagg.engine.device.build import build_engine
from disagg.engine.device.followers import Followers
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.prompt_scores import ScoredRows
from disagg.engine.device.runner import ModelRunner, _Begun
from disagg.engine.engine import Engine
from disagg.engine.sched.grammar import Grammars, GrammarState
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import DraftedSequence
from disagg.engine.sched.step import Choose, Results, Sampled, StepPlan
from disagg.messages import Grammar, Thinking, TokenLogprobs
from disagg.models.decoder import Decoder
from disagg.models.description import describe_model
from tests.generate_requests import new_sequence
from tests.grids import pairs, some

BLOCK_SIZE = 4


class LateRunner(ModelRunner):
    is_late = True  # False: it computes as soon as it is told
    num_followed = num_continued = num_chunks_followed = 0
    num_drafts_followed = num_chosen_later = 0

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        followers: Followers | None = None,
        max_model_len: int | None = None,
    ) -> None:
        grammars = cast(Grammars, "only its absence matters")
        super().__init__(decoder, kv_cache, grammars, 1, followers, max_model_len)
        self._late: dict[int, tuple[StepInputs, list[int]]] = {}

    def launch(self, plan: StepPlan) -> Choose:
        self.num_followed += plan.is_ahead
        self.num_continued += plan.continues
        self.num_chunks_followed += plan.is_ahead and plan.num_new_tokens > plan.num_decodes
        self.num_drafts_followed += plan.is_ahead and plan.num_ahead > 0
        self.num_chosen_later += plan.is_ahead and any(each.needs_host for each in plan.sequences)
        return super().launch(plan)

    def _compute(
        self,
        begun: _Begun,
        step: StepInputs,
        entered: list[int],
        scored: SequenceOf[ScoredRows] | None = None,
    ) -> None:
        if self.is_late and begun.is_launched:
            self._late[id(begun)] = step, entered
        else:
            super()._compute(begun, step, entered, scored)

    def _choose(self, begun: _Begun, num_unread: int) -> Results:
        if id(begun) not in self._late:
            return super()._choose(begun, num_unread)
        step, entered = self._late.pop(id(begun))
        begun.plan = replace(begun.plan, sequences=[*map(_as_now, begun.plan.sequences)])
        begun.rows = [*map(_as_now, begun.rows)]
        compute, choose = super()._compute, super()._choose

        def results() -> SequenceOf[Sampled]:
            compute(begun, step, entered)
            return choose(begun, num_unread)()

        return results


def _as_now(row: Any) -> Any:
    same = copy.copy(row)
    if isinstance(row, DraftedSequence):
        same.sequence = _as_now(row.sequence)
    else:
        same.tokens, same.block_ids = [*row.tokens], [*row.block_ids]
    return same


def build(directory: Path, num_blocks: int, max_num_seqs: int) -> Engine:
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=num_blocks,
    )
    engine, kv_cache = build_engine(config, describe_model(directory))
    assert engine.launcher is None, "a CPU computes in order"
    assert isinstance(engine.runner, ModelRunner)
    engine.runner = LateRunner(engine.runner.decoder, kv_cache)
    return engine


def sequences(
    seed: int, samplings: list[dict[str, object]], max_prompt: int = 14
) -> list[Sequence]:
    rng = random.Random(seed)
    made = []
    for number, sampling in enumerate(samplings):
        tokens = [rng.randrange(200) for _ in range(rng.randint(3, max_prompt))]
        usual: dict[str, Any] = {"request_id": f"{number}", "max_tokens": rng.randint(6, 20)}
        made.append(new_sequence(tokens, block_size=BLOCK_SIZE, **(usual | sampling)))
        if made[-1].sampling.grammar is not None:
            made[-1].grammar_state = cast(GrammarState, TwoOfThree())
    return made


class TwoOfThree:
    """A grammar that allows two thirds of all tokens; the tokens before say which."""

    num_mask_nbytes = 4 * 16

    def begin_at(self, num_tokens: int) -> None:
        pass

    def fill_mask(self, tokens: SequenceOf[int], address: int, draft: SequenceOf[int] = ()) -> bool:
        bits = sum(
            1 << i for i in range(8 * self.num_mask_nbytes) if (i + sum(tokens) + sum(draft)) % 3
        )
        ctypes.memmove(address, bits.to_bytes(self.num_mask_nbytes, "little"), self.num_mask_nbytes)
        return True

    def forced(self, tokens: SequenceOf[int]) -> list[int]:
        return []

    def num_allowed(self, tokens: SequenceOf[int], draft: SequenceOf[int]) -> int:
        return len(draft)


Said = list[tuple[int, TokenLogprobs | None]]


def play(engine: Engine, todo: list[Sequence]) -> dict[str, Said]:
    """One new request every third step, and one that is cancelled on the way."""
    outputs: dict[str, Said] = {}
    todo = todo[::-1]
    num_steps = 0
    while todo or engine.has_work:
        if todo and num_steps % 3 == 0:
            engine.submit(todo.pop())
        if num_steps == 10:
            engine.abort("1")
        for event in engine.step():
            logprobs = event.logprobs or (None,) * len(event.token_ids)
            said = zip(event.token_ids, logprobs, strict=True)
            outputs.setdefault(event.sequence.request_id, []).extend(said)
        engine.check()
        num_steps += 1
    assert engine.pool.num_free == engine.pool.num_blocks
    outputs.pop("1", None)  # how far it came depends on the order
    return outputs


def play_at_once(engine: Engine, todo: list[Sequence]) -> dict[str, list[Any]]:
    """The tokens of each request, and the error that ended it, if one did. All come at once."""
    outputs: dict[str, list[Any]] = {each.request_id: [] for each in todo}
    for each in todo:
        engine.submit(each)
    while engine.has_work:
        for event in engine.step():
            told = outputs[event.sequence.request_id]
            told.extend(event.token_ids)
            if event.error is not None:
                told.append(event.error)
        engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks
    return outputs


GREEDY: dict[str, object] = {"temperature": 0.0}
DRAWN: dict[str, object] = {"temperature": 1.3, "seed": 7, "min_p": 0.02}
GRAMMAR = Grammar("regex", "as `TwoOfThree` says")
# After each token some are banned, so nearly every token depends on the one before it.
BAD_PAIRS = tuple((first, second) for first in range(260) for second in range(first % 9, 260, 9))
THINKING = Thinking(starts=(), end=(7, 8), forced_end=(7, 8), is_open=True, budget=4)
MIXTURES: dict[str, list[dict[str, object]]] = {
    "greedy": [GREEDY] * 6,
    "drawn": [DRAWN] * 6,
    "both": [GREEDY, DRAWN, GREEDY, {**DRAWN, "seed": 8}, DRAWN, GREEDY],
    "everything": [
        GREEDY,
        {**DRAWN, "min_tokens": 5, "stop_token_ids": tuple(range(0, 260, 3))},
        {**DRAWN, "top_p": 0.8, "logprobs": 1},
        {**GREEDY, "repetition_penalty": 1.3},
        {**GREEDY, "logprobs": 2, "logprobs_until": 3},
        {**DRAWN, "presence_penalty": 0.5, "frequency_penalty": 0.2, "top_k": 40},
    ],
    "defaults of Llama-3": [{"temperature": 0.6, "top_p": 0.9, "seed": n} for n in range(6)],
    "defaults of Qwen2.5": [
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "seed": n}
        for n in range(6)
    ],
    "defaults of Qwen3": [
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "seed": n} for n in range(6)
    ],
    "some that need the host": [
        GREEDY,
        {**GREEDY, "grammar": GRAMMAR},
        {**GREEDY, "bad_words_token_ids": BAD_PAIRS},
        {**DRAWN, "grammar": GRAMMAR, "repetition_penalty": 1.2},
        {**DRAWN, "thinking": THINKING, "logprobs": 1},
        {**DRAWN, "bad_words_token_ids": BAD_PAIRS, "stop_token_ids": tuple(range(0, 260, 9))},
    ],
    "early ends": [{**GREEDY, "stop_token_ids": tuple(range(0, 260, 6))}] * 6,
}
HARDEST = ("everything", "some that need the host")


@cache
def said_in_order(
    directory: Path, mixture: str, seed: int, max_prompt: int = 14
) -> dict[str, Said]:
    """What an engine says that computes each step when the one before is read."""
    engine = build(directory, num_blocks=60, max_num_seqs=4)
    return play(engine, sequences(seed, MIXTURES[mixture], max_prompt))


@pytest.mark.parametrize(
    ("num_blocks", "is_late", "mixture"),  # short of blocks or not, and computed late or at once
    some(
        [
            *((16, True, mixture) for mixture in sorted(MIXTURES)),
            *((60, True, mixture) for mixture in (*HARDEST, "early ends")),
            *((60, False, mixture) for mixture in HARDEST),
        ],
        ((60, is_late, mixture) for is_late in (True, False) for mixture in MIXTURES),
    ),
)
def test_the_same_tokens_in_any_order(
    num_blocks: int, is_late: bool, mixture: str, directory: Path
) -> None:
    ahead = build(directory, num_blocks, max_num_seqs=4)
    assert isinstance(ahead.runner, LateRunner)
    ahead.launcher, ahead.runner.is_late = ahead.runner, is_late
    expected = said_in_order(directory, mixture, 3)
    found = play(ahead, sequences(3, MIXTURES[mixture]))
    assert tokens_of(found) == tokens_of(expected)
    for request_id, said in found.items():
        for (_, logprobs), (_, wanted) in zip(said, expected[request_id], strict=True):
            assert (logprobs is None) == (wanted is None)
            if logprobs is not None and wanted is not None:
                assert logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-5)
                assert [token for token, _ in logprobs.top] == [t for t, _ in wanted.top]
    assert ahead.runner.num_followed > ahead.runner.num_continued > 0


class Foresight(PromptLookup):
    """Proposes drafts that are right, or right up to their last token, at some places."""

    def __init__(self, outputs: dict[str, list[int]]) -> None:
        super().__init__(4, 2)
        self._outputs = outputs

    def draft(self, sequence: Sequence) -> tuple[int, ...]:
        num_output = sequence.num_output_tokens
        output = self._outputs.get(sequence.request_id, [])
        draft = output[num_output : min(num_output + 3, len(output) - 1)]
        if num_output % 3 == 1 and draft:
            draft[-1] = (draft[-1] + 1) % 200
        return tuple(draft) if num_output % 4 else ()


@cache
def twelve_in_order(directory: Path, seed: int) -> tuple[list[Any], dict[str, list[int]]]:
    """What twelve requests ask for, and what they get."""
    samplings = random.Random(seed).sample(MIXTURES["some that need the host"] * 2, 12)
    engine = build(directory, num_blocks=60, max_num_seqs=6)
    return samplings, tokens_of(play(engine, sequences(seed, samplings)))


@pytest.mark.usefixtures("no_room_to_grow")
@pytest.mark.parametrize(
    ("num_blocks", "most_drafts_ahead", "seed"), pairs([16, 60], [0.0, 1.0], range(3))
)
def test_drafts_beside_some_that_need_the_host(
    num_blocks: int, most_drafts_ahead: float, seed: int, directory: Path
) -> None:
    """Plain sequences, grammars, bad words, budgets and drafts in the same steps."""
    ahead = build(directory, num_blocks, max_num_seqs=6)
    assert isinstance(ahead.runner, LateRunner)
    ahead.launcher = runner = ahead.runner
    samplings, expected = twelve_in_order(directory, seed)
    scheduler = ahead.scheduler
    scheduler.drafting.proposer = Foresight(expected)
    scheduler.most_drafts_ahead = most_drafts_ahead
    assert tokens_of(play(ahead, sequences(seed, samplings))) == expected
    assert scheduler.num_drafted > scheduler.num_accepted > 0
    assert runner.num_followed > 0 and runner.num_chosen_later > 0
    assert (runner.num_drafts_followed > 0) == (most_drafts_ahead > 0)
    assert (scheduler.num_preempted > 0) == (num_blocks < 60)


def tokens_of(outputs: dict[str, Said]) -> dict[str, list[int]]:
    return {request_id: [token for token, _ in said] for request_id, said in outputs.items()}


@pytest.mark.parametrize("mixture", ["both", "everything"])
def test_chunks_of_prompts_are_launched_ahead(mixture: str, directory: Path) -> None:
    """Steps with some in the middle of a prompt, some at its end, and some that decode."""
    ahead = build(directory, 60, max_num_seqs=4)
    assert isinstance(ahead.runner, LateRunner)
    ahead.launcher = ahead.runner
    ahead.scheduler.step_budget.most = 9
    expected = tokens_of(said_in_order(directory, mixture, 4, max_prompt=40))
    found = tokens_of(play(ahead, sequences(4, MIXTURES[mixture], max_prompt=40)))
    assert found == expected
    assert ahead.runner.num_chunks_followed > 2


@pytest.mark.parametrize("mixture", [name for name in MIXTURES if name.startswith("defaults")])
def test_default_traffic_is_launched_ahead(mixture: str, directory: Path) -> None:
    """Every step behind the one before it, from the last prompt's on."""
    engine = build(directory, 60, max_num_seqs=6)
    assert isinstance(engine.runner, LateRunner)
    engine.launcher = engine.runner
    for sequence in sequences(3, MIXTURES[mixture]):
        engine.submit(sequence)
    are_ahead = []
    while engine.has_work:
        engine.step()
        are_ahead.append(engine.last_plan.is_ahead)
    first = are_ahead.index(True)
    assert all(are_ahead[first:]) and len(are_ahead) - first > 12
    assert first < 5, "the prompts are as many steps"
