"""The decision by its properties: more load never means fewer workers, nothing flaps."""

from __future__ import annotations

import copy
import math
import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.config import AutoscalingConfig, PoolConfig, TierConfig
from disagg.router.autoscale import HELPING_SHARE, Autoscaler, may_be_empty
from disagg.router.load_report import PoolState, RequestTotals
from disagg.router.replay import Slice, decode_tpot_s, prefill_ttft_s
from disagg.time_model import StepTimeModel
from tests.grids import examples

TIMES = StepTimeModel(1e-2, 1e-4, 1e-9, 1e-4, 1e-8, 0.0)
PREFILL, DECODE = ("tier", "prefill"), ("tier", "decode")


def limits(least: int = 1, most: int = 16, **others: float) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        **{"look_back_s": 60.0, "down_after_s": 30.0, "start_s": 10.0} | others,
    )


def tier(
    prefill: AutoscalingConfig | None = None,
    decode: AutoscalingConfig | None = None,
    ttft_slo_s: float = 0.5,
    tpot_slo_s: float = 0.03,
) -> TierConfig:
    return TierConfig(
        model="tier",
        prefill=PoolConfig(num_replicas=1, autoscaling=prefill or limits()),
        decode=PoolConfig(num_replicas=1, autoscaling=decode or limits()),
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=tpot_slo_s,
    )


def asked(num: float, prompt: float = 1000.0, answer: float = 100.0) -> RequestTotals:
    return RequestTotals(num, num * prompt, 0.0, num * answer)


def slices(load: list[float], prompt: float = 1000.0, answer: float = 100.0) -> list[Slice]:
    return [Slice(float(i + 1), 1.0, asked(num, prompt, answer)) for i, num in enumerate(load)]


class Played:
    """An autoscaler whose wishes come true after `start_s`; one decision a second."""

    def __init__(self, config: TierConfig, budget: int | None = None) -> None:
        self.scaler = Autoscaler([config], budget)
        self.now = 0.0
        self.sizes = {PREFILL: 1, DECODE: 1}

    def second(self, wanted: RequestTotals, **decoding: float) -> dict[tuple[str, str], int]:
        self.now += 1.0
        self.scaler.observe("tier", self.now, 1.0, wanted)
        states = {
            PREFILL: PoolState(self.sizes[PREFILL], TIMES),
            DECODE: PoolState(self.sizes[DECODE], TIMES, **decoding),  # type: ignore[arg-type]
        }
        decided = self.scaler.decide(self.now, states)  # type: ignore[arg-type]
        self.sizes = {pool: decided[pool].num_workers for pool in self.sizes}  # type: ignore[index]
        return dict(self.sizes)

    def later(self, num_s: int, wanted: RequestTotals) -> dict[tuple[str, str], int]:
        """The sizes after so many seconds, all but the last of them without a decision. A copy is
        played, which goes no further."""
        played = copy.deepcopy(self)
        for _ in range(num_s - 1):
            played.now += 1.0
            played.scaler.observe("tier", played.now, 1.0, wanted)
        return played.second(wanted)


loads = st.lists(st.floats(0.0, 60.0), min_size=1, max_size=30)


@given(
    load=loads,
    more=st.floats(1.0, 4.0),
    num_workers=st.integers(1, 12),
    slo_s=st.sampled_from([math.inf, 0.5, 2.0]),
)
@settings(deadline=None)
def test_more_load_never_comes_sooner(
    load: list[float], more: float, num_workers: int, slo_s: float
) -> None:
    busier = [num * more for num in load]
    state = PoolState(1, TIMES)
    first_s = prefill_ttft_s(slices(load), TIMES, num_workers, slo_s)
    assert prefill_ttft_s(slices(busier), TIMES, num_workers, slo_s) >= first_s - 1e-9
    assert prefill_ttft_s(slices(load), TIMES, num_workers + 1, slo_s) <= first_s + 1e-9
    next_s = decode_tpot_s(slices(load), state, num_workers)
    assert decode_tpot_s(slices(busier), state, num_workers) >= next_s - 1e-9
    assert decode_tpot_s(slices(load), state, num_workers + 1) <= next_s + 1e-9


