"""What `disagg bench` prints for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from disagg.tools.bench.result import (
    LATE_S,
    METRICS,
    QUANTILES,
    BenchResult,
    Difference,
)
from disagg.tools.bench.slo_search import Attained, HighestRate
from disagg.tools.terminal import table

BUSY_PERCENT = 80.0  # of a core: then the generator may be what is measured


def print_result(to: Console, result: BenchResult) -> None:
    figures = result.figures
    num = len(result.requests)
    to.print(
        f"{figures['completed']:g} of {num} requests answered in {result.duration:.2f} s by"
        f" {result.model}{' (stopped)' if result.was_stopped else ''}:"
        f" {shown(figures['request_throughput'])} requests/s,"
        f" {shown(figures['output_throughput'])} output tokens/s,"
        f" {shown(figures['total_token_throughput'])} tokens/s with prompts"
        f" ({figures['total_input_tokens']:,.0f} tokens in,"
        f" {figures['total_cached_tokens']:,.0f} of them cached,"
        f" {figures['total_output_tokens']:,.0f} out).",
        markup=False,
    )
    rows = table("<ms", "mean", *QUANTILES, "max")
    for metric in (*METRICS, "itl"):
        values = [figures[f"{name}_{metric}_ms"] for name in ("mean", *QUANTILES, "max")]
        rows.add_row(metric.upper(), *(f"{value:,.2f}" for value in values))
    to.print(rows)
    if result.slos:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in result.slos.items())
        to.print(
            f"{result.num_in_time} of {num} within {limits}: goodput"
            f" {shown(figures['request_goodput'])} requests/s."
        )
    messages = {each.error: each.message for each in reversed(result.requests) if each.error}
    for kind, count in sorted(result.errors.items()):
        to.print(f"{count} failed: {kind}: {messages[kind]}", markup=False, style="red")
    for warning in warnings(result):
        to.print(warning, style="yellow")


def warnings(result: BenchResult) -> list[str]:
    """What makes the figures less than they seem."""
    found = []
    if result.num_late:
        found.append(
            f"{result.num_late} requests were sent more than {1e3 * LATE_S:g} ms after they were"
            f" due, at most {shown(result.figures['max_send_lag_ms'])} ms: their latencies count"
            " from when they were due."
        )
    if result.cpu_percent > BUSY_PERCENT:
        found.append(
            f"The generator took {result.cpu_percent:.0f} % of a core and may be what was measured;"
            " send less, or divide the load among several machines."
        )
    return found


def print_differences(to: Console, names: Sequence[str], rows: Sequence[Difference]) -> None:
    shown_rows = table("<", *names, "change", "<")
    words = {True: "differs", False: "within noise", None: ""}
    for row in rows:
        change = f"{row.percent:+.1f} %" if row.percent is not None else ""
        values = (shown(row.before), shown(row.after))
        shown_rows.add_row(row.name, *values, change, words[row.is_clear])
    to.print(shown_rows)
    to.print(
        "differs: the 95 % intervals of the two do not overlap. Requests of one run are not quite"
        " independent, so repeat a run before you rely on a small difference."
    )


def print_search(to: Console, share: float, found: HighestRate) -> None:
    if found.holds is None:
        to.print(f"No rate held; at the lowest, {_attained(found.steps[-1])}.")
        return
    to.print(
        f"{shown(found.holds.rate)} requests/s held, where {share:.0%} of the requests had to be in"
        f" time: {_attained(found.holds)}."
    )
    if found.fails is not None:
        to.print(f"{shown(found.fails.rate)} requests/s did not: {_attained(found.fails)}.")


def _attained(step: Attained) -> str:
    low, high = step.interval
    return (
        f"{step.num_in_time} of {step.num_requests} ({step.share:.1%}; {low:.1%} to {high:.1%} with"
        " 95 % confidence)"
    )


def shown(value: float | None) -> str:
    """A figure with three digits or all of its whole ones."""
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
