"""Tell why a request was answered as it was: its routes in sentences, and a time line.

ID is that of the answer (chatcmpl-...). An ingress remembers its last 1,024 requests; a tenant sees
only its own.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from disagg.ingress.core import Explanation
from disagg.ingress.decisions import Decision, WorkerVisit
from disagg.tools.server import add_server_arguments, server_of
from disagg.tools.terminal import console, print_json, table

_WIDTH = 40  # of the time line, in characters


class Stage(NamedTuple):
    """A part of a request's life, measured on one worker or in the ingress."""

    name: str
    worker_id: str
    begin_unix_s: float
    end_unix_s: float

    @property
    def seconds(self) -> float:
        return self.end_unix_s - self.begin_unix_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="id of the answer, such as chatcmpl-...")
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print what the server answers")


def run(args: argparse.Namespace) -> int:
    server, path = server_of(args), f"/debug/requests/{args.id}"
    if args.json:
        print_json(server.ask(path))
    else:
        print_explanation(console(), server.ask_as(path, Explanation))
    return 0


def print_explanation(to: Console, explanation: Explanation) -> None:
    for sentence in sentences(explanation):
        to.print(escape(sentence))
    _print_candidates(to, explanation.routes[-1])
    _print_time_line(to, [s for each in explanation.routes for s in stages(each)])


def sentences(explanation: Explanation) -> Iterator[str]:
    """What was decided, and why, in the order in which it happened."""
    if explanation.cascade is not None:
        yield f"Small model first: {explanation.cascade.in_words()}."
    for number, decision in enumerate(explanation.routes):
        route, queued = decision.route, decision.queued
        if number:
            cause = decision.because or "another model took over"
            yield f"It went on elsewhere with {decision.num_tokens} tokens, because: {cause}"
        if queued is not None:
            yield (
                f"It waited {queued.waited_s:.3f} s in the admission queue, behind"
                f" {queued.num_before} others (predicted {queued.predicted_s:.3f} s)."
            )
        where = (
            f"{route.prefill} computes the prompt, {route.decode} the answer"
            if route.prefill is not None
            else f"{route.decode} computes the prompt and the answer"
        )
        pulls = f", after a cached prefix from {route.prefix_source}" if route.prefix_source else ""
        when = datetime.datetime.fromtimestamp(decision.unix_s, datetime.UTC)
        yield f"{when:%H:%M:%S.%f} {decision.model}: {where}{pulls}. Why: {route.reason}."
        yield (
            f"{route.num_cached_tokens} of its {decision.num_tokens} tokens were expected in the"
            f" cache, and the first token after {route.predicted_s:.3f} s; {_measured(decision)}."
        )
    measured = [s for each in explanation.routes for s in stages(each) if s.name != "decode"]
    if measured:
        longest = max(measured, key=lambda each: each.seconds)
        yield (
            f"Before its tokens followed each other, the longest was: {longest.name},"
            f" {longest.seconds:.3f} s on {longest.worker_id}."
        )


def _measured(decision: Decision) -> str:
    first = [v.first_token_unix_s for v in decision.visits if v.first_token_unix_s is not None]
    if first:
        return f"it came after {first[0] - decision.unix_s:.3f} s"
    return "none has come" if decision.visits else "it has not begun"


def stages(decision: Decision) -> Iterator[Stage]:
    """In order. Those of a worker end with its first token, as the ingress got it."""
    if decision.queued is not None:
        began_s = decision.unix_s - decision.queued.waited_s
        yield Stage("admission queue", "the ingress", began_s, decision.unix_s)
    for visit in decision.visits:
        yield from _stages_of(visit)


def _stages_of(visit: WorkerVisit) -> Iterator[Stage]:
    first_s, worker = visit.first_token_unix_s, visit.worker_id
    if first_s is None:
        return
    ends_s = first_s
    parts: list[Stage] = []
    nbytes = f" of {visit.pull_nbytes / 1e6:,.1f} MB" if visit.pull_nbytes else ""
    for name, seconds in (
        ("compute until its first token", visit.compute_s),
        (f"KV pull{nbytes}", visit.pull_s),
        ("worker's queue", visit.queue_s),
    ):
        if seconds:
            parts.append(Stage(name, worker, ends_s - seconds, ends_s))
            ends_s -= seconds
    yield from reversed(parts)
    if visit.ended_unix_s is not None and visit.num_tokens > 1:
        yield Stage("decode", worker, first_s, visit.ended_unix_s)


def _print_candidates(to: Console, decision: Decision) -> None:
    names = ("alone s", "wait s", "first token s", "cost s", "cached")
    rows = table("<", "<prefill", "<decode", *names)
    for each in decision.route.candidates:
        seconds = (each.own_s, each.wait_s, each.first_token_s, each.total_s)
        rows.add_row(
            "*" if each == decision.route.chosen else "",
            each.prefill or "(the same)",
            each.decode,
            *(f"{value:.4f}" for value in seconds),
            f"{each.num_cached_tokens:,}",
        )
    to.print(rows)


def _print_time_line(to: Console, line: Sequence[Stage]) -> None:
    if not line:
        return
    begin_s, end_s = min(s.begin_unix_s for s in line), max(s.end_unix_s for s in line)
    scale = _WIDTH / max(end_s - begin_s, 1e-9)
    rows = table("at s", "took s", "<", "<", "<")
    for each in line:
        before = round((each.begin_unix_s - begin_s) * scale)
        length = max(1, round(each.seconds * scale))
        rows.add_row(
            f"{each.begin_unix_s - begin_s:.4f}",
            f"{each.seconds:.4f}",
            " " * min(before, _WIDTH - 1) + "#" * min(length, _WIDTH - min(before, _WIDTH - 1)),
            each.name,
            each.worker_id,
        )
    to.print(rows)