@given(
    load=loads,
    least=st.integers(0, 4),
    more=st.integers(1, 8),
    budget=st.integers(8, 20),
)
@examples(20)
def test_bounds_and_budget_hold(load: list[float], least: int, more: int, budget: int) -> None:
    bounds = limits(least, least + more)
    played = Played(tier(bounds, bounds), budget)
    for num in load:
        sizes = played.second(asked(num))
        assert all(least <= number <= least + more for number in sizes.values())
        assert sum(sizes.values()) <= budget


@given(rate=st.floats(0.5, 40.0), jitter=st.floats(0.0, 0.3))
@examples(10)
def test_constant_load_does_not_flap(rate: float, jitter: float) -> None:
    """Although it is counted a little unevenly."""
    quick = limits(look_back_s=30.0, down_after_s=15.0, start_s=5.0)
    played = Played(tier(quick, quick))
    sizes = [
        played.second(asked(rate * (1.0 + jitter * math.sin(1.7 * second))))
        for second in range(120)
    ]
    after = sizes[60:]
    assert all(each == after[0] for each in after)


def test_more_are_wanted_at_once_and_fewer_after_a_while() -> None:
    played = Played(tier())
    for _ in range(90):
        calm = played.second(asked(2.0))
    for _ in range(5):
        burst = played.second(asked(60.0))
    assert burst[PREFILL] > calm[PREFILL]
    seen = [played.second(asked(2.0)) for _ in range(200)]
    sizes = [each[PREFILL] for each in seen]
    assert sizes[20] >= burst[PREFILL]  # the burst is still within what is looked at
    assert sizes == sorted(sizes[:60], reverse=True) + sizes[60:]
    assert sizes[-1] == calm[PREFILL]


def test_what_admission_refuses_makes_nobody_wait() -> None:
    """A burst of which most is refused leaves a queue that is as long as the SLO allows."""
    burst = slices([40.0, *[2.0] * 599])
    assert prefill_ttft_s(burst, TIMES, 1.0, 0.5) <= 0.5 < prefill_ttft_s(burst, TIMES, 0.25, 0.5)
    refused = slices([40.0, *[2.0] * 99])  # more than one in twenty of all
    assert prefill_ttft_s(refused, TIMES, 1.0, 0.5) > 0.5


def test_a_prompt_longer_than_the_slo_keeps_its_worker_busy() -> None:
    """Whatever is asked for behind it is refused, and adds no work: also prompts that are cached.
    In a slice, more tokens may be cached than asked for, as requests may be routed later."""
    long = Slice(1.0, 1.0, asked(1.0, prompt=100_000.0))
    cached = RequestTotals(5.0, 500.0, 5000.0, 50.0)
    for behind in (cached, asked(5.0, prompt=10.0)):
        load = [long, *(Slice(each, 1.0, behind) for each in (2.0, 3.0, 4.0, 5.0))]
        assert 15.0 < prefill_ttft_s(load, TIMES, 1.0, 0.5) < 25.0


def test_a_worker_that_is_needed_again_stays_through_the_next_pause() -> None:
    long = limits(look_back_s=300.0, down_after_s=15.0)
    played = Played(tier(long, limits()))
    for _ in range(60):
        calm = played.second(asked(2.0))
    for num_bursts in (1, 2, 3):
        for _ in range(15):
            burst = played.second(asked(30.0))
        pause = [played.second(asked(2.0))[PREFILL] for _ in range(75)]
        assert pause[0] >= burst[PREFILL] > calm[PREFILL]
        assert (pause[-1] > calm[PREFILL]) == (num_bursts > 1)
        assert played.later(300, asked(2.0))[PREFILL] == calm[PREFILL]
    for _ in range(300):
        later = played.second(asked(2.0))
    assert later[PREFILL] == calm[PREFILL]


def test_the_ratio_follows_the_load() -> None:
    long_prompts, long_answers = Played(tier()), Played(tier(tpot_slo_s=0.02))
    for _ in range(60):
        prompts = long_prompts.second(asked(8.0, prompt=4000.0, answer=10.0))
        answers = long_answers.second(asked(8.0, prompt=100.0, answer=800.0))
    assert prompts[PREFILL] > prompts[DECODE]
    assert answers[DECODE] > answers[PREFILL]


