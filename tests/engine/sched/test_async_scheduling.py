"""Steps planned and launched before the one before them is read; `FakeDevice` computes late.

The property tests in `test_scheduler.py` play every workload in this way, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from msgspec.structs import replace

from disagg.engine.engine import Engine
from disagg.engine.sched.acceptance import Acceptance
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.messages import Thinking
from tests.engine.fake_runner import FakeDevice, FakeKV, draft_of, expected_tokens
from tests.engine.workload import arrive, new_engine, new_sequence

BLOCK_SIZE = 4
PROMPT = tuple(range(10, 17))  # its first token is computed with a block's last place
NEVER: frozenset[int] = frozenset()


def device_of(engine: Engine) -> FakeDevice:
    assert isinstance(engine.runner, FakeDevice)
    return engine.runner


def play(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks
    return events


def answer(sequence: Sequence, num_prompt: int = len(PROMPT)) -> list[int]:
    return sequence.tokens[num_prompt:]


def started(num_blocks: int = 16, **sampling: object) -> tuple[Engine, FakeKV, Sequence]:
    """A sequence that has its first token, and whose next step is under way."""
    engine, kv = new_engine(num_blocks, BLOCK_SIZE, on_device=True)
    sequence = new_sequence(PROMPT, BLOCK_SIZE, 12, **sampling)  # type: ignore[arg-type]
    engine.submit(sequence)
    while not (engine.step() and engine.is_under_way):
        pass
    return engine, kv, sequence


def test_each_step_is_launched_before_the_one_before_it_is_read() -> None:
    engine, _ = new_engine(16, BLOCK_SIZE, on_device=True)
    sequence = new_sequence(PROMPT, BLOCK_SIZE, 4, stop_ids=NEVER)
    engine.submit(sequence)
    play(engine)
    assert answer(sequence) == expected_tokens(PROMPT, 4)
    assert device_of(engine).log == [
        *("launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3", "read 4")
    ], "and none after the fourth: its length is known"


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_blocks_stay_until_the_step_that_writes_to_them_has_ended(end: str) -> None:
    first, second, stop = expected_tokens(PROMPT, 3)
    assert stop not in (first, second)
    engine, _, sequence = started(5, stop_ids=frozenset({stop}) if end == "stop" else NEVER)
    if end == "stop":
        engine.step()
        (event,) = engine.step()
        assert event.finish_reason == "stop" and engine.is_under_way
    else:
        engine.abort(sequence.request_id)
    assert not engine.scheduler.has_work and engine.has_work
    assert engine.pool.num_free < 5, "a wasted row is still to be computed"
    assert engine.reserve(5) is None
    engine.check()
    assert engine.step() == []
    assert engine.pool.num_free == 5 and not engine.has_work
    assert engine.reserve(5) is not None


def test_who_is_asked_to_leave_does_so_when_no_step_writes_to_its_blocks() -> None:
    engine, kv, sequence = started(stop_ids=NEVER)
    engine.scheduler.hand_over(sequence)
    (event,) = engine.step()
    assert event.left and not engine.is_under_way
    assert sequence.num_computed == len(sequence.tokens) - 1
    twin = new_sequence(tuple(sequence.tokens), BLOCK_SIZE)
    other = FakeKV(16, BLOCK_SIZE)
    twin.block_ids = list(range(8))
    other.compute(twin, 0, sequence.num_computed)
    assert kv.read(sequence.block_ids, sequence.num_computed) == other.read(
        twin.block_ids, sequence.num_computed
    )


def test_somebody_new_is_admitted_by_the_next_plan_but_one() -> None:
    engine, _, sequence = started(stop_ids=NEVER)
    engine.submit(new_sequence((99, 98), BLOCK_SIZE, 2, stop_ids=NEVER))
    engine.step()
    assert not engine.is_under_way, "nothing is launched ahead while somebody may enter"
    engine.step()
    assert len(engine.last_plan.sequences) == 2
    play(engine)
    assert answer(sequence) == expected_tokens(PROMPT, 12)


def test_who_cannot_enter_hinders_nobody() -> None:
    """The batch is full, which is when overlapping matters most."""
    engine, _ = new_engine(40, BLOCK_SIZE, max_num_seqs=1, on_device=True)
    first, second = (new_sequence((n, 98), BLOCK_SIZE, 9, stop_ids=NEVER) for n in (50, 60))
    engine.submit(first)
    engine.submit(second)
    engine.step()
    engine.step()
    assert engine.is_under_way and engine.scheduler.waiting == [second]
    play(engine)
    assert answer(second, 2) == expected_tokens((60, 98), 9)


def test_who_waits_for_blocks_hinders_nobody_until_there_are_more() -> None:
    engine, _ = new_engine(8, BLOCK_SIZE, on_device=True)
    first = new_sequence((50, 98), BLOCK_SIZE, 9, stop_ids=NEVER)
    large = new_sequence(tuple(range(60, 86)), BLOCK_SIZE, 3, stop_ids=NEVER)
    engine.submit(first)
    engine.submit(large)
    engine.step()
    for _ in range(8):
        assert engine.is_short and engine.is_under_way
        engine.step()
    assert engine.scheduler.waiting == [large] and not engine.is_under_way
    engine.step()
    assert engine.scheduler.running == [large], "its place is free as soon as the first has ended"
    play(engine)
    assert answer(large, 26) == expected_tokens(tuple(range(60, 86)), 3)


def test_who_waits_for_blocks_is_admitted_when_somebody_gives_some_back() -> None:
    engine, _ = new_engine(8, BLOCK_SIZE, on_device=True)
    held = engine.reserve(3)
    assert held is not None
    first = new_sequence((50, 98), BLOCK_SIZE, 20, stop_ids=NEVER)
    large = new_sequence(tuple(range(60, 70)), BLOCK_SIZE, 3, stop_ids=NEVER)
    third = engine.reserve(2)
    assert third is not None
    engine.submit(first)
    engine.submit(large)
    while not engine.is_under_way:
        engine.step()
    assert engine.scheduler.waiting == [large]
    engine.pool.release(held)
    engine.step()
    engine.step()
    assert engine.scheduler.running == [first, large]
    engine.pool.release(third)
    play(engine)
    assert answer(large, 10) == expected_tokens(tuple(range(60, 70)), 3)


def test_chunks_of_prompts_are_launched_ahead() -> None:
    """In the middle of a prompt nothing is sampled; its last chunk is followed by a decode."""
    engine, _ = new_engine(40, BLOCK_SIZE, on_device=True, max_num_batched_tokens=8)
    decoding = new_sequence(PROMPT, BLOCK_SIZE, 12, stop_ids=NEVER)
    engine.submit(decoding)
    engine.step()
    prompt = tuple(range(30, 50))
    chunked = new_sequence(prompt, BLOCK_SIZE, 4, stop_ids=NEVER)
    engine.submit(chunked)
    while chunked not in engine.last_plan.sequences:
        engine.step()
    while len(answer(chunked, 20)) < 3:
        assert engine.is_under_way
        engine.step()
    play(engine)
    assert answer(chunked, 20) == expected_tokens(prompt, 4)
    assert answer(decoding) == expected_tokens(PROMPT, 12)


def test_who_is_aborted_in_the_middle_of_a_prompt_keeps_its_blocks_for_the_step_under_way() -> None:
    engine, _ = new_engine(8, BLOCK_SIZE, on_device=True, max_num_batched_tokens=8)
    chunked = new_sequence(tuple(range(30, 55)), BLOCK_SIZE, 4, stop_ids=NEVER)
    engine.submit(chunked)
    engine.step()
    assert engine.is_under_way
    engine.abort(chunked.request_id)
    assert engine.reserve(2) is None
    assert engine.step() == [] and engine.pool.num_free == 8


def test_who_has_no_draft_is_launched_ahead_with_prompt_lookup() -> None:
    """A draft is there one token later, for the step after the one that was under way."""
    engine, _ = new_engine(40, BLOCK_SIZE, on_device=True, max_num_batched_tokens=64)
    lookup = Foresight()
    engine.scheduler.drafting.proposer = lookup
    sequence = new_sequence(PROMPT, BLOCK_SIZE, 12, stop_ids=NEVER)
    engine.submit(sequence)
    engine.step()
    engine.step()
    assert engine.is_under_way
    expected = expected_tokens(PROMPT, 12)
    lookup.drafts = [tuple(expected[2:6])]
    engine.step()
    assert not engine.is_under_way, "the draft is verified first"
    assert sequence.draft == tuple(expected[3:6]), "its first token came true meanwhile"
    (event,) = engine.step()
    assert event.token_ids == tuple(expected[3:7])
    engine.step()
    lookup.drafts = [(expected[8] + 1, expected[9])]
    engine.step()
    assert not sequence.draft, "it was wrong from the beginning"
    play(engine)
    assert answer(sequence) == expected


class Foresight(PromptLookup):
    """Proposes what it is given, whatever came before."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.drafts: list[tuple[int, ...]] = []

    def draft(self, sequence: Sequence) -> tuple[int, ...]:
        return self.drafts.pop() if self.drafts else ()


