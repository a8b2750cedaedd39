"""Advises whether to disaggregate, and why; or why no fleet meets the SLOs, and what would.

Compares the two fleets of `sizing.py`. The disaggregated one must be cheaper, and must not take
longer to move KV than to compute it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from disagg.errors import DisaggError, StartupError
from disagg.planner.gpus import GPUS
from disagg.planner.load import Slo, Workload
from disagg.planner.roofline import Placement, placements
from disagg.planner.sizing import CHUNKS, FleetPlan, Prices, colocated, disaggregated, transfer_s
from disagg.queueing import QUANTILE
from disagg.time_model import StepFeatures


class Advice(msgspec.Struct, frozen=True):
    """`reason` is a sentence with the figures that decided. One of the fleets may be None."""

    disaggregate: bool
    reason: str
    apart: FleetPlan | None
    together: FleetPlan | None

    @property
    def fleet(self) -> FleetPlan:
        chosen = self.apart if self.disaggregate else self.together
        assert chosen is not None
        return chosen


def advise(
    load: Workload, slo: Slo, every: Sequence[Placement], link_bytes_per_s: float, prices: Prices
) -> Advice:
    """Compare the cheapest fleets of both kinds.

    Args:
        every: ways to place the model, on all GPUs to choose from.

    Raises:
        StartupError: no fleet of any size holds the SLOs; says the figure, and what would do.
    """
    _check_reachable(load, slo, every)
    apart = disaggregated(load, slo, every, link_bytes_per_s, prices)
    together = colocated(load, slo, every, prices)
    if apart is None and together is None:
        raise _neither(load, slo, every, link_bytes_per_s)
    if apart is None:
        reason = "with this link, no disaggregated fleet holds the SLOs; one pool does."
        return Advice(False, f"Do not disaggregate: {reason}", apart, together)
    prefill = apart.pools[0].placement
    computed_s = prefill.prefill_s(max(1, round(load.mean_prompt_tokens)))
    moved = f"moving the KV of a mean prompt takes {_ms(apart.transfer_s)}, computing it"
    moved += f" {_ms(computed_s)}"
    if together is None:
        reason = f"Disaggregate: {_why_not_together(load, slo, every)} Apart, {moved}."
        return Advice(True, reason, apart, together)
    ratio = apart.usd_per_hour / together.usd_per_hour - 1.0
    costs = f"apart costs ${apart.usd_per_hour:,.2f} an hour, one pool of workers that do both"
    costs += f" ${together.usd_per_hour:,.2f} ({ratio:+.0%} for apart)"
    if apart.transfer_s >= computed_s:
        reason = f"Do not disaggregate: {moved}, so handing over costs more than it saves; {costs}."
        return Advice(False, reason, apart, together)
    if ratio >= 0:
        return Advice(False, f"Do not disaggregate: {costs}.", apart, together)
    return Advice(True, f"Disaggregate: {costs}; {moved}.", apart, together)


def _why_not_together(load: Workload, slo: Slo, every: Sequence[Placement]) -> str:
    chunk_s = min(each.step_s(StepFeatures(CHUNKS[0], 0.0, 1, 0)) for each in every)
    return (
        f"no pool of workers that do both holds a TTFT of {_ms(slo.ttft_s)} together with a TPOT of"
        f" {_ms(slo.tpot_s)}: a step with a chunk of {CHUNKS[0]} prompt tokens takes"
        f" {_ms(chunk_s)} or more, and smaller TPOTs mean smaller chunks, which take longer to the"
        " first token."
    )


def _check_reachable(load: Workload, slo: Slo, every: Sequence[Placement]) -> None:
    """No number of workers makes one prompt or one step faster."""

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
    wanted_s: float,
    what: str,
    seconds: Callable[[Placement], float],
    every: Sequence[Placement],
) -> None:
    best = min(every, key=seconds)
    if seconds(best) <= wanted_s:
        return
    able = [gpu for gpu in GPUS if _fastest(gpu, best, seconds) <= wanted_s]
    others = f", or take {' or '.join(able)}" if able else ""
    raise StartupError(
        f"{wanted_s:g} s cannot be met: {what} {_ms(seconds(best))} alone on {best.num_gpus} x"
        f" {best.gpu.name}. Ask for {seconds(best) * 1.05:.3g} s or more{others}.",
        param=name,
    )


def _fastest(gpu: str, like: Placement, seconds: Callable[[Placement], float]) -> float:
    """On any number of that GPU; infinite where the model does not fit."""
    try:
        every = placements(
            like.shape,
            GPUS[gpu],
            like.weights,
            like.kv,
            expert_parallel=like.expert_parallel,
        )
    except DisaggError:
        return float("inf")
    return min(map(seconds, every))


def _neither(
    load: Workload, slo: Slo, every: Sequence[Placement], link_bytes_per_s: float
) -> StartupError:
    best = min(every, key=lambda each: each.decode_step_s(1, load.decode_tokens))
    step_s = best.decode_step_s(1, load.decode_tokens)
    spread_s = transfer_s(load, best, best, link_bytes_per_s) / max(1, load.mean_output_tokens - 1)
    return StartupError(
        f"{slo.tpot_s:g} s cannot be met by any fleet: apart, a step takes {_ms(step_s)} and moving"
        f" the KV adds {_ms(spread_s)} a token; together, steps that carry even {CHUNKS[0]} prompt"
        f" tokens are too long. Ask for {(step_s + spread_s) * 1.1:.3g} s or more, or give a faster"
        " --link.",
        param="tpot",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
