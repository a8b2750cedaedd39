"""What `GET /debug/fleet` shows: the fleet as one ingress sees it, or all ingresses, and an hour.

Everything comes from what is here already: the last report of each worker, and the counts of
`/metrics`. The history is a ring of samples in memory, so it ends with the ingress.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from disagg.api.http.metrics import ApiMetrics
from disagg.config import AUTO, ServeConfig
from disagg.ingress.fleet_metrics import MAX_PAIRS, WorkerReports, state_of
from disagg.messages import Role, WorkerRecord, WorkerStatus
from disagg.router.autoscale import ScalingDecision
from disagg.router.load_report import Demand
from disagg.time_model import StepFeatures, StepTimeModel

PERIOD_S = 5.0  # between two samples
NUM_SAMPLES = 720  # an hour
MAX_WORKERS = 64  # in a sample: of a larger fleet only the pools have a history


class ShownWorker(msgspec.Struct, frozen=True):
    """One worker as it last reported. What is not explained is in `WorkerStatus` or `WorkerRecord`.

    state: "serving" or "draining".
    kv_usage: the share of its KV blocks that requests or tickets use.
    step_s: seconds of its next decode step by its fitted time model; None before its first step.
    pulls: its KV transfers from other workers so far, by lane (`PullCounts`).
    """

    worker_id: str
    model: str
    role: Role
    state: str
    num_running: int
    num_prefilling: int
    num_waiting: int
    num_uncomputed_tokens: int
    num_context_tokens: int
    max_num_seqs: int
    kv_usage: float
    num_kv_blocks: int
    block_size: int
    num_holds: int
    num_preempted: int
    host_kv_nbytes: int
    step_s: float | None
    pulls: list[dict[str, Any]]


class ShownTransfers(msgspec.Struct, frozen=True):
    """KV transfers between two workers: rate and latency as fitted to recent ones."""

    source: str
    destination: str
    lane: str
    bytes_per_s: float
    latency_s: float


class ModelTotals(msgspec.Struct, frozen=True):
    """Counts of one model in this ingress since its start. Their differences over time are rates.

    num_tokens, tokens_s: tokens after the first one of each answer, and the seconds between them.
    num_first, first_s: first tokens, and the seconds until them.
    prefills: prompts by the place where they were computed, "remote" or "local".
    """

    num_requests: float = 0.0
    num_prompt_tokens: float = 0.0
    num_cached_tokens: float = 0.0
    num_tokens: float = 0.0
    tokens_s: float = 0.0
    num_first: float = 0.0
    first_s: float = 0.0
    slo_met: float = 0.0
    slo_missed: float = 0.0
    num_moves: float = 0.0
    prefills: dict[str, float] = {}


class ShownModel(msgspec.Struct, frozen=True):
    """A served model: its SLOs and its counts. Of a request for `auto`, its latencies count there,
    and the rest with the models that compute it."""

    name: str
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    num_queued: int
    totals: ModelTotals


class PoolSample(msgspec.Struct, frozen=True):
    """The sums over a pool's workers at one moment; `kv_usage` is their mean."""

    num_workers: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


class ModelSample(msgspec.Struct, frozen=True):
    """A model's rates and mean latencies since the sample before; None without a token."""

    requests_per_s: float
    tokens_per_s: float
    ttft_s: float | None
    tpot_s: float | None


class Sample(msgspec.Struct, frozen=True):
    """The fleet at one moment.

    pools: by the name of a deployment, "MODEL-ROLE".
    workers: of each worker its running requests and the share of its KV blocks that is used.
    kv_bytes_per_s: of all transfers between workers since the sample before.
    """

    unix_s: float
    models: dict[str, ModelSample]
    pools: dict[str, PoolSample]
    workers: dict[str, tuple[int, float]]
    kv_bytes_per_s: float


class ShownFleet(msgspec.Struct, frozen=True):
    """The response of `GET /debug/fleet`.

    scaling: the autoscaler's last decisions, oldest first.
    refused, failed: requests since the start of this ingress, by reason and by error code.
    history: samples after `?since=UNIX_SECONDS`, oldest first; none without it.
    """

    ingress: str
    unix_s: float
    models: list[ShownModel]
    workers: list[ShownWorker]
    transfers: list[ShownTransfers]
    refused: dict[str, float]
    failed: dict[str, float]
    history_period_s: float
    history: list[Sample]
    scaling: list[ScalingDecision] = []