def test_a_draft_is_verified_before_anything_follows() -> None:
    engine, _ = new_engine(16, BLOCK_SIZE, on_device=True, max_num_batched_tokens=64)
    sequence = new_sequence(PROMPT, BLOCK_SIZE, 12, stop_ids=NEVER, draft=draft_of(PROMPT, 3, 2))
    engine.submit(sequence)
    (event,) = engine.step()
    assert len(event.token_ids) == 4 and not engine.is_under_way
    play(engine)
    assert answer(sequence) == expected_tokens(PROMPT, 12)


@pytest.mark.parametrize("budget", [0, 3, 500])
@pytest.mark.parametrize("door", ["submit", "join"])
def test_a_thinking_budget_keeps_no_step_from_being_launched(door: str, budget: int) -> None:
    """Neither the first steps here nor those after the first token was sent."""
    engine, kv = new_engine(16, BLOCK_SIZE, on_device=True)
    thinking = Thinking(starts=(), end=(1000,), forced_end=(1000,), is_open=True, budget=budget)
    output = tuple(expected_tokens(PROMPT, 1)) if door == "join" else ()
    sequence = new_sequence(
        PROMPT, BLOCK_SIZE, 12, output=output, stop_ids=NEVER, thinking=thinking
    )
    if door == "join":
        arrive(engine, kv, sequence, len(PROMPT))
    else:
        engine.submit(sequence)
    num_tokens = 0
    while engine.has_work:
        for event in engine.step():
            num_tokens += len(event.token_ids)
        assert engine.last_plan.is_ahead == (num_tokens > 1), "only the first one follows none"
    assert num_tokens == 12 - len(output)
    assert answer(sequence) == expected_tokens(PROMPT, 12)


