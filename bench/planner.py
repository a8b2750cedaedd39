"""Prints published runs of engines beside the planner's predictions of them; one JSON line last.

    python -m bench.planner [--only vllm]

A ratio is predicted over published. Held out are the runs that no efficiency was fitted to.
"""

from __future__ import annotations

import argparse
import json

from tests.tools.plan.published_runs import RUNS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose line contains this")
    only = parser.parse_args().only
    rows = []
    for run in RUNS:
        name = (
            f"{run.engine} {run.model} {run.weights}, {run.num_gpus} x {run.gpu},"
            f" {run.num_in:,}/{run.num_out:,g}"
        )
        if only in name:
            predicted = run.predicted_tokens_per_s()
            rows.append((name, run.tokens_per_s, predicted, run.is_fitted))
            fitted = " (fitted)" if run.is_fitted else ""
            ratio = predicted / run.tokens_per_s
            print(f"{name:66} {run.tokens_per_s:9,.0f} {predicted:9,.0f} {ratio:5.2f}{fitted}")
    ratios = [predicted / published for _, published, predicted, fitted in rows if not fitted]
    near = sum(abs(ratio - 1.0) <= 0.2 for ratio in ratios)
    print(f"{near} of {len(ratios)} runs that were held out are predicted within 20 %.")
    print(json.dumps({"bench": "planner", "runs": rows, "held_out": len(ratios), "near": near}))


if __name__ == "__main__":
    main()
