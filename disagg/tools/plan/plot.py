"""Charts of `disagg plan --plot`: speed of a worker by batch size, and cost by load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from disagg.capacity.roofline import Placement
from disagg.tools.chart import Chart
from disagg.tools.plan.load import Slo, Workload
from disagg.tools.plan.report import PREDICTED, usd_per_million
from disagg.tools.plan.sizing import MAX_BATCH, FleetPlan, Prices, colocated, disaggregated

NUM_BATCHES = 24
LOADS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)  # as factors of the given rate


def worker_charts(load: Workload, every: Sequence[Placement]) -> list[Chart]:
    """Time per token and tokens per second of each placement, by number of sequences."""

    def lines(value: Callable[[int, float], float]) -> dict[str, list[tuple[float, float]]]:
        return {
            f"{each.num_gpus} x {each.gpu.name}": [
                (batch, value(batch, each.decode_step_s(batch, load.decode_tokens)))
                for batch in _batches(each, load)
            ]
            for each in every
        }

    suffix = f"by sequences of {load.decode_tokens:,.0f} tokens in a step; {PREDICTED}"
    return [
        Chart(f"ms per token {suffix}", lines(lambda batch, step_s: step_s * 1e3)),
        Chart(f"Tokens/s of a worker {suffix}", lines(lambda batch, step_s: batch / step_s)),
    ]


def cost_chart(
    load: Workload, slo: Slo, every: Sequence[Placement], link_bytes_per_s: float, prices: Prices
) -> Chart | None:
    """Cost of both kinds of fleet by load; None if neither meets the SLOs at any load."""
    loads = [msgspec.structs.replace(load, requests_per_s=load.requests_per_s * x) for x in LOADS]

    def line(fleet: Callable[[Workload], FleetPlan | None]) -> list[tuple[float, float]]:
        fleets = ((each, fleet(each)) for each in loads)
        return [
            (each.requests_per_s, usd_per_million(found, each)["output"])
            for each, found in fleets
            if found is not None
        ]

    lines = {
        "apart": line(lambda load: disaggregated(load, slo, every, link_bytes_per_s, prices)),
        "together": line(lambda load: colocated(load, slo, every, prices)),
    }
    lines = {name: points for name, points in lines.items() if points}
    title = f"US dollars per million tokens of answers by requests/s; {PREDICTED}"
    return Chart(title, lines, x_unit="/s") if lines else None


def _batches(each: Placement, load: Workload) -> Iterator[int]:
    most = max(1, min(MAX_BATCH, int(each.num_kv_tokens / load.decode_tokens)))
    yield from sorted({max(1, most * part // NUM_BATCHES) for part in range(NUM_BATCHES + 1)})
