"""Who would come too late is refused, and nobody is where no one waits."""

from __future__ import annotations

import math
import random

import pytest

from disagg.errors import Overloaded
from disagg.router.admission import in_time
from disagg.router.fleet import Fleet
from disagg.router.output_length import USUAL_DELAY
from disagg.router.policy import choose_route
from disagg.router.route import Candidate, Route
from disagg.router.worker_view import RequestLoad
from tests.router.fakes import far_from, make_fleet, make_record, make_request, make_status


def way(own_s: float, wait_s: float, decode: str = "d0") -> Candidate:
    return Candidate(None, decode, own_s, wait_s, own_s + wait_s, own_s + wait_s + 1.0, 0)


def choose(fleet: Fleet, num_tokens: int = 1000, slo_s: float = 1.0, **changes: float) -> Route:
    request = make_request(num_tokens, **changes)
    rng = random.Random(0)
    return choose_route(request, fleet.view(), fleet.index, 0.0, rng, ttft_slo_s=slo_s)


def test_a_queue_may_be_as_long_as_the_slo_leaves_time() -> None:
    ways = [way(0.1, 4.0 / USUAL_DELAY - 0.11)]
    assert in_time(ways, 4.0, math.inf, USUAL_DELAY) == ways
    with pytest.raises(Overloaded) as refused:
        in_time([way(0.1, 4.0 / USUAL_DELAY + 2.4)], 4.0, math.inf, USUAL_DELAY)
    assert refused.value.retry_after_s == pytest.approx(2.5 * USUAL_DELAY)
    assert "4.0 s are allowed" in refused.value.message


def test_the_deadline_counts_where_it_is_shorter() -> None:
    ways = [way(0.1, 2.0)]
    assert in_time(ways, 4.0, 4.0, USUAL_DELAY) == ways
    with pytest.raises(Overloaded, match=r"1\.0 s are allowed"):
        in_time(ways, 4.0, 1.0, USUAL_DELAY)


def test_only_ways_in_time_remain() -> None:
    ways = [way(0.1, 9.0), way(0.1, 0.2, "d1"), way(0.2, 0.0, "d2")]
    assert [each.decode for each in in_time(ways, 1.0, math.inf, USUAL_DELAY)] == ["d1", "d2"]


def test_nobody_is_refused_where_nobody_waits() -> None:
    """The prediction may be wrong, and only a step can show it."""
    ways = [way(100.0, 0.0)]
    assert in_time(ways, 1.0, 0.5, USUAL_DELAY) == ways


def test_a_long_prompt_may_wait_as_long_as_it_takes_itself() -> None:
    ways = [way(10.0, 2 * 10.0 / USUAL_DELAY - 10.1)]
    assert in_time(ways, 1.0, math.inf, USUAL_DELAY) == ways
    with pytest.raises(Overloaded):
        in_time([way(10.0, 2 * 10.0 / USUAL_DELAY - 9.9)], 1.0, math.inf, USUAL_DELAY)


def test_a_fleet_takes_prompts_until_its_queues_are_as_long_as_the_slo() -> None:
    fleet = make_fleet("p0", "p1", "d0")
    num_accepted = 0
    with pytest.raises(Overloaded) as refused:
        while True:
            route = choose(fleet)
            num_accepted += 1
            if route.prefill is not None:
                fleet.reserve(route.prefill, RequestLoad(1000))
            else:
                fleet.reserve(route.decode, RequestLoad(1000, 1, 1000))
    own_s = fleet.view().workers["p0"].times.prefill_s(1000)  # 0.1 s
    num_places = 3 * 1.0 / USUAL_DELAY / own_s  # on three workers
    assert num_places - 4 < num_accepted < num_places + 3
    assert 0.0 < refused.value.retry_after_s < 3 * own_s
    again = fleet.view().workers["p0"].num_uncomputed_tokens
    fleet.worker_stepped("p0", (), make_status(num_uncomputed_tokens=0))
    assert fleet.view().workers["p0"].num_uncomputed_tokens == again  # still on its way


def test_a_full_batch_refuses_although_nothing_is_queued() -> None:
    """Answers last; short prompts would wait for places, not for each other."""
    fleet = make_fleet(make_record("d0", max_num_seqs=8))
    for num_waiting, is_taken in ((0, True), (8, False)):
        status = make_status(num_running=8, num_waiting=num_waiting, num_context_tokens=800)
        fleet.worker_stepped("d0", (), status)
        if is_taken:
            assert choose(fleet, 16).decode == "d0"
        else:
            with pytest.raises(Overloaded):
                choose(fleet, 16)


def test_a_worker_in_time_is_preferred_to_a_cheaper_one() -> None:
    """A long prompt's tokens are cached on a busy worker, and far away from the other one, where
    computing them again is in time."""
    request = make_request(8000)
    fleet = make_fleet("d0", "d1", held={"d0": list(request.block_hashes)})
    fleet.worker_stepped("d1", (), make_status(transfers=far_from("d0")))
    fleet.worker_stepped("d0", (), make_status(num_waiting=9, num_uncomputed_tokens=5_500))
    assert choose(fleet, 8000, slo_s=100.0).decode == "d0"
    assert choose(fleet, 8000, slo_s=0.7).decode == "d1"


def test_longer_answers_make_places_rarer() -> None:
    fleet = make_fleet(make_record("d0", max_num_seqs=8))
    fleet.worker_stepped("d0", (), make_status(num_running=8, num_context_tokens=800))
    assert fleet.answers.usual("toy") == 128
    short = choose(fleet, 16, math.inf).candidates[0].wait_s
    for _ in range(500):
        fleet.answers.observe("toy", 1000)
    assert fleet.answers.usual("toy") == pytest.approx(1000, rel=0.01)
    assert choose(fleet, 16, math.inf).candidates[0].wait_s == pytest.approx(
        short * 1000 / 128, rel=0.01
    )