def engine_for_256() -> Engine:
    engine, _ = new_engine(
        1200, BLOCK_SIZE, max_num_seqs=256, max_num_batched_tokens=512, on_device=True
    )
    return engine


def streams(num_seqs: int, max_tokens: int, *, needs_host: int = 0) -> list[Sequence]:
    """So many sequences, of which the last `needs_host` need the host for each token."""
    return [
        new_sequence(
            (n, 98), BLOCK_SIZE, max_tokens, stop_ids=NEVER, needs_host=n >= num_seqs - needs_host
        )
        for n in range(num_seqs)
    ]


def steps_of(engine: Engine, sequences: list[Sequence]) -> list[tuple[bool, int]]:
    """For each step: whether it was launched ahead, and how many sequences gained tokens."""
    for sequence in sequences:
        engine.submit(sequence)
    steps = []
    while engine.has_work:
        events = engine.step()
        steps.append((engine.last_plan.is_ahead, len(events)))
        engine.check()
    return steps


def test_one_that_needs_the_host_costs_255_others_no_step() -> None:
    """All steps are launched ahead, as if it were like the others; only its choice waits."""
    found = []
    for needs_host in (0, 1):
        engine = engine_for_256()
        sequences = streams(256, 12, needs_host=needs_host)
        found.append(steps_of(engine, sequences))
        for n, sequence in enumerate(sequences):
            assert answer(sequence, 2) == expected_tokens((n, 98), 12)
        log = device_of(engine).log
        chosen = [f"choose {n}" for n in range(1, 13) if needs_host]
        assert [entry for entry in log if entry.startswith("choose")] == chosen
        for n in range(2, 13):
            then = [f"read {n - 1}", f"choose {n}"][: 1 + needs_host]
            place = log.index(f"launch {n}") + 1
            assert log[place : place + len(then)] == then
    assert found[0] == found[1] == [(False, 256), *[(True, 256)] * 11]


