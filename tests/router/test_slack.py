"""Where requests have a TPOT SLO, the slack of streams decides who does what, and not the role."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.messages import StepCosts
from disagg.router.costs import Prompt, _share_then, decode_cost, prefill_cost
from disagg.router.fleet import Fleet
from disagg.router.policy import choose_route
from disagg.router.route import Route
from disagg.router.worker_view import RunningStreams, WorkerView
from disagg.time_model import CHUNK_TOKENS
from tests.router.fakes import COSTS, make_record, make_request, make_status

TIGHT_S, LOOSE_S = 0.0125, 0.2  # a step without prompts takes 10 ms
SLOW = StepCosts(tuple(3.0 * each for each in COSTS.coefficients), 100, 0.05)


def make_fleet(tpot_slo_s: float, *names: str, max_num_seqs: int = 256) -> Fleet:
    fleet = Fleet(tpot_slo_s={"toy": tpot_slo_s})
    for name in names:
        fleet.worker_synced(make_record(name, max_num_seqs=max_num_seqs), [], make_status())
    return fleet


def join(fleet: Fleet, name: str, costs: StepCosts) -> None:
    fleet.worker_synced(make_record(name), [], make_status(step_costs=costs))


def streams(fleet: Fleet, worker_id: str, number: int, **status: Any) -> None:
    fleet.worker_stepped(
        worker_id,
        (),
        make_status(num_running=number, num_context_tokens=1000 * number, **status),
    )


def queued(fleet: Fleet, worker_id: str, num_tokens: int, **status: Any) -> None:
    """Prompts that go to other workers when they are computed."""
    fleet.worker_stepped(
        worker_id,
        (),
        make_status(
            num_running=1,
            num_prefilling=1,
            num_leaving=1,
            num_waiting=3,
            num_uncomputed_tokens=num_tokens,
            **status,
        ),
    )


def choose(fleet: Fleet, tpot_slo_s: float, num_tokens: int = 2000, **request: Any) -> Route:
    asked = make_request(num_tokens, tpot_slo_s=tpot_slo_s, ttft_slo_s=2.0, **request)
    return choose_route(asked, fleet.view(), fleet.index, 0.0, random.Random(0))


def worker(fleet: Fleet, worker_id: str) -> WorkerView:
    return fleet.view().workers[worker_id]


def both(route: Route) -> tuple[str | None, str]:
    return route.prefill, route.decode


@pytest.mark.parametrize("tpot_slo_s", [TIGHT_S, LOOSE_S])
@pytest.mark.parametrize("load", ["none", "streams", "prompts"])
def test_which_of_equal_workers_have_which_role_changes_no_cost(
    tpot_slo_s: float, load: str
) -> None:
    """Else one split of the same workers would be better than another."""
    costs_s = []
    for names in ("p0 p1 p2", "p0 p1 d2", "p0 d1 d2", "d0 d1 d2", "d0 p1 p2"):
        fleet = make_fleet(tpot_slo_s, *names.split())
        if load == "streams":
            streams(fleet, names.split()[0], 12)
        elif load == "prompts":
            queued(fleet, names.split()[0], 8000)
        route = choose(fleet, tpot_slo_s)
        costs_s.append(route.chosen.total_s)
    assert costs_s == pytest.approx([costs_s[0]] * len(costs_s))


def test_a_prefill_worker_decodes_when_decode_workers_would_miss_their_slo() -> None:
    fleet = make_fleet(TIGHT_S, "p0", "p1", "d0")
    streams(fleet, "d0", 24)  # 12.6 ms a step
    assert choose(fleet, TIGHT_S).decode in ("p0", "p1")
    streams(fleet, "d0", 12)
    assert choose(fleet, TIGHT_S).decode == "d0"


def test_a_decode_worker_prefills_when_streams_have_slack_and_prefill_workers_are_busy() -> None:
    fleet = make_fleet(LOOSE_S, "p0", "d0")
    streams(fleet, "d0", 8)
    assert "p0" in both(choose(fleet, LOOSE_S))
    queued(fleet, "p0", 8000)
    route = choose(fleet, LOOSE_S)
    assert (route.prefill or route.decode) == "d0"


def test_it_does_not_where_they_have_none() -> None:
    """There a step has room for so few prompt tokens that waiting for the other is faster."""
    fleet = make_fleet(TIGHT_S, "p0", "d0")
    streams(fleet, "d0", 8)
    queued(fleet, "p0", 8000)
    assert choose(fleet, TIGHT_S).prefill == "p0"


def test_streams_belong_together_where_the_slo_is_tight_and_not_where_it_is_loose() -> None:
    """The first stream of a worker takes most of its prompt tokens out of each step, or nearly
    none."""
    lost_s = {}
    for tpot_slo_s in (TIGHT_S, LOOSE_S):
        fleet = make_fleet(tpot_slo_s, "d0", "d1")
        streams(fleet, "d1", 4)
        view = fleet.view().workers
        lost_s[tpot_slo_s] = [decode_cost(view[name], 1000, 0, 64).delay_s for name in ("d0", "d1")]
    alone_s, together_s = lost_s[TIGHT_S]
    assert alone_s > 4 * together_s, "one of five streams pays for a fifth"
    alone_s, together_s = lost_s[LOOSE_S]
    assert alone_s == pytest.approx(together_s, rel=0.5) and alone_s < 0.1 * lost_s[TIGHT_S][0]


@given(per_s=st.floats(1.0, 100.0), answer_s=st.floats(0.05, 20.0), wait_s=st.floats(0.01, 20.0))
def test_where_streams_begin_as_often_as_they_end_as_many_decode_later_as_now(
    per_s: float, answer_s: float, wait_s: float
) -> None:
    """Little's law, before and after the wait of those on their way."""
    num_now, num_coming = round(per_s * answer_s), round(per_s * wait_s)
    some = RunningStreams(num_now + num_coming, num_now, 0.01, 2.0)
    then = some.num * _share_then(some, wait_s, answer_s)
    assert then == pytest.approx(per_s * answer_s, abs=1.0)
    assert _share_then(some, 0.0, answer_s) == (1.0 if some.num else 0.0)


