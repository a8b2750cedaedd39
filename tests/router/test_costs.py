"""Costs are the sums that their documentation says, and grow with what makes people wait."""

from __future__ import annotations

import math

import pytest

from disagg.messages import TransferFigure, WorkerStatus
from disagg.router.costs import decode_cost, prefill_cost, transfer_s
from disagg.router.fleet import Load, WorkerView
from tests.router.fakes import make_record, make_status


def view(worker_id: str = "d0", status: WorkerStatus | None = None, **changes: str) -> WorkerView:
    return WorkerView.of(make_record(worker_id, **changes), status or make_status(), Load())


def test_an_idle_workers_prefill_is_what_its_model_says() -> None:
    worker = view("p0")
    cost = prefill_cost(worker, 1000, 0)
    assert cost.first_token_s == pytest.approx(worker.times.prefill_s(1000))
    assert cost.harm_s == 0.0
    assert cost.total_s == cost.first_token_s


def test_held_tokens_are_not_computed_but_the_last_one_is() -> None:
    worker = view()
    half = prefill_cost(worker, 1024, 512)
    assert half.num_cached_tokens == 512
    assert half.first_token_s == pytest.approx(worker.times.prefill_s(512, 512))
    whole = prefill_cost(worker, 1024, 1024)
    assert whole.num_cached_tokens == 1023
    assert whole.first_token_s == pytest.approx(worker.times.prefill_s(1, 1023))


def test_a_queue_comes_first() -> None:
    busy = view(status=make_status(num_waiting=2, num_uncomputed_tokens=3000))
    wait_s = busy.times.prefill_s(3000, 0, 2)
    own_s = busy.times.prefill_s(100)
    assert prefill_cost(busy, 100, 0).first_token_s == pytest.approx(wait_s + own_s)


def test_prefill_among_decodes_takes_longer_and_makes_each_of_them_wait() -> None:
    idle = view()
    few = view(status=make_status(num_running=2, num_context_tokens=2000))
    many = view(status=make_status(num_running=20, num_context_tokens=20_000))
    costs = [prefill_cost(worker, 1000, 0) for worker in (idle, few, many)]
    assert costs[0].first_token_s < costs[1].first_token_s < costs[2].first_token_s
    ride_s = 20 * many.times.coefficients[3] + 20_000 * many.times.coefficients[4]
    assert costs[2].first_token_s == pytest.approx(costs[0].first_token_s + ride_s)
    long = [prefill_cost(worker, 4096, 0).first_token_s for worker in (idle, many)]
    assert long[1] == pytest.approx(long[0] + 4 * ride_s)  # in each of four chunks
    own_s = idle.times.prefill_s(1000) - idle.times.coefficients[0]
    assert [cost.harm_s for cost in costs] == pytest.approx([own_s, 2 * own_s, 20 * own_s])


def test_a_decode_worker_is_kept_clear_even_when_idle() -> None:
    assert prefill_cost(view("p0"), 1000, 0).harm_s == 0.0
    assert prefill_cost(view("d0"), 1000, 0).harm_s > 0.0


def test_decode_counts_the_own_steps_and_the_batch_that_waits() -> None:
    alone = decode_cost(view(), 1000, 0, 100)
    crowded = decode_cost(
        view(status=make_status(num_running=30, num_context_tokens=30_000)), 1000, 0, 100
    )
    per_step, _, _, per_sequence, per_context = view().times.coefficients
    added_s = per_sequence + 1050 * per_context
    step_s = per_step + 30 * per_sequence + 30_000 * per_context
    assert crowded.total_s == pytest.approx(100 * (step_s + 31 * added_s))
    assert alone.total_s < crowded.total_s


def test_a_worker_without_room_costs_the_wait_for_it() -> None:
    status = make_status(num_running=4, num_context_tokens=4000)
    full = make_status(num_running=4, num_context_tokens=4000, num_free_blocks=10)
    with_room = decode_cost(view(status=status), 1000, 0, 100)
    without = decode_cost(view(status=full), 1000, 0, 100)
    held = decode_cost(view(status=full), 1000, 1000, 50)
    assert without.total_s > 2 * with_room.total_s
    assert held.total_s < with_room.total_s


def test_transfers_are_priced_by_what_was_measured() -> None:
    source = view("p0")
    figure = TransferFigure("p0", 0.5, float(1 << 14))
    measured = view("d0", make_status(transfers=(figure,)))
    assert transfer_s(source, measured, 33) == pytest.approx(0.5 + 3)
    assert transfer_s(source, view("d1"), 33) < 0.1


def test_unequal_layouts_cannot_be_moved() -> None:
    assert transfer_s(view("p0", layout="another"), view("d0"), 16) == math.inf