@pytest.mark.parametrize("tpot_slo_s", [None, 0.03])
def test_what_streams_leave_of_decode_workers_serves_prompts(tpot_slo_s: float | None) -> None:
    """Only where requests have a TPOT SLO: without one, routing keeps to the roles."""
    played = Played(msgspec.structs.replace(tier(), tpot_slo_s=tpot_slo_s))
    for _ in range(60):
        sizes = played.second(asked(8.0, prompt=2000.0, answer=10.0))
    load = slices([8.0] * 60, prompt=2000.0, answer=10.0)
    needed = next(n for n in range(1, 16) if prefill_ttft_s(load, TIMES, float(n)) <= 0.5)
    num_busy = (
        decode_tpot_s(load, PoolState(1, TIMES), 1) / 0.03
    )  # its steps, of what they may take
    helped = needed - 1 + HELPING_SHARE * (1 - num_busy)
    assert num_busy < 1.0 and prefill_ttft_s(load, TIMES, helped) <= 0.5  # one less is enough
    assert sizes[DECODE] == 1
    assert sizes[PREFILL] == (needed if tpot_slo_s is None else needed - 1)


def test_a_decode_worker_whose_places_are_taken_still_has_time_for_prompts() -> None:
    sizes = []
    for max_num_seqs in (0, 3):  # 0: not known; three places are just enough here
        played = Played(tier())
        for _ in range(60):
            last = played.second(asked(8.0, prompt=2000.0, answer=10.0), max_num_seqs=max_num_seqs)
        sizes.append(last)
    assert sizes[0] == sizes[1] and sizes[1][DECODE] == 1


def test_decode_workers_that_are_busy_do_not_help() -> None:
    played = Played(tier(tpot_slo_s=0.015))
    for _ in range(60):
        sizes = played.second(asked(20.0, prompt=500.0, answer=300.0))
    load = slices([20.0] * 60, prompt=500.0, answer=300.0)
    state = PoolState(1, TIMES)
    assert sizes[DECODE] > 1 and decode_tpot_s(load, state, sizes[DECODE] - 1) > 0.015
    needed = next(n for n in range(1, 16) if prefill_ttft_s(load, TIMES, float(n)) <= 0.5)
    assert needed - 1 <= sizes[PREFILL] <= needed


def test_a_queue_that_grows_while_workers_start_starts_no_others() -> None:
    config = tier(limits(1, 64), limits(1, 64))
    scaler = Autoscaler([config])
    scaler.observe("tier", 0.0, 1.0, asked(1.0))
    queued = 1000.0 * 200.0 / TIMES.prefill_s(1000.0)  # prompts that take one worker 200 s
    num_present, numbers = 2, []
    for second in range(10):  # none of the new ones serves yet
        state = PoolState(num_present, TIMES, queued + 10_000.0 * second)
        states = {PREFILL: state, DECODE: PoolState(1, TIMES)}
        decided = scaler.decide(float(second), states)  # type: ignore[arg-type]
        num_present = decided[PREFILL].num_workers  # type: ignore[index]
        numbers.append(num_present)
    # Within the 10 s of a start 2 workers finish a tenth of it. 18 more finish the rest in 10 s.
    assert numbers[0] == 20 and max(numbers) <= 21


def test_what_runs_is_never_left_without_room() -> None:
    """Nobody asks any more, but long answers are under way."""
    played = Played(tier())
    played.sizes[DECODE] = 6
    busy = {"num_decoding": 600.0, "num_context_tokens": 600_000.0}
    for _ in range(120):
        sizes = played.second(asked(0.0), **busy)
    left = sizes[DECODE]
    step_s = TIMES.decode_step_s(600 / left, 600_000 / left)
    assert step_s <= 0.03 and left > 1


def test_a_pool_goes_to_nothing_and_wakes_only_where_it_may() -> None:
    played = Played(tier(limits(0), limits(1)))
    for _ in range(120):
        sizes = played.second(asked(0.0))
    assert sizes == {PREFILL: 0, DECODE: 1}
    assert played.second(asked(1.0))[PREFILL] == 1
    assert may_be_empty(tier(limits(0), limits(0)))
    assert not may_be_empty(tier(limits(0), limits(1)))