def test_streams_that_end_before_one_begins_displace_nothing_beside_it() -> None:
    fleet = make_fleet(TIGHT_S, "d0")
    streams(fleet, "d0", 8)
    soon, later = (
        decode_cost(worker(fleet, "d0"), 1000, 0, 64, first_token_s=first_s)
        for first_s in (0.0, 100.0)
    )
    fleet = make_fleet(TIGHT_S, "d0")
    alone = decode_cost(worker(fleet, "d0"), 1000, 0, 64)
    assert later.delay_s == pytest.approx(alone.delay_s) and soon.delay_s < 0.2 * alone.delay_s
    assert (later.num_missed, later.most_gap_s) == (soon.num_missed, soon.most_gap_s)


def test_streams_are_gathered_also_where_many_workers_have_none() -> None:
    """Its own steps would be shorter on each of these, but it would displace more prompts."""
    fleet = make_fleet(TIGHT_S, *(f"d{number}" for number in range(10)))
    streams(fleet, "d7", 4)
    assert choose(fleet, TIGHT_S).decode == "d7"


@pytest.mark.parametrize("other", ["d1", "p1"])
def test_nobody_waits_for_a_place_while_a_worker_without_streams_has_some(other: str) -> None:
    """Although the first stream there displaces most prompts: the place is needed in any case."""
    fleet = make_fleet(TIGHT_S, "p0", "d0", other, max_num_seqs=8)
    streams(fleet, "d0", 7)
    assert choose(fleet, TIGHT_S).decode == "d0"
    streams(fleet, "d0", 8)
    assert choose(fleet, TIGHT_S).decode in {"p0", other}


def test_without_a_slo_no_prefill_worker_decodes() -> None:
    fleet = make_fleet(float("inf"), "p0", "d0")
    streams(fleet, "d0", 200)
    assert choose(fleet, 0.0).decode == "d0"


