from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from disagg.api.http.metrics import TokenLatency

BOUNDS = (0.01, 0.25, 1.0)


def test_it_shows_what_the_client_library_would() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as `metrics.py` does
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    labels = ["model_name"]
    histogram = Histogram("a_seconds", "Words", labels, buckets=BOUNDS, registry=theirs)
    latency = TokenLatency("a_seconds", "Words", BOUNDS)
    ours.register(latency)
    assert generate_latest(ours) == generate_latest(theirs)
    for model, seconds in (("b", 0.0), ("b", 0.01), ("b", 0.0101), ("c", 1.0), ("c", 7.0)):
        histogram.labels(model).observe(seconds)
        latency.of(model).observe(seconds)
    histogram.labels("silent")
    latency.of("silent")
    assert generate_latest(ours) == generate_latest(theirs)
