"""Costs are the sums that their documentation says, and grow with what makes people wait."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.messages import HostCounts, StepCosts, TransferFigure, WorkerRecord, WorkerStatus
from disagg.router.costs import (
    NUM_COMPUTED_AGAIN,
    PoolPressure,
    Prompt,
    decode_cost,
    prefill_cost,
    transfer_s,
)
from disagg.router.worker_pools import Side
from disagg.router.worker_view import RequestLoad, WorkerView
from disagg.time_model import CHUNK_TOKENS, StepTimeModel
from tests.router.fakes import COSTS, make_fleet, make_record, make_status


def view(worker_id: str = "d0", status: WorkerStatus | None = None, **changes: str) -> WorkerView:
    return view_of(make_record(worker_id, **changes), status or make_status())


def view_of(
    record: WorkerRecord,
    status: WorkerStatus,
    began_s: float = math.inf,
    tpot_slo_s: float = math.inf,
) -> WorkerView:
    times = StepTimeModel.from_costs(status.step_costs)
    return WorkerView.from_status(record, status, RequestLoad(), times, began_s, tpot_slo_s)


def test_held_tokens_are_not_computed_but_the_last_one_is() -> None:
    worker = view()
    half = prefill_cost(worker, Prompt(1024), 512)
    assert half.num_cached_tokens == 512
    assert half.first_token_s == pytest.approx(worker.times.prefill_s(512, 512))
    whole = prefill_cost(worker, Prompt(1024), 1024)
    assert whole.num_cached_tokens == 1023
    assert whole.first_token_s == pytest.approx(worker.times.prefill_s(1, 1023))


def test_tokens_in_host_memory_are_loaded_if_that_is_quicker() -> None:
    quick = view(status=make_status(host=HostCounts(latency_s=1e-3, block_s=1e-5)))
    cost = prefill_cost(quick, Prompt(1024), 512, num_in_host=768)
    assert cost.num_cached_tokens == 768
    rest_s = quick.times.prefill_s(256, 768)
    assert cost.own_s == pytest.approx(1e-3 + 16 * 1e-5 + rest_s)
    prompt = Prompt(1024)
    assert prefill_cost(quick, prompt, 512, num_in_host=1024).num_cached_tokens == 1023
    assert prefill_cost(quick, prompt, 512, num_in_host=256) == prefill_cost(quick, prompt, 512)
    slow = view(status=make_status(host=HostCounts(latency_s=1e-3, block_s=1.0)))
    assert prefill_cost(slow, prompt, 512, num_in_host=768) == prefill_cost(slow, prompt, 512)
    for worker, delays in ((quick, 256), (slow, 512)):
        decoding = prefill_cost(worker, Prompt(1024), 512, num_in_host=768)
        *_, per_prompt_step_s = worker.times.coefficients
        alone_s = worker.times.prompts_s(delays, 1024 - delays) + per_prompt_step_s
        assert decoding.delay_s == pytest.approx(alone_s), "nobody waits for what is loaded"


def test_a_queue_comes_first() -> None:
    busy = view(status=make_status(num_waiting=2, num_uncomputed_tokens=3000))
    step_s = busy.times.prompt_step_s
    cost = prefill_cost(busy, Prompt(50), 0)
    # 1,024 tokens in the step under way and in the next; 952 beside the own ones.
    assert cost.queue_s == pytest.approx(busy.times.prompts_s(3000, 0, 2) + 2 * step_s)
    assert cost.own_s == pytest.approx(busy.times.prefill_s(50))
    longer = prefill_cost(busy, Prompt(100), 0)  # of which 72 find room beside them
    assert longer.queue_s == pytest.approx(cost.queue_s + step_s)


@given(
    num_queued=st.integers(0, 5000),
    num_new=st.integers(1, 5000),
    num_waiting=st.integers(0, 5),
    num_decoding=st.sampled_from([0, 1, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2000]),
)
def test_a_prompt_waits_for_the_steps_before_it_played_one_by_one(
    num_queued: int, num_new: int, num_waiting: int, num_decoding: int
) -> None:
    num_context = 100 * num_decoding
    status = make_status(
        num_running=num_decoding,
        num_waiting=num_waiting,
        num_uncomputed_tokens=num_queued,
        num_context_tokens=num_context,
    )
    worker = view("p0", status)
    times, cost = worker.times, prefill_cost(worker, Prompt(num_new), 0)

    num_at_once = max(1, CHUNK_TOKENS - num_decoding)
    per_step_s, _, _, _, _, per_prompt_step_s = times.coefficients
    decode_s = times.decode_step_s(num_decoding, num_context)
    bare_s = (decode_s or per_step_s) + per_prompt_step_s
    queued_s = times.prompts_s(num_queued, 0, num_waiting)
    expected_s, num_left = queued_s + times.prompts_s(num_new), num_queued + num_new
    if num_queued or num_decoding:  # a step is under way, which the new prompt came too late for
        expected_s += bare_s if num_queued else decode_s
        num_left -= min(num_queued, num_at_once)
    while num_left > 0:
        expected_s += bare_s
        num_left -= num_at_once
    assert cost.first_token_s == pytest.approx(expected_s)


def test_the_step_under_way_is_waited_for_as_far_as_it_has_not_gone() -> None:
    status = make_status(num_running=3, num_context_tokens=3000)
    decoding = view_of(make_record("d0"), status, began_s=50.0)
    step_s = decoding.times.decode_step_s(3, 3000)
    own_s = decoding.times.prompts_s(100) + step_s + decoding.times.coefficients[5]
    for now, left_s in ((50.0, step_s), (50.0 + step_s / 4, 0.75 * step_s), (60.0, 0.0)):
        cost = prefill_cost(decoding, Prompt(100, now=now), 0)
        assert cost.own_s == pytest.approx(own_s + left_s)
        assert cost.queue_s == 0.0, "nobody waits before it"
    assert prefill_cost(view(status=status), Prompt(100, now=60.0), 0).own_s == pytest.approx(
        own_s + step_s
    ), "nobody knows when it began"


def test_no_more_than_the_step_under_way_can_be_over() -> None:
    status = make_status(num_waiting=1, num_uncomputed_tokens=1536)
    worker = view_of(make_record("d0"), status, began_s=0.0)
    later_s = worker.times.prompts_s(1536) / 3  # beside the own ones
    assert prefill_cost(worker, Prompt(100, now=99.0), 0).queue_s == pytest.approx(later_s)


def test_prefill_among_decodes_takes_longer_and_makes_each_of_them_wait() -> None:
    idle = view()
    few = view(status=make_status(num_running=2, num_context_tokens=2000))
    many = view(status=make_status(num_running=20, num_context_tokens=20_000))
    costs = [prefill_cost(worker, Prompt(1000), 0) for worker in (idle, few, many)]
    assert costs[0].first_token_s < costs[1].first_token_s < costs[2].first_token_s
    ride_s = 20 * many.times.coefficients[3] + 20_000 * many.times.coefficients[4]
    under_way_s = many.times.decode_step_s(20, 20_000)
    assert costs[2].first_token_s == pytest.approx(costs[0].first_token_s + under_way_s + ride_s)
    num_tokens = 4 * (CHUNK_TOKENS - 20)  # beside twenty that decode
    long = [prefill_cost(worker, Prompt(num_tokens), 0).first_token_s for worker in (idle, many)]
    assert long[1] == pytest.approx(long[0] + under_way_s + 4 * ride_s)
    own_s = idle.times.prefill_s(1000) - idle.times.coefficients[0]
    assert [cost.delay_s for cost in costs] == pytest.approx([own_s, 2 * own_s, 20 * own_s])


def test_a_decode_worker_is_kept_clear_even_when_idle() -> None:
    assert prefill_cost(view("p0"), Prompt(1000), 0).delay_s == 0.0
    assert prefill_cost(view("d0"), Prompt(1000), 0).delay_s > 0.0


def pressure(*workers: WorkerView, num_prompts: int = 0, **of_side: Any) -> PoolPressure:
    nothing = [0] * len(workers)
    side = Side(workers, nothing, nothing, (0, 0), num_prompts, len(workers))
    return PoolPressure.of(side._replace(**of_side), 0.0)


def test_those_who_come_behind_wait_for_what_is_computed() -> None:
    alone_s = view("p0").times.prefill_s(1000)
    busy = view("p1", make_status(num_waiting=2, num_uncomputed_tokens=3000))
    pool = [view("p0"), busy]
    for num_prompts, num_behind in ((0, 0.0), (busy.backlog.num_prompts, 3.0)):  # three on two
        cost = prefill_cost(view("p0"), Prompt(1000), 0, pressure(*pool, num_prompts=num_prompts))
        assert cost.delay_s == pytest.approx(num_behind * alone_s)


def test_a_second_of_a_slow_gpu_delays_those_behind_less() -> None:
    """By its share of what the pool computes; where there is a TPOT SLO, as only then it counts."""
    slow = StepCosts(tuple(3.0 * each for each in COSTS.coefficients), 100, 0.05)
    for tpot_slo_s, ratio in ((0.05, 1.0), (math.inf, 3.0)):
        fast_one, slow_one = pool = [
            view_of(make_record("p0"), make_status(step_costs=costs), tpot_slo_s=tpot_slo_s)
            for costs in (COSTS, slow)
        ]
        queue = pressure(*pool, num_prompts=4)
        fast_s, slow_s = (
            prefill_cost(each, Prompt(1000), 0, queue).delay_s for each in (fast_one, slow_one)
        )
        assert slow_s == pytest.approx(ratio * fast_s), "thrice as long alone"
        num_behind = [
            delay_s / each.times.prefill_s(1000)
            for delay_s, each in ((fast_s, fast_one), (slow_s, slow_one))
        ]
        assert sum(num_behind) == pytest.approx(2 * 4.0), "together as many as of equal GPUs"


def test_a_copy_of_a_prefix_costs_what_it_will_displace() -> None:
    alone_s = view("p0").times.prefill_s(1000)
    for num_held, held_once, copied in (
        (0, (0, 500), 0.5),
        (500, (0, 500), 0.0),
        (1000, (0, 1000), 0.0),
        (0, (400, 500), 0.1),  # the first 400 have two workers
    ):
        rare = pressure(view("p0"), held_once=held_once)
        cost = prefill_cost(view("p0"), Prompt(1000), num_held, rare)
        assert cost.delay_s == pytest.approx(copied * NUM_COMPUTED_AGAIN * alone_s)


def test_decode_counts_the_own_steps_and_the_batch_that_waits() -> None:
    alone = decode_cost(view(), 1000, 0, 100)
    crowded = decode_cost(
        view(status=make_status(num_running=30, num_context_tokens=30_000)), 1000, 0, 100
    )
    per_step, _, _, per_sequence, per_context, _ = view().times.coefficients
    added_s = per_sequence + 1050 * per_context
    step_s = per_step + 30 * per_sequence + 30_000 * per_context
    assert crowded.decode_s + crowded.delay_s == pytest.approx(100 * (step_s + 31 * added_s))
    assert alone.decode_s < crowded.decode_s and alone.delay_s < crowded.delay_s
    assert alone.place_s == crowded.place_s == 0.0


def test_a_worker_without_room_costs_the_wait_for_it() -> None:
    full = make_status(num_running=4, num_context_tokens=4000, num_free_blocks=10)
    step_s = view(status=full).times.decode_step_s(4, 4000)
    without = decode_cost(view(status=full), 1500, 0, 100, 200.0)
    num_ends = (1500 - (10 - 4) * 16) / (1000 - 100)  # 1,000 tokens each, of 200 long answers
    assert without.place_s == pytest.approx(num_ends * 200 * step_s / 4)
    assert decode_cost(view(status=full), 1500, 1500, 50).place_s == 0.0
    queued = make_status(num_running=4, num_context_tokens=4000, num_free_blocks=10, num_waiting=3)
    later = decode_cost(view(status=queued), 1500, 0, 100, 200.0)
    assert later.place_s == pytest.approx((num_ends + 3) * 200 * step_s / 4)


def test_a_full_batch_costs_the_wait_until_others_end() -> None:
    status = make_status(num_running=8, num_context_tokens=800, num_waiting=5)
    step_s = view(status=status).times.decode_step_s(8, 800)
    record = make_record("d0", max_num_seqs=8)
    full = view_of(record, status)
    assert decode_cost(full, 100, 0, 100).place_s == pytest.approx(6 * 128 * step_s / 8)
    larger = view_of(make_record("d0", max_num_seqs=14), status)
    assert decode_cost(larger, 100, 0, 100).place_s == 0.0


def test_transfers_are_priced_by_what_was_measured() -> None:
    source = view("p0")
    figure = TransferFigure("p0", 0.5, float(1 << 14))
    measured = view("d0", make_status(transfers=(figure,)))
    assert transfer_s(source, measured, 33) == pytest.approx(0.5 + 3)
    assert transfer_s(source, view("d1"), 33) < 0.1
    assert transfer_s(view("p1"), measured, 33) == pytest.approx(0.5 + 3)  # it is its network


def test_what_pulls_take_is_looked_up_once_until_it_is_measured_again() -> None:
    """A decision asks for many pairs, and a worker of a large fleet has measured many sources."""
    figures = tuple(TransferFigure(f"p{n}", 0.01 * n, 1e6 * (n + 1)) for n in range(64))
    fleet = make_fleet("d0")
    fleet.worker_stepped("d0", (), make_status(transfers=figures))
    pulls = fleet.view().workers["d0"].pulls
    usual_s = sum(each.latency_s + 5e5 / each.bytes_per_s for each in figures) / 64
    assert pulls.seconds("p7", 500_000) == pytest.approx(0.07 + 0.5 / 8)
    assert pulls.seconds("p99", 500_000) == pytest.approx(usual_s)
    fleet.worker_stepped("d0", (), make_status(transfers=figures, num_running=3))
    assert fleet.view().workers["d0"].pulls is pulls
    fleet.worker_stepped("d0", (), make_status(transfers=figures[:1]))
    assert fleet.view().workers["d0"].pulls.seconds("p7", 1_000_000) == pytest.approx(1.0)


def test_unequal_layouts_cannot_be_moved() -> None:
    assert transfer_s(view("p0", layout="another"), view("d0"), 16) == math.inf


def test_among_equals_a_worker_at_home_is_cheaper() -> None:
    """The ingress "a" knows that another one prefers the worker of "b"."""
    costs_s, nearly_cached_s = [], []
    for home in ("", "a", "b"):
        status = make_status(home_ingress=home)
        times = StepTimeModel.from_costs(status.step_costs)
        record = make_record("p0")
        worker = WorkerView.from_status(record, status, RequestLoad(), times, ingress_id="a")
        costs_s.append(prefill_cost(worker, Prompt(1000), 0).total_s)
        nearly_cached_s.append(prefill_cost(worker, Prompt(1000), 992).total_s)
    assert costs_s[0] == costs_s[1] < costs_s[2] < 1.2 * costs_s[1]
    assert nearly_cached_s[2] < 1.002 * nearly_cached_s[1], "it is chosen for what it has"
