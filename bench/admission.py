"""Plays rules of admission on made-up loads: goodput by rule and load, and whom ours refuses.

    python -m bench.admission [--loads batch completions] [--num-requests 400] [--tiny]

Four H100 workers, a TTFT SLO of ten mean prefills, two TPOT SLOs and two loads. Columns:

- `ours`: percent of all requests within both SLOs, mean of all splits into pools.
- `admit all`: the same router without refusals, the best split.
- `fixed`: workers that keep to their roles, the best split, with our refusals or without.
- `bound`: no rule can serve more in time. One machine as fast as all four, which knows all
  arrivals, fills its steps, computes no prefix twice and decodes in no time, serves so many.
- `refused`: of all requests, by ours. `long` is the share of these that are among the longest
  seventh of prompts, and `long work` what that seventh takes of all prompts' computing time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bench.report import finish, print_table
from bench.simulated import parse
from disagg.tools.sim import grid
from disagg.tools.sim.baselines import ADMIT_ALL, FIXED_ROLES, NO_REFUSALS, OURS
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.loads import make_load
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest

LOADS = (
    *("agents", "retrieval", "chat", "completions", "batch", "unequal", "mooncake-synthetic"),
    *("flood", "shift"),
)
NUM_WORKERS, TPOT_SLOS_S, SHARES = 4, (0.01, 0.03), (0.8, 1.1)
RULES = (OURS, ADMIT_ALL, FIXED_ROLES, NO_REFUSALS)


def rows_of(load: str, config: SimConfig, arguments: Any) -> list[dict[str, Any]]:
    window = grid.Window(make_load(load, 4.0, arguments.num_requests, config.seed), load)
    config = grid.with_ttft_slo(config, window.requests)
    slos_s, shares = (TPOT_SLOS_S[:1], SHARES[:1]) if arguments.tiny else (TPOT_SLOS_S, SHARES)
    cells = list(grid.cells(slos_s, shares, grid.splits(NUM_WORKERS), RULES))
    rows = []
    for row in grid.play_all(cells, config, window, arguments.processes):
        most = most_in_time(window.at_rate(row.requests_per_s, config.seed), config)
        ours, admit_all = fmean(row.by_split), max(row.others[ADMIT_ALL])
        rows.append(
            {
                "load": load,
                "TPOT ms": 1e3 * row.tpot_slo_s,
                "of saturation": row.load,
                "ours %": ours,
                "admit all %": admit_all,
                "fixed %": row.fixed,
                "bound %": 100.0 * most / len(window.requests),
                "of the best": ours / max(ours, admit_all, row.fixed),
                "refused %": row.refused_percent,
                "long %": row.long_refused_percent,
                "long work %": row.long_work_percent,
            }
        )
    return rows


def most_in_time(requests: Sequence[TraceRequest], config: SimConfig) -> int:
    """The most prompts that one machine as fast as all workers computes before their SLO.

    All have the same time from arrival to deadline, so they are computed in order of arrival; when
    one would be late, that one before it is left out without which the rest ends soonest (Kise,
    Ibaraki and Mine, 1978).
    """
    known: set[int] = set()
    kept: list[tuple[float, float]] = []  # arrival and seconds of work
    num_done = 0
    for each in requests:
        num_cached = TRACE_BLOCK_TOKENS * sum(name in known for name in each.block_names)
        known.update(each.block_names)
        num_new = max(1, each.num_prompt_tokens - num_cached)
        work_s = config.times.prompts_s(num_new, num_cached)
        work_s += config.times.prompt_step_s * num_new / config.max_num_batched_tokens
        work_s /= NUM_WORKERS
        if end_s(kept) <= each.arrival_s:  # what is done stays so, whatever comes
            num_done, kept = num_done + len(kept), []
        kept.append((each.arrival_s, work_s))
        if end_s(kept) > each.arrival_s + config.ttft_slo_s:
            without = [kept[:place] + kept[place + 1 :] for place in range(len(kept))]
            kept = min(without, key=end_s)
    return num_done + len(kept)


def end_s(jobs: Sequence[tuple[float, float]]) -> float:
    now = 0.0
    for arrival_s, work_s in jobs:
        now = max(now, arrival_s) + work_s
    return now


def main() -> None:
    arguments = parse("admission", __doc__, LOADS, num_requests=400, tiny=30)
    config = SimConfig(seed=arguments.seed)
    rows = [row for load in arguments.loads for row in rows_of(load, config, arguments)]
    print_table(rows)
    finish("admission", rows, simulated=True, least_share=min(row["of the best"] for row in rows))


if __name__ == "__main__":
    main()
