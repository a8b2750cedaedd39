"""`GET /debug/fleet` of several ingresses as one answer: workers once, counts added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from disagg.ingress.fleet_state import PERIOD_S, ModelSample, ModelTotals, Sample, ShownFleet

replace = msgspec.structs.replace


def fleets_added(shown: Sequence[bytes]) -> bytes:
    """Add up answers to `GET /debug/fleet`; what all ingresses know alike is the first one's."""
    own, *others = (msgspec.json.decode(each, type=ShownFleet) for each in shown)
    beside = [{model.name: model for model in each.models} for each in others]
    models = []
    for model in own.models:
        same = [model, *(each[model.name] for each in beside if model.name in each)]
        num_queued = sum(each.num_queued for each in same)
        totals = _totals_added([each.totals for each in same])
        models.append(replace(model, num_queued=num_queued, totals=totals))
    history = []
    for sample in own.history:
        near = [_nearest(each.history, sample.unix_s) for each in others]
        history.append(_with_rates_of(sample, [each for each in near if each is not None]))
    refused = _added(each.refused for each in (own, *others))
    failed = _added(each.failed for each in (own, *others))
    return msgspec.json.encode(
        replace(own, models=models, refused=refused, failed=failed, history=history)
    )


def _added(counts: Iterable[dict[str, float]]) -> dict[str, float]:
    numbers: Counter[str] = Counter()
    for each in counts:
        numbers.update(each)
    return dict(numbers)


def _totals_added(totals: Sequence[ModelTotals]) -> ModelTotals:
    names = [name for name in ModelTotals.__struct_fields__ if name != "prefills"]
    numbers = {name: sum(getattr(each, name) for each in totals) for name in names}
    return ModelTotals(**numbers, prefills=_added(each.prefills for each in totals))


def _nearest(history: Sequence[Sample], unix_s: float) -> Sample | None:
    """The sample of the same period; None if there is none, as another ingress is younger."""
    found = min(history, key=lambda each: abs(each.unix_s - unix_s), default=None)
    return found if found is not None and abs(found.unix_s - unix_s) <= PERIOD_S else None


def _with_rates_of(sample: Sample, others: Sequence[Sample]) -> Sample:
    models = {
        name: _rates_added([own, *(each.models[name] for each in others if name in each.models)])
        for name, own in sample.models.items()
    }
    return replace(sample, models=models)


def _rates_added(samples: Sequence[ModelSample]) -> ModelSample:
    return ModelSample(
        sum(each.requests_per_s for each in samples),
        sum(each.tokens_per_s for each in samples),
        _mean((each.ttft_s, each.requests_per_s) for each in samples),
        _mean((each.tpot_s, each.tokens_per_s) for each in samples),
    )


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(seconds, weight) for seconds, weight in weighted if seconds is not None]
    if not known:
        return None
    weights = sum(weight for _, weight in known) or 1.0
    return sum(seconds * weight for seconds, weight in known) / weights