def most_streams() -> int:
    """Of 1,000 tokens each, beside whom one more is in time."""
    per_step_s, _, _, per_stream_s, per_context_s, _ = COSTS.coefficients
    return int((0.98 * TIGHT_S - per_step_s) / (per_stream_s + 1000 * per_context_s)) - 1


def test_who_misses_what_because_of_one_more_stream() -> None:
    fleet = make_fleet(TIGHT_S, "d0")
    most = most_streams()
    for number, num_others in ((most, 0), (most + 1, most + 1)):
        streams(fleet, "d0", number)
        goal = decode_cost(worker(fleet, "d0"), 1000, 0, 64)
        assert goal.num_missed == num_others
        assert (goal.most_gap_s < 0.0) == (number > most)
    streams(fleet, "d0", most + 3)
    goal = decode_cost(worker(fleet, "d0"), 1000, 0, 64)
    assert 0.8 < goal.num_missed < 1.0, "late already: most of its streams could be in time"
    streams(fleet, "d0", most)
    goal = decode_cost(worker(fleet, "d0"), 1000, 0, 64)
    assert goal.most_gap_s < 64 * 0.002, "a gap takes time from every token after it"


def test_a_gpu_too_slow_for_any_stream_loses_nothing_by_another() -> None:
    fleet = make_fleet(TIGHT_S, "d0")
    join(fleet, "d1", SLOW)
    streams(fleet, "d1", 3, step_costs=SLOW)
    goal = decode_cost(worker(fleet, "d1"), 1000, 0, 64)
    assert goal.num_missed == 0.0 and (goal.most_gap_s < 0.0)


def test_a_worker_that_prefills_for_another_pulls_a_prefix_from_it() -> None:
    """A slow GPU computes beside fast ones, which decode: there the prefixes are."""
    request = make_request(2000, tpot_slo_s=TIGHT_S, ttft_slo_s=2.0)
    head = list(request.block_hashes[:100])
    fleet = Fleet(tpot_slo_s={"toy": TIGHT_S})
    fleet.worker_synced(make_record("d0"), head, make_status())
    for name in ("p0", "p1", "p2"):
        join(fleet, name, SLOW)
    streams(fleet, "d0", most_streams() - 2, num_waiting=2, num_uncomputed_tokens=2000)
    route = choose_route(request, fleet.view(), fleet.index, 0.0, random.Random(0))
    assert both(route) in {(name, "d0") for name in ("p0", "p1", "p2")}
    assert (route.prefix_source, route.num_cached_tokens) == ("d0", 1600)


def test_batch_work_goes_where_it_makes_nobody_miss_an_slo() -> None:
    """It has none itself, and so could go anywhere."""
    fleet = make_fleet(TIGHT_S, "p0", "d0")
    for num_streams, decode in ((8, "d0"), (most_streams() + 1, "p0")):
        streams(fleet, "d0", num_streams)
        request = make_request(1000, tpot_slo_s=math.inf, ttft_slo_s=math.inf)
        route = choose_route(request, fleet.view(), fleet.index, 0.0, random.Random(0))
        assert route.decode == decode


def test_prompts_that_will_leave_are_no_streams() -> None:
    fleet = make_fleet(TIGHT_S, "p0")
    per_step_s, _, _, per_stream_s, _, per_prompt_step_s = COSTS.coefficients
    queued(fleet, "p0", 4000)
    streams, backlog = worker(fleet, "p0").streams, worker(fleet, "p0").backlog
    assert streams is not None and streams.num == 0
    assert backlog.step_s == per_step_s + per_prompt_step_s
    fleet.worker_stepped("p0", (), make_status(num_running=3, num_prefilling=1))
    streams, backlog = worker(fleet, "p0").streams, worker(fleet, "p0").backlog
    assert streams is not None and streams.num == 3, "one of them is still a prompt"
    assert backlog.step_s == pytest.approx(per_step_s + per_prompt_step_s + 2 * per_stream_s)


