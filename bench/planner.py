"""Published throughput beside what the planner predicts: `python -m bench.planner`

Nothing runs: both are figures of tables. Runs that a share in `planner/efficiency.py` was fitted to
are marked; the others say how well it predicts. `--fit` prints the shares that meet those runs.
"""

from __future__ import annotations

import argparse

import msgspec

from bench.report import finish, print_table
from disagg.planner.efficiency import MATMUL
from disagg.planner.published import RUNS, SOURCES, Run

NEAR = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planner", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="print the shares that fit best")
    parser.add_argument("--tiny", action="store_true", help="the same: it takes a second")
    arguments = parser.parse_args()
    rows = [row_of(run) for run in RUNS]
    print_table(rows)
    print()
    for name, source in SOURCES.items():
        print(f"{name}: {source}")
    if arguments.fit:
        print_table(
            [
                {"share of": " ".join(run.key), "fitted": fitted(run), "table": MATMUL[run.key]}
                for run in RUNS
                if run.is_fitted
            ]
        )
    held_out = [row for row in rows if row["held out"]]
    finish(
        "planner",
        rows,
        num_runs=len(rows),
        num_near=sum(map(is_near, rows)),
        num_held_out=len(held_out),
        num_held_out_near=sum(map(is_near, held_out)),
        near=NEAR,
    )


def row_of(run: Run) -> dict[str, str | float | bool]:
    predicted = run.predicted_tokens_per_s()
    return {
        "run": f"{run.engine} {run.model} {run.weights}",
        "GPUs": f"{run.num_gpus} x {run.gpu}",
        "in": run.num_in,
        "out": round(run.num_out),
        "counted": "all" if run.is_total else "answers",
        "published": run.tokens_per_s,
        "predicted": round(predicted),
        "ratio": round(predicted / run.tokens_per_s, 2),
        "held out": not run.is_fitted,
        "source": run.source,
    }


def is_near(row: dict[str, str | float | bool]) -> bool:
    return abs(float(row["ratio"]) - 1.0) <= NEAR


def fitted(run: Run) -> float:
    """The share with which the prediction is what was published."""
    placement = run.placement()
    low, high = 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        efficiency = msgspec.structs.replace(placement.efficiency, matmul=middle)
        tried = msgspec.structs.replace(placement, efficiency=efficiency)
        if run.predicted_tokens_per_s(tried) < run.tokens_per_s:
            low = middle
        else:
            high = middle
    return low


if __name__ == "__main__":
    main()