class FleetState:
    """Shows the fleet, and samples it.

    Args:
        reports: returns the last report of each worker.
        num_queued: returns how many requests of each model wait in this ingress.
        now: returns Unix time in seconds.

    Attributes:
        scaling: the autoscaler's last decisions, which whoever runs the ingress sets.
    """

    def __init__(
        self,
        config: ServeConfig,
        ingress_id: str,
        metrics: ApiMetrics,
        demand: Demand,
        *,
        reports: Callable[[], WorkerReports],
        num_queued: Callable[[], Mapping[str, int]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._slo_s = {tier.name: (tier.ttft_slo_s, tier.tpot_slo_s) for tier in config.tiers}
        if config.cascade is not None:
            self._slo_s[AUTO] = None, None
        self._ingress_id = ingress_id
        self._metrics = metrics
        self._demand = demand
        self._reports = reports
        self._num_queued = num_queued
        self._now = now
        self.scaling: list[ScalingDecision] = []
        self._samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._last_s = now()
        self._last_totals = self._totals()
        self._last_nbytes: dict[str, int] = {}

    async def keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.sample()

    def show(self, since_unix_s: float | None) -> bytes:
        """The response of `GET /debug/fleet`; with samples after `since_unix_s`, if it is given."""
        totals, queued, reports = self._totals(), self._num_queued(), self._reports()
        since = math.inf if since_unix_s is None else since_unix_s
        refused = self._metrics.sums("request_refused", "reason")
        failed = self._metrics.sums("request_failure", "code")
        fleet = ShownFleet(
            self._ingress_id,
            self._now(),
            [
                ShownModel(name, *slo_s, queued.get(name, 0), totals[name])
                for name, slo_s in self._slo_s.items()
            ],
            [self._show_worker(record, status) for record, status in reports],
            _transfers(reports),
            {reason: number for (reason,), number in refused.items()},
            {code: number for (code,), number in failed.items()},
            PERIOD_S,
            [each for each in self._samples if each.unix_s > since],
            self.scaling,
        )
        return msgspec.json.encode(fleet)

    def sample(self) -> None:
        """Add a sample to the history."""
        now, totals, reports = self._now(), self._totals(), self._reports()
        seconds = max(1e-3, now - self._last_s)
        nbytes = {
            record.worker_id: sum(each.nbytes for each in status.pulls)
            for record, status in reports
        }
        moved = sum(
            max(0, number - self._last_nbytes.get(worker_id, number))
            for worker_id, number in nbytes.items()
        )
        models = {
            name: _rates(after, self._last_totals[name], seconds) for name, after in totals.items()
        }
        workers = {
            record.worker_id: (status.num_running, round(_kv_usage(record, status), 3))
            for record, status in reports[:MAX_WORKERS]
        }
        self._samples.append(Sample(now, models, _sum_pools(reports), workers, moved / seconds))
        self._last_s, self._last_totals, self._last_nbytes = now, totals, nbytes

    def _totals(self) -> dict[str, ModelTotals]:
        metrics = self._metrics
        slo = metrics.sums("request_slo", "model_name", "outcome")
        first_s = metrics.sums("time_to_first_token_seconds", "model_name", of="_sum")
        num_first = metrics.sums("time_to_first_token_seconds", "model_name", of="_count")
        moves = metrics.sums("request_moves", "model_name")
        prefills = metrics.sums("prefills", "model_name", "place")
        found = {}
        for name in self._slo_s:
            asked, gaps = self._demand.of(name), metrics.itl.of(name)
            found[name] = ModelTotals(
                asked.num_requests,
                asked.num_prompt_tokens,
                asked.num_cached_tokens,
                sum(gaps.counts),
                gaps.seconds,
                num_first.get((name,), 0.0),
                first_s.get((name,), 0.0),
                slo.get((name, "met"), 0.0),
                slo.get((name, "missed"), 0.0),
                moves.get((name,), 0.0),
                {place: number for (model, place), number in prefills.items() if model == name},
            )
        return found

    def _show_worker(self, record: WorkerRecord, status: WorkerStatus) -> ShownWorker:
        costs, step_s = status.step_costs, None
        if costs is not None and costs.num_observed:
            step = StepFeatures(0, 0.0, max(1, status.num_running), status.num_context_tokens)
            step_s = StepTimeModel.from_costs(costs).step_s(step)
        known = asdict(status) | asdict(record)
        known |= {
            "state": state_of(status),
            "kv_usage": _kv_usage(record, status),
            "num_kv_blocks": record.num_blocks,
            "host_kv_nbytes": status.host.nbytes if status.host is not None else 0,
            "step_s": step_s,
            "pulls": [asdict(each) for each in status.pulls],
        }
        return ShownWorker(**{name: known[name] for name in ShownWorker.__struct_fields__})


def _kv_usage(record: WorkerRecord, status: WorkerStatus) -> float:
    return 1.0 - status.num_free_blocks / record.num_blocks


def _transfers(reports: WorkerReports) -> list[ShownTransfers]:
    present = {record.worker_id for record, _ in reports}
    found = [
        ShownTransfers(
            each.source_id, record.worker_id, each.lane, each.bytes_per_s, each.latency_s
        )
        for record, status in reports
        for each in status.transfers
        if each.source_id in present
    ]
    return found[:MAX_PAIRS]


def _sum_pools(reports: WorkerReports) -> dict[str, PoolSample]:
    members: dict[str, list[tuple[WorkerRecord, WorkerStatus]]] = defaultdict(list)
    for record, status in reports:
        members[f"{record.model}-{record.role}"].append((record, status))
    return {
        name: PoolSample(
            len(pool),
            sum(status.num_running for _, status in pool),
            sum(status.num_waiting for _, status in pool),
            round(sum(_kv_usage(*each) for each in pool) / len(pool), 3),
        )
        for name, pool in members.items()
    }


def _rates(now: ModelTotals, before: ModelTotals, seconds: float) -> ModelSample:
    num_tokens, num_first = now.num_tokens - before.num_tokens, now.num_first - before.num_first
    return ModelSample(
        (now.num_requests - before.num_requests) / seconds,
        (num_tokens + num_first) / seconds,
        (now.first_s - before.first_s) / num_first if num_first else None,
        (now.tokens_s - before.tokens_s) / num_tokens if num_tokens else None,
    )


# Several ingresses


def add_fleets(shown: Sequence[bytes]) -> bytes:
    """Make one of the answers of several ingresses: workers once, counts added up.

    What all ingresses know alike is the first one's.
    """
    fleets = [msgspec.json.decode(each, type=ShownFleet) for each in shown]
    own, *others = fleets
    models = []
    for model in own.models:
        same = [each for fleet in fleets for each in fleet.models if each.name == model.name]
        num_queued = sum(each.num_queued for each in same)
        models.append(
            replace(model, num_queued=num_queued, totals=_add_totals([s.totals for s in same]))
        )
    refused, failed = _add(each.refused for each in fleets), _add(each.failed for each in fleets)
    history = [_add_sample(sample, [fleet.history for fleet in others]) for sample in own.history]
    return msgspec.json.encode(
        replace(own, models=models, refused=refused, failed=failed, history=history)
    )


def _add(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    numbers: Counter[str] = Counter()
    for each in counts:
        numbers.update(each)
    return dict(numbers)


def _add_totals(totals: Sequence[ModelTotals]) -> ModelTotals:
    numbers = [asdict(each) for each in totals]
    prefills = _add(each.pop("prefills") for each in numbers)
    return ModelTotals(**_add(numbers), prefills=prefills)


def _add_sample(sample: Sample, others: Iterable[Sequence[Sample]]) -> Sample:
    """A sample with the rates of other ingresses in the same period; some may be younger."""
    nearest = (min(each, key=lambda s: abs(s.unix_s - sample.unix_s)) for each in others if each)
    same = [sample, *(each for each in nearest if abs(each.unix_s - sample.unix_s) <= PERIOD_S)]
    models = {
        name: _add_rates([each.models[name] for each in same if name in each.models])
        for name in sample.models
    }
    return replace(sample, models=models)


def _add_rates(samples: Sequence[ModelSample]) -> ModelSample:
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
