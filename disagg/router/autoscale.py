"""Autoscaling: how many workers each pool should have, from recent load and step times.

Replays the load of the last minutes on pools of growing size (`replay`), and picks the smallest
size on which 95 % of those requests would have met their SLOs. Both pools are sized from the same
requests, so their ratio follows the load: long prompts need prefill workers, long answers decode
workers. If requests have a TPOT SLO, the router also sends prompts to decode workers, so the spare
time of decode workers counts as prefill capacity.

Two windows are replayed, and the smaller result counts. In the long window (`look_back_s`) 95 % of
the requests should be in time, so a burst that ends before a worker has started counts only by its
share of the requests. The last minute shows what is needed now.

Scales up at once. Scales down to the largest size that was needed within `down_after_s`, but keeps
workers that are needed again and again, and never goes below what runs now. Knows neither Ray nor
a clock; `app/autoscaling.py` measures and starts workers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from disagg.config import AutoscalingConfig, PoolConfig, TierConfig
from disagg.messages import Role
from disagg.queueing import smallest
from disagg.router.load_report import PoolState, RequestTotals
from disagg.router.replay import (
    Slice,
    decode_tpot_s,
    own_prefill_s,
    prefill_ttft_s,
    quantile,
    seconds_of_step,
    seconds_queued,
)
from disagg.router.worker_view import Pool
from disagg.time_model import StepTimeModel

# Of the prompts that the rest of a decode worker could compute if it had no streams. Steps with
# streams in them take fewer prompt tokens, because each must end within the TPOT SLO. Chosen among
# 2/3, 0.8 and 1 on simulated loads (docs/notebook/routing.md).
HELPING_SHARE = 2 / 3

LATELY_S = 60.0  # the load of so long is the present load


class PoolTarget(msgspec.Struct, frozen=True):
    """The size that one pool should have.

    predicted_s: 95th percentile of TTFT (prefill) or TPOT (decode) on so many workers.
    slo_s: what it should be at most: the SLO times `slo_fraction`.
    lacks: a sentence that says why no number of workers meets the SLO; "" if some number does.
    """

    num_workers: int
    predicted_s: float
    slo_s: float
    lacks: str = ""


class ScalingDecision(msgspec.Struct, frozen=True):
    """A pool gets another size: for people, in `GET /debug/fleet`. Figures as in `PoolTarget`."""

    unix_s: float
    model: str
    role: Role
    num_before: int
    num_workers: int
    predicted_s: float | None  # None: without bound
    slo_s: float
    lacks: str


class Autoscaler:
    """Keeps the recent load and the sizes that it needed; decides for all pools together.

    Args:
        max_num_workers: of all pools together, fixed ones too; None: no limit.
    """

    def __init__(self, tiers: Iterable[TierConfig], max_num_workers: int | None = None) -> None:
        self._tiers = tuple(tiers)
        self._max_num_workers = max_num_workers
        self._slices: dict[str, deque[Slice]] = {tier.name: deque() for tier in self._tiers}
        self._needs: dict[Pool, _Needs] = {}
        self._times: dict[Pool, StepTimeModel] = {}  # of pools that may be empty now

    def observe(self, model: str, now: float, seconds: float, asked: RequestTotals) -> None:
        """`asked` of `model` within the `seconds` before `now`."""
        if seconds > 0.0:
            self._slices[model].append(Slice(now, seconds, asked))

    def decide(self, now: float, states: Mapping[Pool, PoolState]) -> dict[Pool, PoolTarget]:
        """The target size of each pool of `states`."""
        goals: dict[Pool, _Goal] = {}
        wanted: dict[Pool, int] = {}
        least: dict[Pool, int] = {}
        for tier in self._tiers:
            num_helping = 0.0
            for role, pool in reversed(tier.pools.items()):  # decode first
                name: Pool = (tier.name, role)
                if name in states:
                    least[name] = _limits(pool).min_replicas
                    goal, number = self._goal_of_pool(
                        now, tier, role, pool, states[name], num_helping
                    )
                    goals[name], wanted[name] = goal, number
                    if role == "decode" and _shares_work(tier):
                        num_helping = HELPING_SHARE * (number - goal.num_busy(number))
        granted = _within(wanted, least, self._max_num_workers)
        return {
            name: PoolTarget(granted[name], goal.predict(granted[name]), goal.slo_s, goal.lacks)
            for name, goal in goals.items()
        }

    def _goal_of_pool(
        self,
        now: float,
        tier: TierConfig,
        role: Role,
        pool: PoolConfig,
        state: PoolState,
        num_helping: float,
    ) -> tuple[_Goal, int]:
        """`num_helping`: what the tier's decode workers leave over for prompts, in workers."""
        if state.times is not None:
            self._times[tier.name, role] = state.times
        elif (tier.name, role) in self._times:
            state = msgspec.structs.replace(state, times=self._times[tier.name, role])
        limits = _limits(pool)
        alone = role == "decode" and not _has_workers(tier.prefill)
        goal, lately = (
            _goal(
                tier,
                role,
                self._recent(tier.name, now, look_back_s),
                state,
                alone,
                limits.slo_fraction,
                num_helping,
            )
            for look_back_s in (limits.look_back_s, min(limits.look_back_s, LATELY_S))
        )
        most = limits.max_replicas
        # As many as serve 95 % in time in the long run, but no more than the present load needs.
        enough = goal.need(most)
        need = max(min(enough, lately.need(most)), goal.at_least(limits))
        # Workers that exist when the autoscaler starts count as needed.
        needs = self._needs.setdefault((tier.name, role), _Needs(now, state.num_workers))
        need = needs.kept(now, need, enough, limits)
        largest = most if pool.autoscaling else pool.num_replicas
        number = min(max(limits.min_replicas, need), largest)
        if need == 0 and limits.min_replicas == 0:
            number = 0
        return goal, number

    def _recent(self, model: str, now: float, look_back_s: float) -> Sequence[Slice]:
        slices = self._slices[model]
        longest_s = max(_limits(pool).look_back_s for pool in self._tier(model).pools.values())
        while slices and slices[0].ends_s <= now - longest_s:
            slices.popleft()
        return [each for each in slices if each.ends_s > now - look_back_s]

    def _tier(self, model: str) -> TierConfig:
        return next(tier for tier in self._tiers if tier.name == model)


