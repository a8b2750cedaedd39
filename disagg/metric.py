"""Declares a worker's metric beside its field in `WorkerStatus`.

    num_holds: Annotated[int, gauge("kv_holds", "KV tickets ...")] = 0

A new metric needs this line, and one that fills the field in. Must not import Prometheus, whose
client workers do not need.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """
    name: in Prometheus' spelling, without the `disagg_worker_` before it and the `_total` after.
    text: its HELP. Series of one name have one text.
    label: a name and a value, of a series that shares its name with others.
    """

    name: str
    text: str
    kind: Literal["counter", "gauge"]
    label: tuple[str, str] | None = None


def gauge(name: str, text: str) -> Metric:
    """A figure of now."""
    return Metric(name, text, "gauge")


def counter(name: str, text: str, *, outcome: str = "") -> Metric:
    """A figure that only grows while the worker lives."""
    return Metric(name, text, "counter", ("outcome", outcome) if outcome else None)
