"""An ingress's load report for the autoscaler, as numbers by name: Serve carries nothing else.

By tier: requests so far, and prompts that wait in the ingress. By pool: step times and load of the
workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from disagg.messages import Role
from disagg.router.demand import Demand, RequestTotals
from disagg.router.pool_state import PoolState
from disagg.router.worker_view import Pool
from disagg.time_model import NUM_STEP_FEATURES, StepTimeModel

_LOAD_FIELDS = ("num_queued_tokens", "num_decoding", "num_context_tokens")
_ROOM_FIELDS = ("max_num_seqs", "num_kv_tokens")


def report(
    demand: Demand, num_waiting_tokens: Mapping[str, int], states: Mapping[Pool, PoolState]
) -> dict[str, float]:
    """The report of one ingress.

    Args:
        num_waiting_tokens: of all tiers, uncomputed tokens of the prompts that wait in it.
    """
    said: dict[str, float] = {}
    for model, num_tokens in num_waiting_tokens.items():
        said[f"waiting/{model}/num_tokens"] = float(num_tokens)
        for name, value in demand.of(model)._asdict().items():
            said[f"asked/{model}/{name}"] = float(value)
    for (model, role), state in states.items():
        for field in (*_LOAD_FIELDS, *_ROOM_FIELDS):
            said[f"{role}/{model}/{field}"] = float(getattr(state, field))
        if state.times is not None:
            for number, seconds in enumerate(state.times.coefficients):
                said[f"{role}/{model}/times{number}"] = seconds
    return said


def asked_in(said: Mapping[str, float], model: str) -> RequestTotals:
    return RequestTotals(
        *(said.get(f"asked/{model}/{field}", 0.0) for field in RequestTotals._fields)
    )


def state_in(reports: Iterable[Mapping[str, float]], model: str, role: Role) -> PoolState:
    """The pools' states from the reports of all ingresses.

    Every ingress gets the reports of all workers, so the largest figure is the most recent. Waiting
    prompts of the ingresses are added up, and count for both pools.
    """
    found = list(reports)

    def most(field: str) -> float:
        return max((each.get(f"{role}/{model}/{field}", 0.0) for each in found), default=0.0)

    times = None
    for each in found:
        values = [each.get(f"{role}/{model}/times{n}") for n in range(NUM_STEP_FEATURES)]
        if None not in values:
            times = StepTimeModel(tuple(value for value in values if value is not None))
    queued, decoding, num_context = map(most, _LOAD_FIELDS)
    queued += sum(each.get(f"waiting/{model}/num_tokens", 0.0) for each in found)
    seqs, kv_tokens = (int(most(field)) for field in _ROOM_FIELDS)
    return PoolState(0, times, queued, decoding, num_context, seqs, kv_tokens)
