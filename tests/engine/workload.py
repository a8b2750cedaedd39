"""Random workloads, and a driver that runs them through an engine and checks everything."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count

from hypothesis import strategies as st

from disagg.blocks import HASH_NBYTES, hash_blocks
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.block_tables import held_blocks
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.kv_groups import STATE, KVGroups, Window
from disagg.messages import Thinking
from tests import generate_requests
from tests.engine.fake_runner import (
    FakeDevice,
    FakeKV,
    FakeRunner,
    draft_of,
    expected_tokens,
    work_of,
)
from tests.generate_requests import ROOT

STOP_IDS = frozenset({1, 2, 3})
FOREVER_S = 1e12


@dataclass(frozen=True)
class Job:
    """One request: when it comes, what it asks, and what happens to it on the way."""

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    door: str = "submit"  # or "arrive" (KV computed elsewhere) or "hand_over"
    abort_after: int | None = None  # steps
    hold_for: int = 1  # steps that a reader takes to fetch what was handed over
    draft: tuple[int, int] = (0, 0)  # right tokens, and wrong ones after them
    priority: int = 0
    leave_after: int | None = None  # steps until it is asked to hand over, as by a drain
    needs_host: bool = False  # to choose a token, its device needs all tokens before


@dataclass(frozen=True)
class Workload:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    caching: bool
    on_device: bool  # steps are planned ahead
    most_drafts_ahead: float  # as `Scheduler.most_drafts_ahead`
    jobs: tuple[Job, ...]
    windows: tuple[Window, ...] = (None,)


def new_engine(
    num_blocks: int,
    block_size: int,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 1000,
    caching: bool = True,
    on_device: bool = False,
    windows: tuple[Window, ...] = (None,),
) -> tuple[Engine, FakeKV]:
    generations = array("Q", bytes(8 * num_blocks))
    pool = BlockPool(
        num_blocks, block_size, generations, enable_prefix_caching=caching, windows=windows
    )
    scheduler = Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    kv = FakeKV(num_blocks, block_size, windows)
    if not on_device:
        return Engine(scheduler, FakeRunner(kv)), kv
    device = FakeDevice(kv)
    return Engine(scheduler, device, launcher=device), kv


_ids = count()


def new_sequence(
    prompt: tuple[int, ...],
    block_size: int,
    max_tokens: int = 4,
    *,
    output: tuple[int, ...] = (),
    stop_ids: frozenset[int] = STOP_IDS,
    seed: int = 0,
    hand_over: bool = False,
    deadline_unix_s: float = FOREVER_S,
    draft: tuple[int, ...] = (),
    priority: int = 0,
    thinking: Thinking | None = None,
    needs_host: bool = False,
) -> Sequence:
    return generate_requests.new_sequence(
        prompt,
        output,
        hand_over=hand_over,
        block_size=block_size,
        request_id=f"request-{next(_ids)}",
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=tuple(stop_ids),
        temperature=0.0,
        thinking=thinking,
        bad_words_token_ids=((300, 301),) if needs_host else (),
        deadline_unix_s=deadline_unix_s,
        draft_token_ids=draft,
        priority=priority,
    )


def prompt(num_tokens: int, first: int = 4) -> tuple[int, ...]:
    return tuple(first + i % 50 for i in range(num_tokens))


def arrive(engine: Engine, kv: FakeKV, sequence: Sequence, num_computed: int) -> None:
    """As when its first tokens' KV has come from elsewhere."""
    block_ids = engine.reserve(-(-num_computed // engine.pool.block_size))
    assert block_ids is not None
    sequence.block_ids, sequence.num_computed = block_ids, num_computed
    kv.compute(sequence, 0, num_computed)
    engine.join(sequence)


# Of groups of layers: full attention and windows, only windows, several groups of each.
WINDOWS: tuple[tuple[Window, ...], ...] = (
    (None, 3),
    (4,),
    (None, None, 7),
    (None, 9, 2),
    (5, 2),
    (None, 3, 3, 3),
)
# The same with recurrent states of one block and of two.
STATES: tuple[tuple[Window, ...], ...] = (
    (None, STATE),
    (None, STATE, STATE),
    (None, None, STATE),
    (STATE,),
    (None, 3, STATE),
)
ONE_GROUP: st.SearchStrategy[tuple[Window, ...]] = st.just((None,))


@st.composite
def workloads(
    draw: st.DrawFn,
    on_device: bool | None = None,
    of_windows: st.SearchStrategy[tuple[Window, ...]] = ONE_GROUP,
) -> Workload:
    """Tiny caches, so that every block is fought over; few prefixes, so that many are shared.

    With `on_device` all plan steps ahead, or none does.
    """
    block_size = draw(st.sampled_from([4, 2, 1]))
    max_num_seqs = draw(st.integers(1, 4))
    prefixes = draw(
        st.lists(st.lists(st.integers(4, 6), min_size=3, max_size=14), min_size=1, max_size=2)
    )
    jobs = []
    for _ in range(draw(st.integers(2, 10))):
        prefix = draw(st.sampled_from(prefixes))
        suffix = draw(st.lists(st.integers(4, 8), min_size=1, max_size=6))
        job = Job(
            step=draw(st.integers(0, 3) | st.integers(0, 20)),
            prompt=tuple(prefix + suffix),
            max_tokens=draw(st.integers(1, 9)),
            seed=draw(st.integers(0, 1)),
            door=draw(st.sampled_from(["submit", "submit", "arrive", "hand_over"])),
            abort_after=draw(st.none() | st.none() | st.integers(0, 12)),
            hold_for=draw(st.integers(0, 5)),
            draft=draw(st.just((0, 0)) | st.tuples(st.integers(0, 11), st.integers(0, 3))),
            priority=draw(st.just(0) | st.integers(-1, 1)),
            leave_after=draw(st.none() | st.none() | st.integers(0, 12)),
            needs_host=draw(st.sampled_from([False, False, True])),
        )
        jobs.append(job)
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    windows = draw(of_windows)
    return Workload(
        num_blocks=KVGroups(windows, block_size).num_at_most(longest) + draw(st.integers(0, 6)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 12)),
        caching=draw(st.sampled_from([True, True, True, False])),
        on_device=draw(st.booleans()) if on_device is None else on_device,
        most_drafts_ahead=draw(st.sampled_from([0.0, 0.5, 1.0])),
        jobs=tuple(jobs),
        windows=windows,
    )


@dataclass
class Driver:
    """Plays a workload, one engine step at a time, and checks all that must hold after each."""

    workload: Workload
    engine: Engine = field(init=False)
    kv: FakeKV = field(init=False)

    def __post_init__(self) -> None:
        w = self.workload
        self.engine, self.kv = new_engine(
            w.num_blocks,
            w.block_size,
            max_num_seqs=w.max_num_seqs,
            max_num_batched_tokens=w.max_num_batched_tokens,
            caching=w.caching,
            on_device=w.on_device,
            windows=w.windows,
        )
        self.engine.scheduler.most_drafts_ahead = w.most_drafts_ahead
        self.jobs: dict[str, Job] = {}
        self.outputs: dict[str, list[int]] = defaultdict(list)
        self.ended: set[str] = set()
        self.arriving: list[Sequence] = []
        self.holds: list[tuple[int, list[int]]] = []  # (step at which it ends, blocks)
        self.findable: set[bytes] = set()
        self.true_names: set[bytes] = set()

    def play(self) -> None:
        starts = defaultdict(list)
        for job in self.workload.jobs:
            starts[job.step].append(job)
        aborts: dict[int, list[str]] = defaultdict(list)
        self.leaving: dict[int, list[Sequence]] = defaultdict(list)
        # Alone, each job would need this many steps; together they must not need more.
        limit = 40 + sum(len(job.prompt) + 4 * job.max_tokens + 8 for job in self.workload.jobs) * 4
        for step in range(limit):
            for job in starts.pop(step, ()):
                self._start(job, step, aborts)
            for request_id in aborts.pop(step, ()):
                self._abort(request_id)
            for sequence in self.leaving.pop(step, ()):
                self.engine.scheduler.hand_over(sequence)
            self._arrivals()
            self.holds = [hold for hold in self.holds if not self._release_due(hold, step)]
            self._step(step)
            if not (starts or self.arriving or self.holds or self.engine.has_work):
                break
        assert self.ended == set(self.jobs), "a request never ended"
        assert self.engine.pool.num_free == self.workload.num_blocks, "blocks were lost"

    def _start(self, job: Job, step: int, aborts: dict[int, list[str]]) -> None:
        sequence = self._sequence(job)
        self.jobs[sequence.request_id] = job
        answer = self._expected(job, job.max_tokens)
        whole = [*job.prompt, *answer[:-1]]  # the last token gets no KV
        self.true_names.update(hash_blocks(ROOT, whole, self.workload.block_size))
        if job.abort_after is not None:
            aborts[step + job.abort_after].append(sequence.request_id)
        if job.leave_after is not None:
            self.leaving[step + job.leave_after].append(sequence)
        if job.door == "arrive" and job.max_tokens > 1 and len(sequence.tokens) > len(job.prompt):
            self.engine.scheduler.number(sequence)
            insort(self.arriving, sequence, key=lambda each: each.arrival)
        else:
            self.engine.submit(sequence)

    def _sequence(self, job: Job) -> Sequence:
        first: tuple[int, ...] = ()
        if job.door == "arrive":
            first = tuple(self._expected(job, 1))
            if first[0] in STOP_IDS or job.max_tokens == 1:
                first = ()
        sequence = new_sequence(
            job.prompt,
            self.workload.block_size,
            job.max_tokens,
            output=first,
            seed=job.seed,
            hand_over=job.door == "hand_over",
            draft=draft_of(job.prompt, *job.draft, job.seed, self.workload.windows)[len(first) :],
            priority=job.priority,
            needs_host=job.needs_host,
        )
        self.outputs[sequence.request_id].extend(first)
        return sequence

    def _expected(self, job: Job, max_tokens: int) -> list[int]:
        windows = self.workload.windows
        return expected_tokens(job.prompt, max_tokens, STOP_IDS, job.seed, windows)

    def _arrivals(self) -> None:
        """What a decode worker does, with a copy that takes no time."""
        groups = self.engine.pool.groups
        for sequence in list(self.arriving):
            num_tokens = len(sequence.tokens) - 1
            block_ids = self.engine.reserve(groups.num_needed(num_tokens), sequence.arrival)
            if block_ids is None:
                return
            self.arriving.remove(sequence)
            self.kv.copy_computed(sequence.tokens[:num_tokens], groups, block_ids)
            sequence.block_ids = groups.table(block_ids, num_tokens)
            sequence.num_computed = num_tokens
            self.engine.join(sequence)

    def _abort(self, request_id: str) -> None:
        arriving = [s for s in self.arriving if s.request_id == request_id]
        if arriving:
            self.arriving.remove(arriving[0])
        elif self.engine.abort(request_id) is None:
            return  # it had ended before
        self.ended.add(request_id)

    def _release_due(self, hold: tuple[int, list[int]], step: int) -> bool:
        if hold[0] > step and not self.engine.is_short:
            return False
        self.engine.pool.release(hold[1])
        return True

    def _step(self, step: int) -> None:
        events = self.engine.step()
        plan = self.engine.last_plan
        assert plan.num_new_tokens <= self.workload.max_num_batched_tokens
        assert all(work.num_tokens == 1 for work in work_of(plan)[: plan.num_decodes])
        for event in events:
            self._take(event, step)
        self._check_names()
        self.engine.check(block_ids for _, block_ids in self.holds)

    def _take(self, event: TokenEvent, step: int) -> None:
        sequence = event.sequence
        request_id = sequence.request_id
        job = self.jobs[request_id]
        assert request_id not in self.ended, "an event after the last one"
        output = self.outputs[request_id]
        output.extend(event.token_ids)
        expected = self._expected(job, job.max_tokens)
        assert output == expected[: len(output)], "tokens from KV that is not the sequence's own"
        if event.is_last:
            self.ended.add(request_id)
        if event.left:
            was_asked = job.leave_after is not None
            assert sequence.hand_over and (len(output) == 1 or any(job.draft) or was_asked)
            assert sequence.num_computed == len(sequence.tokens) - 1
            self.holds.append((step + job.hold_for, held_blocks(sequence.block_ids)))
        elif event.is_last:
            assert output == expected and not sequence.block_ids
            assert event.finish_reason == ("stop" if output[-1] in STOP_IDS else "length")

    def _check_names(self) -> None:
        for event in self.engine.pool.take_events():
            for name in event.block_hashes:
                assert (name in self.findable) == (event.kind == "removed")
                row = name[:HASH_NBYTES]  # a state has a mark behind it
                assert row in self.true_names, "a block of tokens that are nobody's"
            if event.kind == "stored":
                self.findable.update(event.block_hashes)
            else:
                self.findable.difference_update(event.block_hashes)
        assert self.findable == set(self.engine.pool.hashes())
