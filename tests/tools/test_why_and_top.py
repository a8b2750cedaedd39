"""`disagg why` and `disagg top` of a whole fleet, and of what a fleet seldom does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from disagg.cli.main import main
from disagg.ingress.admission_queue import Queued
from disagg.ingress.core import Explanation
from disagg.ingress.decisions import Decision, WorkerVisit
from disagg.router.cascade import Attempt, CascadeDecision, Verdict
from disagg.router.route import Candidate, Route
from disagg.tools.why import Stage, sentences, stages
from tests.behind_uvicorn import FLEET, served_port


async def test_a_request_is_told_and_the_fleet_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def said(*words: str) -> str:
        assert await asyncio.to_thread(main, [*words, "--url", url]) == 0
        return capsys.readouterr().out

    async with served_port(FLEET) as port:
        url = f"http://127.0.0.1:{port}"
        result = tmp_path / "result.json"
        load = ["--num-prompts", "1", "--input-len", "1500", "--output-len", "9"]
        await said("bench", *load, "--num-warmups", "0", "--output", str(result))
        request_id = json.loads(result.read_text())["requests"][0]["id"]
        explained = json.loads(await said("why", request_id, "--json"))
        told = await said("why", request_id)
        fleet = json.loads(await said("top", "--json"))
        shown = await said("top")
        assert await asyncio.to_thread(main, ["why", "nobody", "--url", url]) == 2
        assert "knows a routing decision" in capsys.readouterr().err
    route = explained["routes"][0]["route"]
    workers = {route["prefill"] or route["decode"], route["decode"]}  # a busy one is not chosen
    assert all(worker in told for worker in workers)
    assert "compute until its first token" in told and f"Why: {route['reason']}." in told
    assert len(fleet["workers"]) == 2
    for worker in fleet["workers"]:
        assert worker["worker_id"] in shown


def route(prefill: str | None, decode: str, reason: str) -> Route:
    candidate = Candidate(prefill, decode, 0.1, 0.2, 0.3, 0.4, 16)
    return Route(prefill, decode, 0.3, 16, (candidate,), reason)


def test_a_request_that_waited_escalated_and_moved() -> None:
    lost = WorkerVisit("p", 100.0, 100.5, 102.0, 1, queue_s=0.125, pull_s=0.0, compute_s=0.25)
    moved = WorkerVisit("e", 102.0, None, 103.0)
    pulled = WorkerVisit("d", 100.5, 101.0, 102.0, 9, 0, 0.0, 0.25, 0.125, 475_136, "cma")
    first = Decision(
        100.0,
        route("p", "d", "it is cheaper"),
        50,
        "",
        "",
        Queued("", 0, 3, 1.5, 2.0),
        "large",
        [lost],
    )
    second = Decision(
        102.0, route(None, "e", "no other"), 51, "d died.", "", None, "large", [moved]
    )
    cascade = CascadeDecision(
        "minimum",
        (Attempt("small", "unsure", Verdict(False, -1.2, 3), -0.3), Attempt("large", "largest")),
    )
    assert list(stages(first)) == [
        Stage("admission queue", "the ingress", 98.0, 100.0),
        Stage("worker's queue", "p", 100.125, 100.25),
        Stage("compute until its first token", "p", 100.25, 100.5),
    ]
    assert list(stages(msgspec.structs.replace(second, visits=[pulled, moved]))) == [
        Stage("KV pull of 0.5 MB", "d", 100.625, 100.875),
        Stage("compute until its first token", "d", 100.875, 101.0),
        Stage("decode", "d", 101.0, 102.0),
    ]
    assert list(sentences(Explanation((first, second), cascade))) == [
        "Small model first: small unsure (minimum -1.200 < -0.300 after 3), large largest.",
        "It waited 2.000 s in the admission queue, behind 3 others (predicted 1.500 s).",
        "00:01:40.000000 large: p computes the prompt, d the answer. Why: it is cheaper.",
        "16 of its 50 tokens were expected in the cache, and the first token after 0.300 s; it came"
        " after 0.500 s.",
        "It went on elsewhere with 51 tokens, because: d died.",
        "00:01:42.000000 large: e computes the prompt and the answer. Why: no other.",
        "16 of its 51 tokens were expected in the cache, and the first token after 0.300 s; none"
        " has come.",
        "Before its tokens followed each other, the longest was: admission queue, 2.000 s on the"
        " ingress.",
    ]
