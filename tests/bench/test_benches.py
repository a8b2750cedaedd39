"""Every bench still runs: a rehearsal of each ends with a line of JSON that has its figures.

`serving_path`, `first_minute`, `peers.serving` and `peers.pair` have no rehearsal here: they start
Ray clusters, as tests/e2e does already, and their parts (workers, servers, clients) are tested
without one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
# Tiles of the longest program, in each step of Llama-3-70B on a rank of 8.
LONGEST = (4, 8, 16, 157, 128, 16, 7)


def rehearse(*arguments: str, **environment: str) -> Any:
    """The last line of a bench, parsed."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)  # a dozen processes that import torch, Ray and transformers
def test_named_benches_run_one_after_another() -> None:
    names = [
        "attention_cut",
        "cascade",
        "cold_start",
        "eviction",
        "formats",
        "host_step",
        "planner",
        "routing",
        "peers",
        "speculation",
    ]
    results = rehearse("bench", *names, "--tiny")
    assert list(results) == names
    cuts = results["attention_cut"]["rows"]
    assert all(row["longest"] <= most for row, most in zip(cuts, LONGEST, strict=True)), cuts
    costs = {row["way"]: row["tokens x parameters"] for row in results["cascade"]["rows"]}
    assert costs["small"] < costs["large"] == 100 < costs["deferral 0"]
    (start,) = results["cold_start"]["rows"]
    phases = [seconds for name, seconds in start.items() if name.endswith(" s")]
    assert min(phases) > 0 and max(phases) == start["decision to first token s"]
    everything, *parts = results["eviction"]["rows"]
    assert everything["moved"] == 1 > max(row["moved"] for row in parts)
    assert everything["perplexity"] < min(row["perplexity"] for row in parts)
    of = {tuple(row.values())[:3]: row for row in results["formats"]["rows"]}
    losses = [of[name, "floats", "float32"]["KL"] for name in ("floats", "int8", "fp8", "nvfp4")]
    assert losses == sorted(losses) and losses[0] == 0.0
    assert results["planner"]["held_out"] > results["planner"]["near"] > 0
    assert all(row["together us"] > 0 for row in results["host_step"]["rows"])
    assert all(row["p99 us"] >= row["p50 us"] > 0 for row in results["routing"]["rows"])
    beside = results["peers"]
    cases = [row["case"] for row in beside["rows"]]
    assert cases == ["prefill", "1 at once", "8 at once", "32 at once"]
    ours_and_transformers = {"disagg", "disagg auto", "generate", "continuous"}
    assert {row["engine"] for row in beside["engines"]} == ours_and_transformers
    assert all(row["RSS MB"] > 0 and row["absent"] is None for row in beside["engines"])
    assert all(min(row[name] for name in ours_and_transformers) > 0 for row in beside["rows"])
    drafted = {row["text"]: row for row in results["speculation"]["rows"]}
    assert drafted["copy"]["ngram tokens"] > 1 and min(drafted["random"]["ngram counted"]) > 0


def test_benches_of_simulated_fleets_end_with_their_figures() -> None:
    names = ["admission", "sessions", "autoscale"]
    results = rehearse("bench", *names, "--tiny")
    assert list(results) == names
    (admitted,) = results["admission"]["rows"]
    assert admitted["bound %"] >= max(admitted[f"{rule} %"] for rule in ("ours", "admit all"))
    assert admitted["of the best"] == results["admission"]["least_share"] > 0
    (session,) = results["sessions"]["rows"]
    assert session["hits %"] > 0 and session["TTFT p95 s"] >= session["TTFT p50 s"] > 0
    (scaled,) = results["autoscale"]["rows"]
    assert scaled["worker h"] > 0 and 0 < scaled["in time %"] <= 100


def test_an_unknown_bench_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "nonsense"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode != 0
    assert "nonsense" in done.stderr and "serving_path" in done.stderr
