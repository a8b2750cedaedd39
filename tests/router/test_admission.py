"""Who would come too late is refused, and nobody is where no one waits."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest

from disagg.errors import Overloaded
from disagg.router.admission import FirstTokens, admit, limit_s
from disagg.router.fleet import Fleet
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


def learned(*errors_s: float, own_s: float = 0.1, num_refused: int = 0) -> FirstTokens:
    """After requests of `own_s`, and predictions that were off by so much near a limit of 4 s."""
    tokens = FirstTokens()
    for number in range(100):
        tokens.arrive(own_s)
        if number < num_refused:
            tokens.refuse()
    for error_s in errors_s:
        tokens.observe(3.0, 3.0 + error_s, 4.0)
    return tokens


EXACT = learned(0.0, 0.0)


def test_a_queue_may_be_as_long_as_the_slo_leaves_time() -> None:
    """A request of usual length, with predictions that are right: the price is less than one."""
    assert admit([way(0.1, 3.89)], 4.0, math.inf, EXACT) == [way(0.1, 3.89)]
    with pytest.raises(Overloaded) as refused:
        admit([way(0.1, 6.4)], 4.0, math.inf, EXACT)
    assert refused.value.retry_after_s == pytest.approx(2.5, abs=0.005)
    assert "4.0 s" in refused.value.message


def test_the_deadline_counts_where_it_is_shorter() -> None:
    ways = [way(0.1, 2.0)]
    assert admit(ways, 4.0, 4.0, EXACT) == ways
    with pytest.raises(Overloaded, match=r"1\.0 s"):
        admit(ways, 4.0, 1.0, EXACT)


def test_only_ways_in_time_remain() -> None:
    ways = [way(0.1, 9.0), way(0.1, 0.2, "d1"), way(0.2, 0.0, "d2")]
    assert [each.decode for each in admit(ways, 1.0, math.inf, EXACT)] == ["d1", "d2"]


def test_nobody_is_refused_where_nobody_waits() -> None:
    """The prediction may be wrong, and only a step can show it."""
    ways = [way(100.0, 0.0)]
    assert admit(ways, 1.0, 0.5, EXACT) == ways


def test_a_long_prompt_may_wait_as_long_as_it_takes_itself() -> None:
    tokens = learned(0.0, 0.0, own_s=10.0)
    assert tokens.admits(10.0, 9.9, 20.0) and limit_s(way(10.0, 9.9), 1.0, math.inf) == 20.0
    with pytest.raises(Overloaded):
        admit([way(10.0, 10.1)], 1.0, math.inf, tokens)


@pytest.mark.parametrize(
    ("errors_s", "longest_s"),
    [
        ((0.0, 0.0), 3.9),
        ((-0.5, -0.5), 4.0),  # tokens come earlier: only the price is left, and it is 1 there
        ((0.5, 0.5), 3.4),
    ],
)
def test_a_wait_that_is_usually_longer_than_predicted_may_be_shorter(
    errors_s: tuple[float, ...], longest_s: float
) -> None:
    assert learned(*errors_s).longest_wait_s(0.1, 4.0) == pytest.approx(longest_s, abs=0.005)


def test_the_chance_to_be_in_time_is_that_of_normal_errors() -> None:
    tokens = learned(*[0.2, 0.6] * 50)  # mean 0.4, deviation 0.2
    for deviations in (-2.0, 0.0, 1.0):
        wait_s = 4.0 - 0.1 - 0.4 - 0.2 * deviations
        expected = NormalDist().cdf(deviations)
        assert tokens.chance(0.1, wait_s, 4.0) == pytest.approx(expected, abs=1e-3)
    assert tokens.chance(0.1, 1e9, math.inf) == 1.0, "without a limit"


def test_errors_of_short_waits_teach_nothing() -> None:
    tokens = learned(0.0, 0.0)
    tokens.observe(0.3 * 4.0 - 0.01, 3.0, 4.0)
    assert tokens.error_s == 0.0


def test_a_request_may_wait_the_shorter_the_longer_it_is_and_the_more_are_refused() -> None:
    """Five times as long: it is worth it while the queue is unlikely to fill."""
    for num_refused, power in ((0, 1.0), (100, 0.5)):
        tokens = learned(0.0, 0.0, num_refused=num_refused)
        assert tokens.price(0.5, 0.4, 4.0) == pytest.approx(5.0 * 0.1**power)
        longest_s = 4.0 * 0.2 ** (1.0 / power)
        assert tokens.longest_wait_s(0.5, 4.0) == pytest.approx(longest_s, abs=0.01)


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
    longest_s = FirstTokens().longest_wait_s(own_s, 1.0)
    num_places = 3 * (longest_s + own_s) / own_s  # on three workers
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
