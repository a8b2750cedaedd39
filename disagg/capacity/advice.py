"""Advises whether to disaggregate, and why; or says why no fleet meets the SLOs, and what would.

It compares the two fleets of `sizing.py`. It advises the disaggregated one if that is cheaper and
moves KV in less time than computing it again would take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from disagg.capacity.gpus import GPUS
from disagg.capacity.roofline import Placement, placements
from disagg.capacity.sizing import (
    CHUNKS,
    FleetPlan,
    Goal,
    plan_colocated,
    plan_disaggregated,
    transfer_s,
)
from disagg.capacity.workload import Slo, Workload
from disagg.errors import DisaggError, StartupError
from disagg.queueing import QUANTILE
from disagg.time_model import StepFeatures


class Advice(msgspec.Struct, frozen=True):
    """The advice. `reason` is a sentence with the deciding figures. One fleet may be None."""

    disaggregate: bool
    reason: str
    apart: FleetPlan | None
    together: FleetPlan | None

    @property
    def fleet(self) -> FleetPlan:
        chosen = self.apart if self.disaggregate else self.together
        assert chosen is not None
        return chosen


def advise(goal: Goal, every: Sequence[Placement]) -> Advice:
    """Compare the cheapest fleets of both kinds.

    Args:
        every: all ways to place the model on the GPUs that may be used.

    Raises:
        StartupError: no fleet of any size meets the SLOs; says the figure, and what would help.
    """
    _check_reachable(goal.load, goal.slo, every)
    apart, together = plan_disaggregated(goal, every), plan_colocated(goal, every)
    if apart is None and together is None:
        raise _neither(goal, every)
    if apart is None:
        reason = "with this link, no disaggregated fleet meets the SLOs, but one pool does."
        return Advice(False, f"Do not disaggregate: {reason}", apart, together)
    prefill = apart.pools[0].placement
    computed_s = prefill.prefill_s(max(1, round(goal.load.mean_prompt_tokens)))
    moved = f"moving the KV of a mean prompt takes {_ms(apart.transfer_s)}, computing it"
    moved += f" {_ms(computed_s)}"
    if together is None:
        reason = f"Disaggregate: {_why_not_together(goal.slo, every)} In separate pools, {moved}."
        return Advice(True, reason, apart, together)
    ratio = apart.usd_per_hour / together.usd_per_hour - 1.0
    costs = f"separate pools cost ${apart.usd_per_hour:,.2f} an hour, one pool of workers that do"
    costs += f" both ${together.usd_per_hour:,.2f} ({ratio:+.0%} for separate pools)"
    if apart.transfer_s >= computed_s:
        reason = f"Do not disaggregate: {moved}, so handing over costs more than it saves; {costs}."
        return Advice(False, reason, apart, together)
    if ratio >= 0:
        return Advice(False, f"Do not disaggregate: {costs}.", apart, together)
    return Advice(True, f"Disaggregate: {costs}; {moved}.", apart, together)


def _why_not_together(slo: Slo, every: Sequence[Placement]) -> str:
    chunk_s = min(each.step_s(StepFeatures(CHUNKS[0], 0.0, 1, 0)) for each in every)
    return (
        f"no pool of workers that do both meets a TTFT of {_ms(slo.ttft_s)} together with a TPOT of"
        f" {_ms(slo.tpot_s)}. A step with a chunk of {CHUNKS[0]} prompt tokens takes"
        f" {_ms(chunk_s)} or more, and a lower TPOT needs smaller chunks, with which the first"
        " token takes longer."
    )


def _check_reachable(load: Workload, slo: Slo, every: Sequence[Placement]) -> None:
    """Raise `StartupError` if even one prompt or one step alone takes longer than the SLOs allow.

    No number of workers would make it faster.
    """

    def first_s(each: Placement) -> float:
        return each.prefill_s(load.long_prompt_tokens)

    def step_s(each: Placement) -> float:
        return each.decode_step_s(1, load.decode_tokens)

    what = f"a prompt of {load.long_prompt_tokens:,} tokens (the {QUANTILE:.0%} quantile) takes"
    _check_floor("ttft", slo.ttft_s, what, first_s, every)
    what = f"a step of one sequence of {load.decode_tokens:,.0f} tokens takes"
    _check_floor("tpot", slo.tpot_s, what, step_s, every)


def _check_floor(
    name: str,
    slo_s: float,
    what: str,
    seconds: Callable[[Placement], float],
    every: Sequence[Placement],
) -> None:
    best = min(every, key=seconds)
    if seconds(best) <= slo_s:
        return
    able = [gpu for gpu in GPUS if _fastest(gpu, best, seconds) <= slo_s]
    others = f", or use {' or '.join(able)}" if able else ""
    raise StartupError(
        f"{slo_s:g} s cannot be met: {what} {_ms(seconds(best))} alone on {best.num_gpus} x"
        f" {best.gpu.name}. Ask for {seconds(best) * 1.05:.3g} s or more{others}.",
        param=name,
    )


def _fastest(gpu: str, like: Placement, seconds: Callable[[Placement], float]) -> float:
    """The least seconds on any number of that GPU; infinite if the model does not fit."""
    try:
        every = placements(msgspec.structs.replace(like, gpu=GPUS[gpu]))
    except DisaggError:
        return float("inf")
    return min(map(seconds, every))


def _neither(goal: Goal, every: Sequence[Placement]) -> StartupError:
    load, slo = goal.load, goal.slo
    best = min(every, key=lambda each: each.decode_step_s(1, load.decode_tokens))
    step_s = best.decode_step_s(1, load.decode_tokens)
    spread_s = transfer_s(goal, best, best) / max(1, load.mean_output_tokens - 1)
    return StartupError(
        f"{slo.tpot_s:g} s cannot be met by any fleet: in separate pools, a step takes"
        f" {_ms(step_s)}, and moving the KV adds {_ms(spread_s)} per token; in one pool, even steps"
        f" with only {CHUNKS[0]} prompt tokens are too long. Ask for"
        f" {(step_s + spread_s) * 1.1:.3g} s or more, or set a faster --link.",
        param="tpot",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