def test_an_slo_out_of_reach_is_told_with_its_figure_and_does_not_take_all() -> None:
    scaler = Autoscaler([tier(ttft_slo_s=0.05, tpot_slo_s=0.005)])
    for second in range(60):
        scaler.observe("tier", float(second), 1.0, asked(2.0))
    states = {PREFILL: PoolState(1, TIMES), DECODE: PoolState(1, TIMES)}
    decided = scaler.decide(60.0, states)  # type: ignore[arg-type]
    assert "0.11 s" in decided[PREFILL].lacks  # type: ignore[index]
    assert "10.1 ms" in decided[DECODE].lacks  # type: ignore[index]
    assert all(1 <= each.num_workers < 8 for each in decided.values())


def test_the_prediction_is_of_the_number_that_is_granted() -> None:
    config = tier()
    free, bound = Autoscaler([config]), Autoscaler([config], 4)
    states = {PREFILL: PoolState(1, TIMES), DECODE: PoolState(1, TIMES)}
    for scaler in (free, bound):
        for second in range(60):
            scaler.observe("tier", float(second), 1.0, asked(40.0))
    free_wish = free.decide(60.0, states)[PREFILL]  # type: ignore[arg-type, index]
    bound_wish = bound.decide(60.0, states)[PREFILL]  # type: ignore[arg-type, index]
    assert bound_wish.num_workers < free_wish.num_workers
    assert free_wish.predicted_s <= config.ttft_limit_s < bound_wish.predicted_s


@pytest.mark.parametrize(("num_prompt", "num_saved"), [(100.0, 1), (3000.0, 0)])
def test_decode_workers_without_prefill_workers_are_sized_for_both(
    num_prompt: float, num_saved: int
) -> None:
    """With the same number, unless less than one worker of either role is busy."""
    both = TierConfig(
        model="tier",
        prefill=PoolConfig(num_replicas=0),
        decode=PoolConfig(num_replicas=1, autoscaling=limits()),
        ttft_slo_s=0.5,
        tpot_slo_s=0.03,
    )
    alone, apart = Autoscaler([both]), Autoscaler([tier()])
    for scaler in (alone, apart):
        for second in range(60):
            scaler.observe("tier", float(second), 1.0, asked(10.0, prompt=num_prompt))
    together = alone.decide(60.0, {DECODE: PoolState(1, TIMES)})  # type: ignore[dict-item]
    separate = apart.decide(
        60.0,
        {PREFILL: PoolState(1, TIMES), DECODE: PoolState(1, TIMES)},  # type: ignore[dict-item]
    )
    total = sum(each.num_workers for each in separate.values())
    assert together[DECODE].num_workers == total - num_saved  # type: ignore[index]


def test_a_budget_is_shared_by_what_each_pool_wants() -> None:
    played = Played(tier(ttft_slo_s=0.2, tpot_slo_s=0.013), budget=6)
    free = Played(tier(ttft_slo_s=0.2, tpot_slo_s=0.013))
    for _ in range(30):
        bound = played.second(asked(40.0, prompt=1000.0, answer=100.0))
        wanted = free.second(asked(40.0, prompt=1000.0, answer=100.0))
    assert min(wanted.values()) >= 3
    assert sum(bound.values()) == 6
    shares = [bound[pool] / wanted[pool] for pool in bound]
    assert max(shares) - min(shares) <= 1.0 / min(wanted.values())


def test_a_worker_that_takes_minutes_to_start_is_not_stopped_before_it_serves() -> None:
    slow = limits(start_s=200.0, look_back_s=300.0, down_after_s=30.0)
    played = Played(tier(slow, limits()))
    for _ in range(60):
        calm = played.second(asked(2.0))
    for _ in range(60):
        burst = played.second(asked(30.0))
    assert burst[PREFILL] > calm[PREFILL]
    after = [played.second(asked(2.0))[PREFILL] for _ in range(200)]
    assert min(after) == burst[PREFILL]
    assert played.later(300, asked(2.0))[PREFILL] == calm[PREFILL]