class AlwaysRight(PromptLookup):
    """Proposes the next two tokens for one sequence."""

    def __init__(self, sequence: Sequence, output: list[int]) -> None:
        super().__init__(2, 2)
        self._sequence, self._output = sequence, output

    def draft(self, sequence: Sequence) -> tuple[int, ...]:
        num_output = sequence.num_output_tokens
        if sequence is not self._sequence or not num_output:
            return ()
        return tuple(self._output[:-1][num_output : num_output + 2])


def test_one_with_drafts_costs_255_others_no_step() -> None:
    """It takes part in every other step, and gains three tokens there."""
    engine = engine_for_256()
    sequences = streams(256, 12)
    expected = expected_tokens((255, 98), 12)
    engine.scheduler.drafting.proposer = AlwaysRight(sequences[-1], expected)
    found = steps_of(engine, sequences)
    assert answer(sequences[-1], 2) == expected
    for n, sequence in enumerate(sequences[:-1]):
        assert answer(sequence, 2) == expected_tokens((n, 98), 12)
    # When its first draft is proposed, the step that gives the draft's first token is under way.
    assert found == [
        (False, 256),
        (True, 256),
        *[(True, 255), (True, 256)] * 4,
        (True, 256),  # what is left to propose then is a single token, which this step gives
        (True, 255),
    ]


class Smaller:
    """A proposer that needs all tokens of a sequence, as a draft model does."""

    num_tokens, knows_ahead, spent_s = 2, False, 0.0

    def __init__(self, outputs: dict[Sequence, list[int]]) -> None:
        self._outputs = outputs

    def entry_s(self, sequence: Sequence) -> float:
        return 0.0

    def token_s(self, num_sequences: int, place: int) -> float:
        return 0.0

    def propose(self, limits: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        self.spent_s += 1.0
        for sequence, limit in limits.items():
            begin = sequence.num_output_tokens
            assert sequence.tokens[2:] == self._outputs[sequence][:begin], "a token is not read yet"
            yield sequence, tuple(self._outputs[sequence][begin : begin + limit])


def test_one_with_a_draft_model_costs_255_others_no_step() -> None:
    """It takes part in every other step: in between its draft is made, beside the others' step."""
    engine = engine_for_256()
    *others, drafted = sequences = streams(256, 12)
    for sequence in others:
        sequence.sampling = replace(sequence.sampling, presence_penalty=0.1)
    expected = expected_tokens((255, 98), 12)
    drafting = engine.scheduler.drafting
    drafting.proposer = Smaller({drafted: expected})
    found = steps_of(engine, sequences)
    assert answer(drafted, 2) == expected
    for n, sequence in enumerate(others):
        assert answer(sequence, 2) == expected_tokens((n, 98), 12)
    assert found == [
        (False, 256),
        (True, 256),
        *[(True, 255), (True, 256)] * 4,
        (True, 255),
        (True, 255),
    ]
    assert not drafting.take_spent_s(), "no step was shorter for it"


def test_who_gains_less_than_a_token_does_not_rest_for_a_draft() -> None:
    engine = engine_for_256()
    *others, drafted = sequences = streams(256, 12)
    for sequence in others:
        sequence.sampling = replace(sequence.sampling, presence_penalty=0.1)
    engine.scheduler.drafting.proposer = Smaller({drafted: expected_tokens((255, 98), 12)})
    drafted.acceptance = Acceptance()
    for _ in range(9):
        drafted.acceptance.learn(2, 0)
    assert steps_of(engine, sequences) == [(False, 256), *[(True, 256)] * 11]


def test_many_with_drafts_are_verified_before_anything_follows() -> None:
    engine, _ = new_engine(
        400, BLOCK_SIZE, max_num_seqs=64, max_num_batched_tokens=512, on_device=True
    )
    sequences = streams(64, 12)
    for n, sequence in enumerate(sequences[:3]):
        sequence.draft = draft_of((n, 98), 3, 2)
    found = steps_of(engine, sequences)
    assert found[:3] == [(False, 64), (False, 64), (True, 64)]
    for n, sequence in enumerate(sequences):
        assert answer(sequence, 2) == expected_tokens((n, 98), 12)


def test_an_engine_that_stops_waits_for_what_is_under_way() -> None:
    from disagg.errors import WorkerLost

    engine, _, sequence = started(stop_ids=NEVER)
    engine.end_all(WorkerLost("stopped"))
    events = engine.step()
    assert [(e.sequence, e.token_ids, e.is_last) for e in events] == [(sequence, (), True)]
    assert not engine.has_work and engine.pool.num_free == 16
