"""Each worker has one home among the ingresses, and they share the workers."""

from __future__ import annotations

from collections import Counter

from disagg.links.server import choose_home

WORKERS = [f"worker-{number}" for number in range(400)]
INGRESSES = ["a", "b", "c", "d"]


def test_ingresses_share_the_workers_about_evenly() -> None:
    counts = Counter(choose_home(worker, INGRESSES) for worker in WORKERS)
    assert set(counts) == set(INGRESSES) and min(counts.values()) > 70


def test_an_ingress_that_goes_moves_only_its_own() -> None:
    before = {worker: choose_home(worker, INGRESSES) for worker in WORKERS}
    after = {worker: choose_home(worker, ["d", "b", "a"]) for worker in WORKERS}
    assert {before[worker] for worker in WORKERS if before[worker] != after[worker]} == {"c"}


def test_a_single_ingress_has_no_share() -> None:
    assert (
        choose_home("worker", ["a"])
        == choose_home("worker", ["a", "a"])
        == choose_home("worker", [])
        == ""
    )
