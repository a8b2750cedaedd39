"""A draft changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.engine import Engine
from disagg.engine.sched import scheduler, speculation
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import MAX_AHEAD, DraftedSequence, rows, usable
from disagg.engine.sched.step import SampledToken, TokenEvent
from disagg.messages import TokenLogprobs
from disagg.time_model import StepFeatures, StepTimeFit
from tests.engine.fake_runner import draft_of, expected_tokens, work_of
from tests.engine.workload import Driver, Workload, new_engine, new_sequence, workloads
from tests.grids import examples

PROMPT = (4, 5, 6, 7, 8)
NEVER: frozenset[int] = frozenset()
BLOCK_SIZE = 4


def play(engine: Engine, *sequences: Sequence) -> dict[str, list[TokenEvent]]:
    """The events of each, in order."""
    events: dict[str, list[TokenEvent]] = {sequence.request_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.submit(sequence)
    while engine.has_work:
        for event in engine.step():
            events[event.sequence.request_id].append(event)
        engine.check()
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def drafted(
    num_right: int,
    num_wrong: int = 0,
    max_tokens: int = 12,
    *,
    stop_ids: frozenset[int] = NEVER,
    hand_over: bool = False,
) -> Sequence:
    draft = draft_of(PROMPT, num_right, num_wrong)
    return new_sequence(
        PROMPT, BLOCK_SIZE, max_tokens, stop_ids=stop_ids, hand_over=hand_over, draft=draft
    )


def test_a_draft_in_a_decode_step_is_no_prompt_for_the_time_model() -> None:
    """Otherwise a worker that speculates seems to compute prompts all the time, and fast."""
    engine, _ = new_engine(16, BLOCK_SIZE, max_num_batched_tokens=64)
    drafting, other = drafted(0), new_sequence(PROMPT, BLOCK_SIZE, 12, stop_ids=NEVER)
    engine.submit(drafting)
    engine.submit(other)
    engine.step()
    drafting.draft = draft_of(PROMPT, 4, 1)[1:]
    engine.step()
    plan = engine.last_plan
    assert plan.num_ahead == 4
    assert plan.features == StepFeatures(0, 0, 2 + 4, 2 * (len(PROMPT) + 1))
    fit = StepTimeFit()
    fit.observe(plan.features, 1e-3)
    assert fit.to_costs().num_prompts == 0


@pytest.mark.parametrize(("num_right", "num_wrong"), [(0, 3), (5, 3), (5, 0), (11, 0), (20, 0)])
def test_the_first_step_gains_all_that_is_right_and_one_more(
    num_right: int, num_wrong: int
) -> None:
    engine, _ = new_engine(16, BLOCK_SIZE, max_num_batched_tokens=64)
    sequence = drafted(num_right, num_wrong)
    [events] = play(engine, sequence).values()
    assert tokens_of(events) == expected_tokens(PROMPT, 12)
    num_gained = min(num_right + 1, 12)
    assert len(events[0].token_ids) == num_gained
    assert len(events) == 1 + 12 - num_gained, "then one token a step"
    assert events[-1].finish_reason == "length"
    num_drafted = min(num_right + num_wrong, 11)
    counted = (engine.scheduler.num_drafted, engine.scheduler.num_accepted)
    assert counted == (num_drafted, min(num_right, 11))
    status = engine.status()
    assert (status.num_drafted, status.num_accepted) == counted
    assert engine.pool.num_free == 16


def test_an_answer_ends_where_it_would_have_ended_inside_of_its_draft() -> None:
    stop_id = expected_tokens(PROMPT, 6)[-1]
    engine, _ = new_engine(16, BLOCK_SIZE, max_num_batched_tokens=64)
    [events] = play(engine, drafted(11, stop_ids=frozenset({stop_id}))).values()
    [event] = events
    assert event.finish_reason == "stop"
    assert list(event.token_ids) == expected_tokens(PROMPT, 12, frozenset({stop_id}))


def test_an_answer_that_may_not_end_yet_goes_on_inside_of_its_draft() -> None:
    stop_id = expected_tokens(PROMPT, 6)[-1]
    sequence = drafted(11, stop_ids=frozenset({stop_id}))
    sequence.min_num_tokens = len(PROMPT) + 12
    engine, _ = new_engine(16, BLOCK_SIZE, max_num_batched_tokens=64)
    [[event]] = play(engine, sequence).values()
    assert list(event.token_ids) == expected_tokens(PROMPT, 12)


def test_who_hands_over_leaves_with_all_that_was_right() -> None:
    engine, kv = new_engine(16, BLOCK_SIZE, max_num_batched_tokens=64)
    sequence = drafted(5, 2, hand_over=True)
    engine.submit(sequence)
    [event] = engine.step()
    engine.check([sequence.block_ids])
    assert event.left and list(event.token_ids) == expected_tokens(PROMPT, 6)
    assert sequence.num_computed == len(PROMPT) + 5, "with KV for all of them but the last"
    assert len(sequence.block_ids) == -(-(len(PROMPT) + 6) // BLOCK_SIZE), "and no more"
    fresh, fresh_kv = new_engine(16, BLOCK_SIZE)
    whole = new_sequence(PROMPT, BLOCK_SIZE, 12, output=event.token_ids)
    fresh.submit(whole)
    fresh.step()
    kept = kv.read(sequence.block_ids, sequence.num_computed)
    assert kept == fresh_kv.read(whole.block_ids, sequence.num_computed)


def test_log_probabilities_go_with_their_tokens() -> None:
    engine, _ = new_engine(16, BLOCK_SIZE)
    sequence = drafted(3)
    engine.submit(sequence)
    answer = expected_tokens(PROMPT, 4)
    plan = engine.scheduler.plan()
    verified = tuple(
        SampledToken(token, TokenLogprobs(-place)) for place, token in enumerate(answer)
    )
    [event] = engine.scheduler.apply(plan, [verified])
    assert event.logprobs == tuple(TokenLogprobs(-place) for place in range(4))
    sequence = drafted(1, 2)
    engine.submit(sequence)
    plan = engine.scheduler.plan()
    places = [work.sequence for work in work_of(plan)].index(sequence)
    sampled: list[SampledToken | tuple[SampledToken, ...]] = [SampledToken(9)] * len(plan.sequences)
    sampled[places] = verified[:1] + tuple(SampledToken(token) for token in answer[1:])
    event = next(e for e in engine.scheduler.apply(plan, sampled) if e.sequence is sequence)
    assert event.token_ids == tuple(answer[:2])
    assert event.logprobs == (TokenLogprobs(0),), "asked for the first tokens only"


def test_a_step_has_a_bound_on_tokens_of_drafts() -> None:
    engine, _ = new_engine(
        512, BLOCK_SIZE, max_num_seqs=3, max_num_batched_tokens=1000, max_model_len=1000
    )
    sequences = [drafted(100, max_tokens=101) for _ in range(3)]
    for sequence in sequences:
        engine.submit(sequence)
    gained = [len(event.token_ids) for event in engine.step()]
    assert engine.last_plan.num_ahead == MAX_AHEAD == 128
    assert gained == [101, 1, 29] or gained == [101, 29, 1], "all of one, a part of the next"


def test_drafts_never_take_the_token_of_a_step_from_others() -> None:
    """Partly verified ones decode with what is left; nobody who decodes is left out."""
    engine, _ = new_engine(64, BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=7)
    others = [new_sequence((9, i + 10), BLOCK_SIZE, 20, stop_ids=NEVER) for i in range(2)]
    for sequence in others:
        engine.submit(sequence)
    engine.step()
    for _ in range(2):
        engine.submit(drafted(11))
    while engine.has_work:
        before = [len(sequence.tokens) for sequence in others]
        running = list(engine.scheduler.running)
        engine.step()
        planned = {work.sequence.request_id for work in work_of(engine.last_plan)}
        for sequence, num_tokens in zip(others, before, strict=True):
            assert len(sequence.tokens) == num_tokens + (sequence in running)
        decoding = [s for s in running if s.num_computed >= len(PROMPT)]
        assert planned >= {s.request_id for s in decoding if s in engine.scheduler}
        assert engine.last_plan.num_new_tokens <= 7
        engine.check()


def test_a_draft_takes_no_block_that_others_will_need() -> None:
    """It is verified piece by piece, and nobody is preempted."""
    engine, _ = new_engine(6, BLOCK_SIZE, max_num_seqs=2, max_num_batched_tokens=64)
    older = new_sequence((9, 10, 11), BLOCK_SIZE, 5, stop_ids=NEVER)
    younger = drafted(11)
    events = play(engine, older, younger)
    assert tokens_of(events[younger.request_id]) == expected_tokens(PROMPT, 12)
    assert tokens_of(events[older.request_id]) == expected_tokens((9, 10, 11), 5)
    assert engine.scheduler.num_preempted == 0
    assert 0 < engine.scheduler.num_drafted < 11, "as much of it as there was room for"


def test_blocks_of_a_wrong_draft_come_back_at_once() -> None:
    engine, _ = new_engine(16, BLOCK_SIZE, max_num_batched_tokens=64)
    sequence = drafted(0, 11)
    engine.submit(sequence)
    engine.step()
    assert engine.last_plan.num_ahead == 11
    assert engine.pool.num_free == 16 - 2


def test_who_is_preempted_goes_on_without_draft() -> None:
    engine, _ = new_engine(16, BLOCK_SIZE, max_num_batched_tokens=4)
    sequence = drafted(11)
    engine.submit(sequence)
    engine.step()
    assert sequence.draft and sequence.num_computed == 4
    engine.scheduler._preempt_latest()
    assert not sequence.draft and not sequence.num_computed
    while engine.has_work:
        engine.step()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 12)
    assert engine.scheduler.num_drafted == 0


@pytest.mark.parametrize(
    ("draft", "max_tokens", "used"),
    [
        ((4, 5, 6), 4, (4, 5, 6)),
        ((4, 5, 6), 3, (4, 5)),
        ((4, 5, 6), 1, ()),
        ((4, 99, 6), 9, (4,)),
        ((-1, 5), 9, ()),
        ((), 9, ()),
    ],
)
def test_what_cannot_come_true_is_cut_off(
    draft: tuple[int, ...], max_tokens: int, used: tuple[int, ...]
) -> None:
    sequence = new_sequence(PROMPT, BLOCK_SIZE, max_tokens)
    assert usable(sequence, draft, vocab_size=99) == used


def test_a_row_of_logits_belongs_to_the_sequence_with_so_much_of_its_draft() -> None:
    sequence = new_sequence(PROMPT, BLOCK_SIZE, output=(9,), draft=(11, 12, 13))
    assert list(rows(sequence, 5)) == []
    assert list(rows(sequence, 6)) == [sequence]
    found = list(rows(sequence, 8))
    assert [each.tokens for each in found] == [
        [*PROMPT, 9],
        [*PROMPT, 9, 11],
        [*PROMPT, 9, 11, 12],
    ]
    assert [each.num_tokens for each in found] == [6, 7, 8]
    assert [each.num_output_tokens for each in found] == [1, 2, 3]
    assert [isinstance(each, DraftedSequence) for each in found] == [False, True, True]


def test_random_workloads_verify_many_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the properties of `test_scheduler` would say little about them."""
    met = dict.fromkeys(("accepted", "refused", "partly", "ended"), 0)
    gain = speculation.gain

    def counted(
        pool: BlockPool, sequence: Sequence, verified: tuple[SampledToken, ...]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
        num_before = len(sequence.draft)
        gained = gain(pool, sequence, verified)
        met["accepted"] += len(gained[0]) > 1
        met["refused"] += len(gained[0]) < len(verified)
        met["partly"] += len(verified) - 1 < num_before
        met["ended"] += sequence.finish_reason() is not None
        return gained

    monkeypatch.setattr(scheduler, "gain", counted)

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(workloads())
    def played(workload: Workload) -> None:
        Driver(workload).play()

    played()
    assert min(met.values()) >= 5, met


@examples(66)
@given(
    num_right=st.integers(0, 12),
    num_wrong=st.integers(0, 6),
    budget=st.integers(1, 20),
    num_blocks=st.integers(4, 9),
    block_size=st.sampled_from([4, 8]),
)
def test_with_and_without_draft_are_the_same_but_for_the_steps(
    num_right: int, num_wrong: int, budget: int, num_blocks: int, block_size: int
) -> None:
    told = []
    num_steps = []
    for is_drafted in (True, False):
        engine, _ = new_engine(
            num_blocks + 1, block_size, max_num_seqs=1, max_num_batched_tokens=budget
        )
        draft = draft_of(PROMPT, num_right, num_wrong) if is_drafted else ()
        sequence = new_sequence(PROMPT, block_size, 10, stop_ids=NEVER, draft=draft)
        [events] = play(engine, sequence).values()
        told.append((tokens_of(events), set(engine.pool.hashes()), events[-1].finish_reason))
        num_steps.append(len(events))
    assert told[0] == told[1]
    assert num_steps[0] <= num_steps[1]


class Right:
    """Proposes so many tokens that are right, as a `drafting.Proposer`."""

    knows_ahead, spent_s = True, 0.0

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def entry_s(self, sequence: Sequence) -> float:
        return 0.0

    def token_s(self, num_sequences: int, place: int) -> float:
        return 0.0

    def propose(self, limits: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        for sequence, limit in limits.items():
            prompt = tuple(sequence.tokens[: sequence.num_prompt_tokens])
            first = sequence.num_output_tokens
            yield sequence, tuple(expected_tokens(prompt, first + limit, NEVER)[first:])


@pytest.mark.parametrize("on_device", [False, True], ids=["", "ahead"])
def test_a_newcomer_is_inserted_into_rounds_of_drafts(on_device: bool) -> None:
    """It computes its prompt, and has drafts, in the steps of the others, none of which gains less
    in any step."""
    gained = []
    for joins in (False, True):
        engine, _ = new_engine(
            128, BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=64, on_device=on_device
        )
        engine.scheduler.drafting.proposer = Right(3)
        others = [new_sequence((9, i), BLOCK_SIZE, 40, stop_ids=NEVER) for i in range(3)]
        newcomer = new_sequence(PROMPT, BLOCK_SIZE, 12, stop_ids=NEVER)
        of_steps: list[list[int]] = []
        for each in others:
            engine.submit(each)
        while any(each in engine.scheduler for each in others):
            if joins and len(of_steps) == 3:
                engine.submit(newcomer)
            events = engine.step()
            of_steps.append([len(e.token_ids) for e in events if e.sequence in others])
            if joins and len(of_steps) == 4:
                assert newcomer.num_output_tokens == 1
        gained.append(of_steps)
        assert not joins or newcomer.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 12, NEVER)
    assert gained[0] == gained[1] and max(map(max, gained[0])) == 4


@pytest.mark.parametrize("on_device", [False, True], ids=["", "ahead"])
def test_drafts_leave_half_of_a_step_to_a_newcomer(on_device: bool) -> None:
    """31 with drafts of 3 tokens fill steps of 128: without drafts its prompt takes two steps."""
    engine, _ = new_engine(
        4096, BLOCK_SIZE, max_num_seqs=40, max_num_batched_tokens=128, on_device=on_device
    )
    engine.scheduler.drafting.proposer = Right(3)
    others = [new_sequence((9, i), BLOCK_SIZE, 99, stop_ids=NEVER) for i in range(31)]
    newcomer = new_sequence(tuple(range(4, 104)), BLOCK_SIZE, 12, stop_ids=NEVER)
    for each in others:
        engine.submit(each)
    while engine.last_plan.num_ahead < 3 * 31:
        engine.step()
    engine.submit(newcomer)
    gained = list[int]()
    while not newcomer.num_output_tokens:
        events = engine.step()
        gained.append(sum(len(each.token_ids) for each in events if each.sequence in others))
    assert gained == [31 + 48] * 3