class _Needs:
    """The sizes that one pool has needed, and how many of its workers are kept because of them."""

    def __init__(self, now: float, number: int) -> None:
        self._recent = deque([(now, number, number)])  # when, needed, enough for the long window
        self._kept = number
        self._rises: deque[tuple[float, int, int]] = deque()  # when, from what, to what

    def kept(self, now: float, number: int, enough: int, limits: AutoscalingConfig) -> int:
        """The size to keep if `number` is needed now.

        What was needed within `down_after_s`, or within `start_s` if that is longer: a worker that
        leaves before it has started was paid for nothing. A worker that was needed, not needed for
        that long and then needed again, all within `look_back_s`, also stays through the next
        pause, except where fewer are `enough` to serve 95 % of `look_back_s` in time.
        """
        self._recent.append((now, number, enough))
        while self._recent[0][0] < now - max(limits.down_after_s, limits.start_s):
            self._recent.popleft()
        before, self._kept = self._kept, max(needed for _, needed, _ in self._recent)
        if self._kept > before:
            self._rises.append((now, before, self._kept))
        while self._rises and self._rises[0][0] < now - limits.look_back_s:
            self._rises.popleft()
        levels = sorted(level for _, low, high in self._rises for level in range(low, high))
        again = [level + 1 for level, after in pairwise(levels) if level == after]
        most = max(enough for _, _, enough in self._recent)
        return max([self._kept, *(min(level, most) for level in again)])


class _Goal(msgspec.Struct, frozen=True):
    """The SLO of one pool, and what a number of workers would have achieved on the recent load."""

    state: PoolState
    slo_s: float
    predict: Callable[[float], float]
    is_asked: bool
    queued_s: float  # of queued prompts, on one worker
    fits: Callable[[int], bool]  # what runs now
    lacks: str = ""

    def need(self, most: int) -> int:
        """The smallest size that would have met the SLO; if none would, one that comes near."""
        if not self.is_asked:
            return 0
        target_s = self.slo_s
        if self.lacks:  # no size meets the SLO: a request may wait as long as it takes itself
            target_s = 2.0 * self.predict(most)
        found = smallest(1, lambda number: number >= most or self.predict(number) <= target_s)
        return most if found is None else found

    def at_least(self, limits: AutoscalingConfig) -> int:
        """The smallest size that serves what runs and waits now. It keeps the workers in use, and
        adds workers if the queue would not be finished before these have started."""
        present = self.state.num_workers
        kept = smallest(0, lambda number: number >= present or self.fits(number)) or 0
        # By the time that a worker started now serves. Those that are starting are `present`, so
        # the queue that grows meanwhile does not start others in each second.
        late_s = self.queued_s - present * limits.start_s
        if late_s <= 0.0:
            return kept
        num_more = math.ceil(late_s / max(self.slo_s, limits.start_s))
        return max(kept, min(limits.max_replicas, present + num_more))

    def num_busy(self, number: int) -> float:
        """The number of workers that the streams of the recent load would have kept busy, if there
        were `number` decode workers: the share of their steps in the time that the SLO allows."""
        if not self.is_asked:
            return 0.0
        return number * min(1.0, self.predict(number) / self.slo_s)


def _parts(number: float, suffices: Callable[[float], bool]) -> float:
    """The smallest part of `number` workers that suffices, in quarters; all if none does."""
    found = smallest(0, lambda part: part >= 4 * number or suffices(0.25 * part))
    return number if found is None else min(number, 0.25 * found)


