"""A model whose steps are launched before the last one is read gives the same tokens as in order.

`LateRunner` stands for a GPU: it computes when its results are waited for, when the engine has
planned the next step and blocks have changed hands. New blocks are NaN (`tests/poison.py`).
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.blocks import hash_blocks, hash_root
from disagg.config import EngineConfig
from disagg.engine.device.batching import StepInputs
from disagg.engine.device.build import build_engine
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Results, StepPlan
from disagg.messages import GenerateRequest, SamplingParams, TokenLogprobs
from disagg.models.description import describe_model
from tests.tiny_model import write_tiny_model

BLOCK_SIZE = 4
ROOT = hash_root("late", BLOCK_SIZE)


class LateRunner(ModelRunner):
    is_late = True  # False: it computes as soon as it is told
    num_followed = num_continued = num_chunks_followed = 0

    def launch(self, plan: StepPlan) -> Results:
        self.num_followed += plan.is_ahead
        self.num_continued += plan.continues
        self.num_chunks_followed += plan.is_ahead and plan.num_new_tokens > plan.num_decodes
        return super().launch(plan)

    def _launch(self, plan: StepPlan, step: StepInputs, entered: list[int]) -> Results:
        if not self.is_late:
            return super()._launch(plan, step, entered)
        as_now = replace(plan, sequences=[_as_now(sequence) for sequence in plan.sequences])
        launch = super()._launch
        return lambda: launch(as_now, step, entered)()


def _as_now(sequence: Sequence) -> Sequence:
    same = copy.copy(sequence)
    same.tokens, same.block_ids = [*sequence.tokens], [*sequence.block_ids]
    return same


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("late"))


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
        tokens = tuple(rng.randrange(200) for _ in range(rng.randint(3, max_prompt)))
        request = GenerateRequest(
            request_id=f"{number}",
            model="late",
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            hash_root=ROOT,
            block_hashes=tuple(hash_blocks(ROOT, tokens, BLOCK_SIZE)),
            sampling=SamplingParams(max_tokens=rng.randint(6, 20), **sampling),  # type: ignore[arg-type]
            deadline_unix_s=1e12,
        )
        made.append(Sequence(request))
    return made


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
    "early ends": [{**GREEDY, "stop_token_ids": tuple(range(0, 260, 6))}] * 6,
}


@pytest.mark.parametrize(
    ("num_blocks", "is_late"),
    [(16, True), (60, True), (60, False)],
    ids=["short of blocks", "roomy", "at once"],
)
@pytest.mark.parametrize("mixture", sorted(MIXTURES))
def test_the_same_tokens_in_any_order(
    mixture: str, num_blocks: int, is_late: bool, directory: Path
) -> None:
    in_order, ahead = (build(directory, num_blocks, max_num_seqs=4) for _ in range(2))
    assert isinstance(ahead.runner, LateRunner)
    ahead.launcher, ahead.runner.is_late = ahead.runner, is_late
    expected = play(in_order, sequences(3, MIXTURES[mixture]))
    found = play(ahead, sequences(3, MIXTURES[mixture]))
    assert tokens_of(found) == tokens_of(expected)
    for request_id, said in found.items():
        for (_, logprobs), (_, wanted) in zip(said, expected[request_id], strict=True):
            assert (logprobs is None) == (wanted is None)
            if logprobs is not None and wanted is not None:
                assert logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-5)
                assert [token for token, _ in logprobs.top] == [t for t, _ in wanted.top]
    assert ahead.runner.num_followed > ahead.runner.num_continued > 0


def tokens_of(outputs: dict[str, Said]) -> dict[str, list[int]]:
    return {request_id: [token for token, _ in said] for request_id, said in outputs.items()}


@pytest.mark.parametrize("mixture", ["both", "everything"])
def test_chunks_of_prompts_are_launched_ahead(mixture: str, directory: Path) -> None:
    """Steps with some in the middle of a prompt, some at its end, and some that decode."""
    in_order, ahead = (build(directory, 60, max_num_seqs=4) for _ in range(2))
    assert isinstance(ahead.runner, LateRunner)
    ahead.launcher = ahead.runner
    for engine in (in_order, ahead):
        engine.scheduler.step_budget.most = 9
    expected = tokens_of(play(in_order, sequences(4, MIXTURES[mixture], max_prompt=40)))
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
