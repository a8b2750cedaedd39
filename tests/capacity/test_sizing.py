"""Fleets hold their SLOs by their own account, never shrink under more load, and fit by hand."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.capacity.gpus import GPUS, LINKS
from disagg.capacity.roofline import Placement, placements
from disagg.capacity.shapes import SHAPES
from disagg.capacity.sizing import (
    MAX_BUSY,
    MAX_LINK_SHARE,
    FleetPlan,
    Goal,
    plan_colocated,
    plan_disaggregated,
    transfer_s,
)
from disagg.capacity.workload import Slo, Workload
from disagg.errors import ContextLengthExceeded, StartupError
from tests.grids import examples

H100 = GPUS["h100"]
LLAMA_8B = placements(Placement(SHAPES["llama-3-8b"], H100), 8192)
SLO = Slo(0.5, 0.03)
LINK = LINKS["400g"]


def price(placement: Placement) -> float:
    return 3.0


def apart(load: Workload, slo: Slo = SLO, link: float = LINK) -> FleetPlan | None:
    return plan_disaggregated(Goal(load, slo, link, price), LLAMA_8B)


def together(load: Workload, slo: Slo = SLO) -> FleetPlan | None:
    return plan_colocated(Goal(load, slo, LINK, price), LLAMA_8B)


rates = st.floats(0.1, 2000.0)
prompts = st.integers(16, 4000)
outputs = st.integers(2, 1000)
loads = st.builds(
    Workload, rates, st.lists(st.tuples(prompts, outputs), min_size=1, max_size=6).map(tuple)
)


def cost(fleet: FleetPlan | None) -> float:
    return math.inf if fleet is None else fleet.usd_per_hour


@examples(13)
@given(load=loads, more=st.floats(1.0, 3.0))
def test_more_load_never_needs_fewer_gpus(load: Workload, more: float) -> None:
    heavier = Workload(load.requests_per_s * more, load.lengths)
    assert cost(apart(heavier)) >= cost(apart(load))
    assert cost(together(heavier)) >= cost(together(load))


@examples(13)
@given(load=loads, ttft_s=st.floats(0.1, 3.0), tpot_s=st.floats(0.005, 0.1), looser=st.floats(1, 3))
def test_a_fleet_holds_its_slos_and_looser_ones_cost_no_more(
    load: Workload, ttft_s: float, tpot_s: float, looser: float
) -> None:
    strict, loose = Slo(ttft_s, tpot_s), Slo(ttft_s * looser, tpot_s * looser)
    for plan in (apart, together):
        fleet = plan(load, strict)
        assert cost(plan(load, loose)) <= cost(fleet)
        if fleet is not None:
            assert fleet.ttft_s <= ttft_s
            assert fleet.tpot_s <= tpot_s * (1 + 1e-9)


@examples(10)
@given(load=loads, factor=st.floats(1.0, 5.0))
def test_better_gpus_and_links_never_need_more(load: Workload, factor: float) -> None:
    better = msgspec.structs.replace(
        H100,
        memory_bytes_per_s=H100.memory_bytes_per_s * factor,
        bf16_flops=H100.bf16_flops * factor,
        memory_nbytes=H100.memory_nbytes * factor,
    )
    every = [Placement(each.shape, better, each.num_gpus) for each in LLAMA_8B]
    goal = Goal(load, SLO, LINK, price)
    assert cost(plan_disaggregated(goal, every)) <= cost(apart(load))
    assert cost(plan_colocated(goal, every)) <= cost(together(load))
    assert cost(apart(load, link=LINK * factor)) <= cost(apart(load))


@examples(10)
@given(load=loads)
def test_workers_and_links_keep_their_reserve(load: Workload) -> None:
    both = together(load)
    assert both is None or both.pools[0].busy <= MAX_BUSY
    fleet = apart(load)
    if fleet is None:
        return
    prefill, decode = fleet.pools
    assert prefill.busy <= MAX_BUSY
    nbytes_per_s = load.requests_per_s * load.mean_prompt_tokens * 128 * 1024
    for pool in (prefill, decode):
        offered = pool.num_gpus * LINK * MAX_LINK_SHARE
        assert nbytes_per_s <= offered * (1 + 1e-9)


def test_decode_workers_agree_with_littles_law() -> None:
    """Rate in = batch over step time, and everything fits the memory."""
    load = Workload(200.0, [(1024, 256)])
    fleet = apart(load)
    assert fleet is not None
    decode = fleet.pools[1]
    made_per_s = decode.batch / decode.placement.decode_step_s(decode.batch, load.decode_tokens)
    assert made_per_s * decode.num_workers >= load.requests_per_s * 255
    assert decode.batch * load.decode_tokens <= decode.placement.num_kv_tokens
    alone = Workload(200.0 * decode.num_workers / (decode.num_workers - 1), load.lengths)
    assert cost(apart(alone)) > cost(fleet)


def test_transfer_is_bytes_over_the_links_of_the_smaller_worker() -> None:
    goal = Goal(Workload(1.0, [(1000, 10)]), SLO, 1e9, price)
    one, four = LLAMA_8B[0], LLAMA_8B[2]
    assert transfer_s(goal, four, one) == pytest.approx(2e-3 + 1000 * 131072 / 1e9)
    assert transfer_s(goal, four, four) == pytest.approx(2e-3 + 1000 * 131072 / 4e9)


def test_a_slow_link_needs_more_workers_or_rules_it_out() -> None:
    load = Workload(50.0, [(4000, 400)])
    fast, slow = apart(load, link=LINKS["400g"]), apart(load, link=LINKS["10g"])
    assert fast is not None and slow is not None
    assert slow.num_gpus > fast.num_gpus
    assert apart(Workload(50.0, [(4000, 2)]), link=LINKS["10g"]) is None


def test_lengths_of_a_distribution_count() -> None:
    """The same means, but some prompts are long: a longer tail, so more prefill workers."""
    even = Workload(200.0, [(1000, 100)])
    uneven = Workload(200.0, [(100, 100)] * 9 + [(9100 - 1800, 100)] * 1 + [(1800, 100)] * 1)
    assert uneven.mean_prompt_tokens == pytest.approx(even.mean_prompt_tokens, rel=0.1)
    slo = Slo(0.35, 0.03)
    assert cost(apart(uneven, slo)) > cost(apart(even, slo))


def test_figures_of_a_load() -> None:
    load = Workload(1.0, [(100, 10), (300, 30)])
    assert (load.mean_prompt_tokens, load.mean_output_tokens) == (200, 20)
    assert load.decode_tokens == (10 * 105 + 30 * 315) / 40
    assert load.reach == (100 * 101 + 300 * 301) / 2 / 400
    assert load.longest_tokens == 330
    assert load.long_prompt_tokens == 300
    many = Workload(1.0, [(length, 1) for length in range(1, 10_001)])
    assert len(many.prompt_sample) <= 256
    assert sum(many.prompt_sample) / len(many.prompt_sample) == pytest.approx(5000, rel=0.01)
    assert many.long_prompt_tokens == 9501


def test_loads_and_slos_without_sense_are_refused() -> None:
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(StartupError, match="load must be > 0"):
            Workload(rate, [(1, 1)])
    for lengths in ([], [(0, 5)], [(5, 0)]):
        with pytest.raises(StartupError, match="needs a prompt and an output"):
            Workload(1.0, lengths)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(StartupError, match="seconds > 0"):
            Slo(seconds, 1.0)
        with pytest.raises(StartupError, match="seconds > 0"):
            Slo(1.0, seconds)
    with pytest.raises(
        ContextLengthExceeded, match=r"^1 of 2 requests .* 8,192 .* longest has 8,193"
    ):
        Workload(1.0, [(8192, 1), (8191, 1)]).check_fits(SHAPES["llama-3-8b"])
