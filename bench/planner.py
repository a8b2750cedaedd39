"""Compares published throughput with what the planner predicts: `python -m bench.planner`

Nothing runs: both figures come from tables. Runs to which a share in `capacity/efficiency.py` was
fitted are marked; the other runs show how well it predicts. `--fit` prints the shares that match
the marked runs. A second table has the step times with which a worker begins, as shares of the
roofline that they stand for.
"""

from __future__ import annotations

import argparse

import msgspec

from bench.published_runs import RUNS, SOURCES, Run
from bench.report import finish, print_table
from disagg.capacity.efficiency import MATMUL
from disagg.capacity.gpus import GPUS
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import SHAPES
from disagg.time_model import StepFeatures, attended

NEAR = 0.2
LINES = (("llama-3.1-8b", "h100"), ("llama-3.1-8b", "l40s"), ("qwen3-30b-a3b", "h200"))
CHUNKS = (64, 256, 512, 1024, 2048, 8192)
BATCHES = (1, 64, 256)
CONTEXT_TOKENS = 1000


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
    print()
    lines = [row for model, gpu in LINES for row in lines_of(model, gpu)]
    print_table(lines)
    held_out = [row for row in rows if row["held out"]]
    finish(
        "planner",
        rows,
        num_runs=len(rows),
        num_near=sum(map(is_near, rows)),
        num_held_out=len(held_out),
        num_held_out_near=sum(map(is_near, held_out)),
        near=NEAR,
        lines=lines,
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


def lines_of(model: str, gpu: str) -> list[dict[str, str | float]]:
    """Seconds of steps by the prior of a worker's time model, as shares of the roofline's."""
    worker = Placement(SHAPES[model], GPUS[gpu])
    lines = worker.time_model()
    prompts = {f"{num} prompt": StepFeatures(num, attended(num, 0)) for num in CHUNKS}
    decodes = {
        f"{num} decoding": StepFeatures(0, 0.0, num, num * CONTEXT_TOKENS) for num in BATCHES
    }
    return [
        {
            "lines": f"{model} {gpu}",
            "step": what,
            "ms": worker.step_s(step) * 1e3,
            "share": round(lines.step_s(step) / worker.step_s(step), 2),
        }
        for what, step in {**prompts, **decodes}.items()
    ]


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