def test_a_day_without_requests_costs_the_least_and_leaves_no_memory() -> None:
    played = Played(tier(limits(0), limits(1)))
    for _ in range(60):
        played.second(asked(30.0))
    for _ in range(3):  # the pool sleeps, wakes for one request, and sleeps again
        assert played.later(24 * 3600, asked(0.0)) == {PREFILL: 0, DECODE: 1}
        played.now += 24 * 3600
        assert played.second(asked(1.0))[PREFILL] == 1
    assert len(played.scaler._slices["tier"]) <= 2


def test_workers_that_never_start_are_not_asked_for_again_and_again() -> None:
    """Serve goes on trying. The queue grows, and no size above what the load needs would help."""
    scaler = Autoscaler([tier(limits(1, 64), limits())])
    number, numbers = 1, []
    for second in range(120):
        now = float(second)
        scaler.observe("tier", now, 1.0, asked(20.0))
        states = {
            # As many as were asked for count as present. Admission keeps the queue of the one that
            # runs as short as the SLO.
            PREFILL: PoolState(number, TIMES, num_queued_tokens=5000.0),
            DECODE: PoolState(1, TIMES),
        }
        number = scaler.decide(now, states)[PREFILL].num_workers  # type: ignore[arg-type, index]
        numbers.append(number)
    assert len(set(numbers[60:])) == 1


@pytest.mark.parametrize("seed", range(2))
def test_two_pools_do_not_take_the_last_worker_from_each_other_all_the_time(seed: int) -> None:
    """Under a limit that is too small for both, with a load that is counted unevenly."""
    rng = random.Random(seed)
    config = tier(ttft_slo_s=0.2, tpot_slo_s=0.013)
    played = Played(config, budget=6)
    sizes = []
    for _ in range(300):
        rate = rng.uniform(30.0, 50.0)
        sizes.append(played.second(asked(rate, answer=100.0)))
    assert all(sum(each.values()) == 6 for each in sizes[60:])
    num_moves = sum(before != after for before, after in pairwise(sizes[60:]))
    assert num_moves <= 4  # a pool gives a worker back after `down_after_s` at the earliest


def test_figures_that_are_missing_stop_no_worker_in_use() -> None:
    """The ingress lost its links to all workers: neither load nor step times are known."""
    played = Played(tier())
    for _ in range(60):
        before = played.second(asked(20.0))
    for second in range(60):
        now = played.now + 1.0 + second
        played.scaler.observe("tier", now, 1.0, asked(20.0))
        states = {pool: PoolState(before[pool]) for pool in (PREFILL, DECODE)}
        decided = played.scaler.decide(now, states)  # type: ignore[arg-type]
    assert {pool: decided[pool].num_workers for pool in before} == before  # type: ignore[index]


def test_of_prompts_of_unlike_lengths_fewer_are_refused() -> None:
    """The long ones are, and each makes room for several short ones."""
    load = slices([30.0, *[1.0] * 9])
    even = [
        msgspec.structs.replace(each, asked=each.asked._replace(num_squared_tokens=squared))
        for each in load
        for squared in [each.asked.num_requests * 1000.0**2]
    ]
    unlike = [
        msgspec.structs.replace(each, asked=each.asked._replace(num_squared_tokens=2 * squared))
        for each in load
        for squared in [each.asked.num_requests * 1000.0**2]
    ]
    assert even[0].asked.length_variability == 0.0
    assert unlike[0].asked.length_variability == 1.0
    sizes = [
        next(n for n in range(1, 99) if prefill_ttft_s(each, TIMES, n, 0.5) <= 0.5)
        for each in (load, even, unlike)
    ]
    assert sizes[0] == sizes[1] >= sizes[2]  # unknown squares count as even


def test_workers_kept_for_repeated_bursts_are_as_many_as_all_of_it_needs() -> None:
    """Bursts that come again keep workers through the pauses, but no more than serve 95 % of
    `look_back_s` in time: once there are many calm seconds, that is fewer than a burst needs."""
    played = Played(tier(limits(look_back_s=300.0, down_after_s=10.0)))
    for _ in range(3):
        for _ in range(7):
            burst = played.second(asked(30.0))
        for _ in range(40):
            pause = played.second(asked(2.0))
    assert pause[PREFILL] > 1
    for _ in range(170):  # the bursts are a smaller and smaller share
        pause = played.second(RequestTotals(20.0, 20 * 100.0, 0.0, 20 * 10.0))
    assert pause[PREFILL] < burst[PREFILL]
