"""Simulates planned fleets under their load before `disagg plan` advises one.

Router, scheduler and admission are the real code. The planner's rooflines give the time of a step,
and simulated workers fit their time models to these steps as real workers do. So the simulation
checks queueing, batching and routing, but not the rooflines.
"""

from __future__ import annotations

import random

import msgspec

from disagg.capacity.advice import Advice
from disagg.capacity.roofline import Placement
from disagg.capacity.sizing import TRANSFER_LATENCY_S, FleetPlan, num_links
from disagg.capacity.worker_steps import step_sizes_of
from disagg.capacity.workload import Slo, Workload
from disagg.errors import StartupError
from disagg.queueing import QUANTILE
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.loads import make_load
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest

BLOCK_TOKENS = 64
LEAST_REQUESTS = 1000
MOST_REQUESTS = 20_000
MOST_UNASKED_S = 13.0
# Approximate CPU time to simulate both fleets, measured on one EPYC core on 2026-11-23.
S_PER_REQUEST, S_PER_OUTPUT_TOKEN = 3.4e-3, 1.2e-5
# A simulation lasts this many times as long as an answer; a fleet starts empty and fills up first.
NUM_ANSWER_TIMES = 5.0


class Played(msgspec.Struct, frozen=True):
    """Simulation results of each fleet of an advice; None if there is no such fleet."""

    apart: SimReport | None
    together: SimReport | None


def play(
    advice: Advice, load: Workload, slo: Slo, link_bytes_per_s: float, made_up: str = ""
) -> tuple[Advice, Played]:
    """Simulate both fleets; returns the revised advice and the results.

    If the advised fleet serves less than 95 % of the requests in time and the other fleet serves
    more, the revised advice is the other fleet.

    Args:
        made_up: the load of `tools/sim/loads.py` to simulate; "": random arrivals of `load`.

    Raises:
        StartupError: the load is too large to be simulated.
    """
    requests = _requests(load, slo, made_up)
    apart, together = (
        None if fleet is None else _play(fleet, slo, link_bytes_per_s, requests)
        for fleet in (advice.apart, advice.together)
    )
    chosen, other = (apart, together) if advice.disaggregate else (together, apart)
    assert chosen is not None
    enough = 100.0 * QUANTILE
    reason = (
        f"{advice.reason} In the simulation, {chosen.in_time_percent:.1f} % of its requests are in"
        " time."
    )
    is_less = chosen.in_time_percent < enough
    if is_less and other is not None and other.in_time_percent > chosen.in_time_percent:
        kind = "Do not disaggregate" if advice.disaggregate else "Disaggregate"
        reason = (
            f"{kind}: in the simulation, the cheaper fleet serves {chosen.in_time_percent:.1f} % of"
            f" the requests in time, and this one {other.in_time_percent:.1f} %."
        )
        advice = msgspec.structs.replace(advice, disaggregate=not advice.disaggregate)
        chosen = other
    if chosen.in_time_percent < enough:
        reason += f" That is less than {enough:g} %: add a worker, or relax the SLOs."
    return msgspec.structs.replace(advice, reason=reason), Played(apart, together)


def why_not_played(load: Workload, slo: Slo, if_quick: bool) -> str | None:
    """Why a plan is not simulated, as a sentence; None if it should be simulated.

    Args:
        if_quick: whether to simulate a plan that takes a few seconds only.
    """
    number = _num_requests(load, slo)
    taken_s = number * (S_PER_REQUEST + S_PER_OUTPUT_TOKEN * load.mean_output_tokens)
    if if_quick and taken_s <= MOST_UNASKED_S:
        return None
    why = "The share of requests in time is not known, because the fleets were not simulated:"
    if number > MOST_REQUESTS:
        return f"{why} {number:,} requests would take too long."
    return f"{why} --play simulates {number:,} requests in about {taken_s:,.0f} s."


def _num_requests(load: Workload, slo: Slo) -> int:
    answer_s = load.mean_output_tokens * slo.tpot_s + slo.ttft_s
    return max(LEAST_REQUESTS, int(NUM_ANSWER_TIMES * answer_s * load.requests_per_s))


def _requests(load: Workload, slo: Slo, made_up: str) -> list[TraceRequest]:
    """Requests of the load for several answer durations; with its lengths and Poisson arrivals, if
    it is not a made-up one."""
    number = _num_requests(load, slo)
    if number > MOST_REQUESTS:
        raise StartupError(
            f"Simulating {load.requests_per_s:g} requests/s needs {number:,} requests, and more"
            f" than {MOST_REQUESTS:,} take too long. Simulate a part of the load, such as"
            f" {0.99 * load.requests_per_s * MOST_REQUESTS / number:.0f} requests/s, or leave out"
            " --play.",
            param="play",
        )
    if made_up:
        return make_load(made_up, load.requests_per_s, number, seed=0)
    rng = random.Random(0)
    now = 0.0
    requests = []
    for _ in range(number):
        now += rng.expovariate(load.requests_per_s)
        requests.append(TraceRequest(now, *rng.choice(load.lengths)))
    return requests


def _play(
    fleet: FleetPlan,
    slo: Slo,
    link_bytes_per_s: float,
    requests: list[TraceRequest],
) -> SimReport:
    first, last = fleet.pools[0], fleet.pools[-1]
    num_seqs, num_tokens = step_sizes_of(fleet)
    config = SimConfig(
        num_prefill=first.num_workers,
        num_decode=last.num_workers if last is not first else 0,
        num_blocks=_num_blocks(first.placement),
        decode_num_blocks=_num_blocks(last.placement),
        block_size=BLOCK_TOKENS,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        times=first.placement.time_model(max(1, last.batch)),
        decode_times=last.placement.time_model(max(1, last.batch)),
        steps=first.placement,
        decode_steps=last.placement,
        kv_nbytes=first.placement.kv_nbytes_per_token,
        bytes_per_s=link_bytes_per_s * num_links(first.placement, last.placement),
        latency_s=TRANSFER_LATENCY_S,
        fair_queue=True,
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
    )
    return simulate(config, requests)


def _num_blocks(worker: Placement) -> int:
    return max(1, worker.num_kv_tokens // BLOCK_TOKENS)
