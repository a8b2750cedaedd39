"""Prints published runs of engines beside the planner's predictions of them.

    python -m bench.planner [--only vllm]

A ratio is predicted over published. Held out are the runs that no efficiency was fitted to.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.report import finish, print_table
from tests.tools.plan.published_runs import RUNS, Run


def compared(run: Run) -> dict[str, Any]:
    predicted = run.predicted_tokens_per_s()
    return {
        "engine": run.engine,
        "model": run.model,
        "weights": run.weights,
        "GPUs": f"{run.num_gpus} x {run.gpu}",
        "tokens in, out": f"{run.num_in:,}, {run.num_out:,g}",
        "published tokens/s": run.tokens_per_s,
        "predicted": predicted,
        "ratio": predicted / run.tokens_per_s,
        "fitted": run.is_fitted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="ENGINE")
    parser.add_argument("--tiny", action="store_true", help="the same: it takes a second")
    only = parser.parse_args().only
    rows = [compared(run) for run in RUNS if only in run.engine]
    ratios = [row["ratio"] for row in rows if not row["fitted"]]
    near = sum(abs(ratio - 1.0) <= 0.2 for ratio in ratios)
    print_table(rows)
    print(f"{near} of {len(ratios)} runs that were held out are predicted within 20 %.")
    finish("planner", rows, held_out=len(ratios), near=near)


if __name__ == "__main__":
    main()