def _goal(
    tier: TierConfig,
    role: Role,
    slices: Sequence[Slice],
    state: PoolState,
    alone: bool,
    slo_fraction: float,
    num_helping: float,
) -> _Goal:
    ttft_slo_s, tpot_slo_s = slo_fraction * tier.ttft_goal_s, slo_fraction * tier.tpot_goal_s
    is_asked = any(each.asked.num_requests for each in slices)
    is_asked |= state.num_queued_tokens + state.num_decoding > 0
    times = state.times or StepTimeModel()
    queued_s = seconds_queued(slices, state, times)

    def keeps_up(number: int) -> bool:
        return queued_s <= (number + num_helping) * ttft_slo_s

    def has_room(number: int) -> bool:
        if not state.num_decoding:
            return True
        if not number:
            return False
        batch = state.num_decoding / number
        step_s = seconds_of_step(state, times, batch, state.num_context_tokens / number)
        return step_s <= tpot_slo_s

    if state.times is None:  # step times unknown: one worker will show them
        return _Goal(state, ttft_slo_s, lambda number: 0.0, is_asked, 0.0, keeps_up)

    def ttft_s(number: float) -> float:
        return prefill_ttft_s(slices, times, number, tier.ttft_goal_s)

    if role == "prefill":
        return _Goal(
            state,
            ttft_slo_s,
            lambda number: ttft_s(number + num_helping),
            is_asked,
            queued_s,
            keeps_up,
            _lacks_ttft(tier, slices, times, ttft_slo_s),
        )

    def tpot_s(number: float) -> float:
        """The TPOT without decode workers that are busy with prompts, if they also prefill."""
        if not alone:
            return decode_tpot_s(slices, state, number)
        prompts = _parts(number, lambda few: ttft_s(few) <= ttft_slo_s)
        return decode_tpot_s(slices, state, number - prompts)

    return _Goal(
        state,
        tpot_slo_s,
        tpot_s,
        is_asked,
        queued_s if alone else 0.0,
        lambda number: has_room(number) and (not alone or keeps_up(number)),
        lacks_tpot(tier, times, slo_fraction),
    )


def _lacks_ttft(
    tier: TierConfig, slices: Sequence[Slice], times: StepTimeModel, goal_s: float
) -> str:
    """Why no number of workers gives 95 % of `slices` their first token in time."""
    own = [(own_prefill_s(each.asked, times), each.asked.num_requests) for each in slices]
    alone_s = quantile([each for each in own if each[1]])
    if alone_s <= goal_s:
        return ""
    return (
        f"{tier.name}: prompts take {alone_s:.2f} s on a worker that has nothing else to do, and"
        f" the goal for the first token is {goal_s:g} s"
    )


def lacks_tpot(tier: TierConfig, times: StepTimeModel, slo_fraction: float = 1.0) -> str:
    """Why no number of workers gives tokens in time; "" where some do."""
    alone_s = times.decode_step_s(1.0, 0.0)
    goal_s = slo_fraction * tier.tpot_goal_s
    if alone_s <= goal_s:
        return ""
    return (
        f"{tier.name}: a token takes {1e3 * alone_s:.1f} ms on a worker that has nothing else to"
        f" do, and the goal is {1e3 * goal_s:g} ms"
    )


def may_be_empty(tier: TierConfig) -> bool:
    """Whether the tier may be scaled to zero while there are no requests."""
    return all(
        pool.autoscaling.min_replicas == 0 if pool.autoscaling else not pool.num_replicas
        for pool in tier.pools.values()
    )


def _limits(pool: PoolConfig) -> AutoscalingConfig:
    """The bounds of a pool; a fixed pool has its size as both."""
    if pool.autoscaling is not None:
        return pool.autoscaling
    number = pool.num_replicas
    return AutoscalingConfig(min_replicas=number, max_replicas=max(1, number))


def _shares_work(tier: TierConfig) -> bool:
    """Whether decode workers take prompts as soon as their streams leave room, as the router lets
    them where requests have a TPOT SLO."""
    return tier.tpot_slo_s is not None and tier.tpot_slo_s != math.inf


def _has_workers(pool: PoolConfig) -> bool:
    return pool.autoscaling is not None or pool.num_replicas > 0


def _within(
    wanted: Mapping[Pool, int], least: Mapping[Pool, int], budget: int | None
) -> Mapping[Pool, int]:
    """Fit all pools into `max_num_workers`: each gets its minimum, then the pool with the smallest
    share of what it needs gets the next worker, and so on."""
    if budget is None or sum(wanted.values()) <= budget:
        return wanted
    granted = {pool: min(least[pool], number) for pool, number in wanted.items()}
    while sum(granted.values()) < budget:
        lacking = [pool for pool, number in wanted.items() if granted[pool] < number]
        poorest = min(lacking, key=lambda pool: granted[pool] / wanted[pool])
        granted[poorest] += 1
    return granted
