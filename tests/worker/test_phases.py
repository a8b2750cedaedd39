"""The stages of a request in a worker as spans: which, from when to when, under which trace."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg import telemetry
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.errors import DeadlineExceeded
from disagg.kvtransfer.transport import PullDone
from disagg.messages import GenerateRequest, StageTimes, Start
from disagg.worker.streams import Streams, record_pull
from tests.worker.plays import Trip, request_of
from tests.worker.test_streams import TICKET

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Span = tuple[str, float, float, dict[str, Any], Any]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    recorded: list[Span] = []

    def record(
        name: str,
        parent: str,
        start_unix_s: float,
        end_unix_s: float,
        attributes: telemetry.Attributes | None = None,
        error: object = None,
    ) -> str:
        assert parent == PARENT
        recorded.append((name, start_unix_s, end_unix_s, dict(attributes or {}), error))
        return ""

    monkeypatch.setattr(telemetry, "record_span", record)
    return recorded


def traced() -> GenerateRequest:
    request = request_of(Trip(0, (4, 5, 6), 9), "request", 4)
    return msgspec.structs.replace(request, traceparent=PARENT)


class Player:
    """One stream that opened at 10 s; steps take 1 s."""

    def __init__(self, *, with_ticket: bool = False, hand_over: bool = False) -> None:
        self.streams = Streams()
        start = Start(1, traced(), hand_over, TICKET if with_ticket else None)
        self.sequence: Sequence = self.streams.open(1, start, 10.0)

    def step(self, now: float, *token_ids: int, **end: Any) -> StageTimes | None:
        events = (TokenEvent(self.sequence, token_ids, **end),) if token_ids or end else ()
        deltas = self.streams.deltas(
            events, lambda sequence: TICKET, lambda sequence: None, now, 1.0
        )
        return deltas[1][0].times if deltas else None


def test_computed_here_from_the_first_token_on(spans: list[Span]) -> None:
    player = Player()
    player.step(13.0)
    assert spans == []
    player.sequence.was_admitted = True
    player.step(15.0)
    player.step(16.0, 7)
    for now in (17.0, 18.0):
        player.step(now, 8)
    player.step(19.0, 9, finish_reason="length")
    cached = {"disagg.num_prompt_tokens": 3, "disagg.num_cached_tokens": 0}
    assert spans == [
        ("prefill.queue", 10.0, 14.0, {}, None),
        ("prefill.compute", 14.0, 16.0, cached, None),
        ("decode", 16.0, 19.0, {"disagg.num_tokens": 3}, None),
    ]


def test_one_that_leaves_has_no_decode(spans: list[Span]) -> None:
    player = Player(hand_over=True)
    player.sequence.was_admitted = True
    player.step(12.0, 7, left=True)
    assert [span[:3] for span in spans] == [
        ("prefill.queue", 10.0, 11.0),
        ("prefill.compute", 11.0, 12.0),
    ]


def test_one_that_arrives_has_no_prefill(spans: list[Span]) -> None:
    player = Player(with_ticket=True)
    player.sequence.was_admitted = True
    player.step(12.0, 7)
    player.step(13.0, 8, finish_reason="stop")
    assert spans == [
        ("decode.queue", 10.0, 11.0, {}, None),
        ("decode", 11.0, 13.0, {"disagg.num_tokens": 2}, None),
    ]


@pytest.mark.parametrize("stage", ["prefill.queue", "prefill.compute"])
def test_an_error_belongs_to_the_stage_that_it_ended(spans: list[Span], stage: str) -> None:
    player = Player()
    player.sequence.was_admitted = stage == "prefill.compute"
    player.step(12.0)
    late = DeadlineExceeded("too late")
    player.step(13.0, error=late)
    assert spans[-1] == (stage, spans[-1][1], 13.0, {}, late)
    assert [span[0] for span in spans].count(stage) == 1


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_one_that_is_cancelled_shows_how_far_it_came(spans: list[Span], num_tokens: int) -> None:
    player = Player(with_ticket=True)
    player.sequence.was_admitted = num_tokens > 0
    for _ in range(num_tokens):
        player.step(12.0, 7)
    player.streams.cancel(player.sequence.request_id, 15.0)
    player.streams.cancel(player.sequence.request_id, 16.0)
    stage, attributes = spans[-1][0], spans[-1][3]
    assert (stage, spans[-1][2]) == ("decode" if num_tokens else "decode.queue", 15.0)
    assert attributes == {"disagg.cancelled": True, "disagg.num_tokens": num_tokens}
    assert len(spans) == (2 if num_tokens else 1) and not player.streams.num_open


@pytest.mark.parametrize("error", [None, "the source used the blocks again"])
def test_a_pull_is_a_span(spans: list[Span], error: str | None) -> None:
    record_pull(PARENT, PullDone(1, error, 4, 2_000_000_000, 0.5, "cma"), 20.0)
    ((name, start_s, end_s, attributes, failure),) = spans
    assert (name, start_s, end_s, failure) == ("kv.pull", 19.5, 20.0, error)
    assert attributes == {
        "disagg.kv.nbytes": 2_000_000_000,
        "disagg.kv.num_blocks": 4,
        "disagg.kv.gigabytes_per_s": 4.0,
        "disagg.kv.lane": "cma",
    }


def test_the_first_token_says_how_long_each_stage_took() -> None:
    """Once for each worker, and without tracing."""
    player = Player()
    player.step(13.0)
    player.sequence.was_admitted = True
    player.step(15.0)
    assert player.step(16.5, 7) == StageTimes(True, 4.0, 0.0, 2.5)
    assert player.step(17.0, 8) is None


def test_a_pull_is_no_part_of_the_queue() -> None:
    player = Player(with_ticket=True)
    player.streams.pulled(player.sequence, 0.75, 640, "cma")
    player.sequence.was_admitted = True
    assert player.step(12.0, 7) == StageTimes(False, 0.25, 0.75, 1.0, 640, "cma")


def test_nothing_is_recorded_while_tracing_is_off() -> None:
    assert not telemetry.enabled()
    player = Player()
    player.step(12.0, 7, finish_reason="stop")
    assert player.streams.num_open == 0
