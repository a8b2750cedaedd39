"""The advice follows the figures, says them, and refuses what no fleet can do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.capacity.advice import Advice, advise
from disagg.capacity.gpus import GPUS, LINKS
from disagg.capacity.roofline import Placement, placements
from disagg.capacity.shapes import SHAPES
from disagg.capacity.sizing import Goal
from disagg.capacity.workload import Slo, Workload
from disagg.errors import StartupError
from tests.grids import examples


def price(placement: Placement) -> float:
    return 3.0


def advice(
    model: str, rate: float, lengths: tuple[int, int], slo: Slo, link: str = "400g"
) -> Advice:
    every = placements(Placement(SHAPES[model], GPUS["h100"]), sum(lengths))
    return advise(Goal(Workload(rate, [lengths]), slo, LINKS[link], price), every)


def test_little_load_stays_together() -> None:
    told = advice("llama-3-70b", 1.0, (1024, 256), Slo(2.0, 0.05))
    assert not told.disaggregate
    assert told.fleet is told.together
    assert told.reason.startswith("Do not disaggregate: separate pools cost $18.00 an hour")
    assert "$12.00 (+50% for separate pools)" in told.reason


def test_much_load_under_a_strict_tpot_goes_apart() -> None:
    told = advice("llama-3-70b", 1000.0, (4096, 256), Slo(1.0, 0.02))
    assert told.disaggregate
    assert told.apart is not None and told.together is not None
    assert told.fleet is told.apart
    assert told.apart.usd_per_hour < told.together.usd_per_hour
    assert told.reason.startswith("Disaggregate: separate pools cost $")


def test_a_small_model_over_a_slow_link_stays_together() -> None:
    told = advice("qwen3-0.6b", 100.0, (1024, 256), Slo(1.0, 0.05), "25g")
    assert not told.disaggregate
    assert "handing over costs more than it saves" in told.reason
    assert "moving the KV of a mean prompt takes 41.1 ms, computing it 3.08 ms" in told.reason


def test_where_no_chunk_is_short_enough_it_goes_apart() -> None:
    told = advice("llama-3-70b", 10.0, (4096, 256), Slo(1.0, 0.0095), "nvlink")
    assert told.together is None
    assert told.disaggregate
    assert "no pool of workers that do both meets a TTFT of 1 s" in told.reason


def test_where_handing_over_takes_too_long_it_stays_together() -> None:
    told = advice("llama-3-8b", 10.0, (4096, 2), Slo(1.0, 0.05), "10g")
    assert told.apart is None
    assert not told.disaggregate
    assert "no disaggregated fleet meets the SLOs" in told.reason


@examples(10)
@given(rate=st.floats(0.1, 500), prompt=st.integers(16, 7000), output=st.integers(2, 1000))
def test_apart_is_advised_only_where_it_is_cheaper_or_alone(
    rate: float, prompt: int, output: int
) -> None:
    told = advice("llama-3-8b", rate, (prompt, output), Slo(1.0, 0.05))
    if told.disaggregate:
        assert told.together is None or told.apart is not None
        assert told.together is None or told.fleet.usd_per_hour < told.together.usd_per_hour
    assert told.fleet.ttft_s <= 1.0 and told.fleet.tpot_s <= 0.05 * (1 + 1e-9)


def test_an_slo_that_cannot_be_met_says_what_can() -> None:
    with pytest.raises(StartupError, match=r"0\.1 s cannot .* takes 184 ms alone on 8 x h100") as e:
        advice("llama-3-70b", 1.0, (4096, 256), Slo(0.1, 0.02))
    assert e.value.param == "ttft"
    assert e.value.message.endswith("Ask for 0.193 s or more, or use b200 or b300.")
    with pytest.raises(StartupError, match=r"0\.005 s cannot .* takes 8\.94 ms alone") as e:
        advice("llama-3-70b", 1.0, (4096, 256), Slo(2.0, 0.005))
    assert e.value.param == "tpot"
    # What it says can be asked for, can.
    assert advice("llama-3-70b", 1.0, (4096, 256), Slo(0.193, 0.05)).fleet.ttft_s <= 0.193


def test_where_the_link_is_all_that_is_wrong_it_says_so() -> None:
    with pytest.raises(StartupError, match=r"the KV adds 14\.2 ms per token.* faster --link"):
        advice("llama-3-70b", 1.0, (4096, 11), Slo(1.0, 0.0095), "10g")
