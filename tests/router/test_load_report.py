"""Numbers out, the same facts in; several ingresses add up to one load."""

from __future__ import annotations

from disagg.messages import StepCosts
from disagg.router.load_report import (
    Demand,
    PoolState,
    RequestTotals,
    read_pool_state,
    read_totals,
    report,
    sum_pools,
)
from disagg.time_model import StepTimeModel
from tests.router.fakes import make_record, make_status

COSTS = StepCosts((0.01, 0.0001, 1e-9, 0.0001, 1e-8, 0.005), 50, 0.1)
OLDER = StepCosts((1.0,) * 6, 3, 0.5)


def reports() -> list[tuple[object, object]]:
    return [
        (make_record("p0"), make_status(num_uncomputed_tokens=700, step_costs=OLDER)),
        (make_record("p1"), make_status(num_uncomputed_tokens=300, step_costs=COSTS)),
        (make_record("d0", max_num_seqs=8), make_status(num_running=3, num_context_tokens=90)),
    ]


def test_workers_are_summed_up_by_pool() -> None:
    states = sum_pools(reports())  # type: ignore[arg-type]
    prefill, decode = states["toy", "prefill"], states["toy", "decode"]
    assert prefill == PoolState(2, StepTimeModel.from_costs(COSTS), 1000, 0, 0, 0, 16000)
    assert (decode.num_workers, decode.num_decoding, decode.num_context_tokens) == (1, 3, 90)
    assert (decode.max_num_seqs, decode.num_kv_tokens) == (8, 16000)


def test_a_report_says_what_it_was_made_of() -> None:
    demand = Demand()
    demand.arrived("toy", 100, 20.0)
    demand.hit("toy", 64)
    states = sum_pools(reports())  # type: ignore[arg-type]
    said = report(demand, {"toy": 0, "idle": 0}, states)
    assert all(isinstance(value, float) for value in said.values())
    assert read_totals(said, "toy") == RequestTotals(1.0, 100.0, 64.0, 20.0, 100.0**2)
    assert read_totals(said, "idle") == RequestTotals()
    for (model, role), state in states.items():
        expected = PoolState(
            0,
            state.times,
            state.num_queued_tokens,
            state.num_decoding,
            state.num_context_tokens,
            state.max_num_seqs,
            state.num_kv_tokens,
        )
        assert read_pool_state([{}, said], model, role) == expected


def test_prompts_that_wait_in_ingresses_add_up_and_those_on_workers_count_once() -> None:
    states = sum_pools(reports())  # type: ignore[arg-type]
    said = [report(Demand(), {"toy": number}, states) for number in (50, 7)]
    assert read_pool_state(said, "toy", "prefill").num_queued_tokens == 1000 + 57
    assert read_pool_state(said, "toy", "decode").num_queued_tokens == 57


def test_a_pool_of_which_nobody_says_anything_is_unknown() -> None:
    assert read_pool_state([], "toy", "prefill") == PoolState()