@pytest.mark.parametrize("own_slo_s", [0.001, TIGHT_S, math.inf])
def test_where_the_model_has_no_slo_a_requests_own_changes_no_route(own_slo_s: float) -> None:
    """Roles are fixed there, and no stream is priced by an SLO that others do not have."""
    fleet = make_fleet(math.inf, "p0", "p1", "d0", "d1")
    streams(fleet, "d0", 40)
    queued(fleet, "p0", 8000)
    assert all(each.streams is None for each in fleet.view().workers.values())
    assert choose(fleet, own_slo_s) == choose(fleet, 0.0)


def test_no_prompt_pays_for_the_gap_of_a_stream_without_a_slo() -> None:
    """Steps make up for the gap after a remote prefill only where the stream has an SLO."""
    fleet = make_fleet(TIGHT_S, "p0", "d0")
    streams(fleet, "d0", 4)
    cost_s = {}
    for tpot_slo_s in (TIGHT_S, math.inf):
        remote = [each for each in choose(fleet, tpot_slo_s).candidates if each.prefill == "p0"]
        cost_s[tpot_slo_s] = min(each.total_s for each in remote if each.decode == "d0")
    step_s = worker(fleet, "d0").backlog.under_way_s
    assert cost_s[TIGHT_S] - cost_s[math.inf] > step_s


def test_costs_of_nothing_but_attention_have_a_route() -> None:
    """A worker may learn them from long prompts: steps and tokens cost nothing by themselves."""
    fleet = make_fleet(TIGHT_S)
    only_attention = StepCosts((0.0, 0.0, *COSTS.coefficients[2:5], 0.0), 100, 0.05)
    nothing = StepCosts((0.0,) * 6, 100, 0.05)
    for name, costs in (("d0", only_attention), ("d1", nothing)):
        join(fleet, name, costs)
        streams(fleet, name, 3, step_costs=costs)
    assert choose(fleet, TIGHT_S).decode == "d1"


def test_a_long_prompt_is_predicted_beside_the_streams_that_come_before_it_is_done() -> None:
    fleet = make_fleet(TIGHT_S, "p0", "d0")
    alone = prefill_cost(worker(fleet, "d0"), Prompt(4000), 0)
    fleet.worker_stepped("d0", (), make_status(num_running=2, num_prefilling=2))
    beside = prefill_cost(worker(fleet, "d0"), Prompt(4000), 0)
    assert worker(fleet, "d0").backlog.num_at_once >= CHUNK_TOKENS, "none of them decodes yet"
    assert beside.own_s == pytest.approx(alone.own_s), "which others do not change"
    assert beside.beside_s > alone.own_s, "steps of 12.5 ms have little room for prompts"
    assert beside.queue_s == alone.queue_s == 0.0, "nothing is queued before it"
    leaving = make_status(num_running=2, num_prefilling=2, num_leaving=2)
    fleet.worker_stepped("d0", (), leaving)
    assert prefill_cost(worker(fleet, "d0"), Prompt(4000), 0).beside_s == 0.0, "none decodes here"


@given(num=st.integers(1, 40), num_tokens=st.integers(1, 20_000), slo_s=st.floats(0.011, 0.5))
def test_streams_to_come_delay_a_prompt_and_never_hasten_it(
    num: int, num_tokens: int, slo_s: float
) -> None:
    fleet = make_fleet(slo_s, "p0", "d0")
    alone = prefill_cost(worker(fleet, "d0"), Prompt(num_tokens), 0)
    fleet.worker_stepped("d0", (), make_status(num_running=num, num_prefilling=num))
    cost = prefill_cost(worker(fleet, "d0"), Prompt(num_tokens), 0)
    assert cost.own_s == pytest.approx(alone.own_s)
    assert cost.queue_s == alone.queue_s == 0.0
    assert cost.beside_s >= 0.0 == alone.beside_s
    assert cost.total_s == pytest.approx(cost.first_token_s + cost.delay_s)
    if slo_s > 0.2:  # a full chunk fits beside them: only their own part of the steps is added
        num_steps = -(-num_tokens // (CHUNK_TOKENS - num))
        assert cost.beside_s <= num_steps * worker(fleet, "d0").times.decode_step_s(num, 0)
