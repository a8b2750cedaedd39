"""When requests are sent, in virtual time, and what they ask."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import RequestError
from disagg.tools.bench.endpoint import RequestTiming
from disagg.tools.bench.generator import Generator, arrivals
from disagg.tools.bench.prompts import (
    RandomPrompts,
    Session,
    Turn,
    WordCount,
    read_dataset,
    trace_sessions,
)
from disagg.tools.sim.trace import TraceRequest
from disagg.tools.sim.virtual_time import run

ANSWER_S = 2.0  # that every answer of the server takes


class ScriptedServer:
    """Answers each request after `ANSWER_S`, in virtual time."""

    def __init__(self, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        self.asked: list[dict[str, Any]] = []
        self.generator = Generator(self.ask, {"model": "m"}, loop.time, **options)

    async def ask(self, body: bytes, timing: RequestTiming) -> str:
        timing.sent_s = asyncio.get_running_loop().time()
        self.asked.append(json.loads(body))
        await asyncio.sleep(ANSWER_S)
        return "fine"

    @property
    def sent(self) -> list[tuple[float, float]]:
        """When requests were due, and when they were sent."""
        return [(each.due_s, each.sent_s) for each in self.generator.timings]


def session(*thinks_s: float) -> Session:
    return [
        Turn(({"role": "user", "content": f"question {i}"},), 9, think_s)
        for i, think_s in enumerate(thinks_s)
    ]


def test_an_open_loop_sends_when_it_is_due_whatever_is_in_flight() -> None:
    async def main() -> list[tuple[float, float]]:
        server = ScriptedServer()
        await server.generator.open_loop([0.0, 0.5, 0.5], [session(0.0)] * 3)
        return server.sent

    assert run(main()) == [(0.0, 0.0), (0.5, 0.5), (0.5, 0.5)]


def test_what_a_limit_delays_counts_from_when_it_was_due() -> None:
    async def main() -> list[float]:
        server = ScriptedServer(max_concurrency=1)
        await server.generator.open_loop([0.0, 0.5, 7.0], [session(0.0)] * 3)
        return [each.lag_s for each in server.generator.timings]

    assert run(main()) == [0.0, 1.5, 0.0]


def test_a_closed_loop_has_so_many_in_flight() -> None:
    async def main() -> list[tuple[float, float]]:
        server = ScriptedServer(max_concurrency=2)
        await server.generator.closed_loop([session(0.0)] * 5)
        return server.sent

    assert run(main()) == [(0.0, 0.0)] * 2 + [(2.0, 2.0)] * 2 + [(4.0, 4.0)]


def test_a_session_thinks_after_an_answer_and_sends_what_was_said() -> None:
    async def main() -> tuple[list[tuple[float, float]], list[dict[str, Any]]]:
        server = ScriptedServer()
        await server.generator.open_loop([1.0], [session(0.0, 5.0)])
        return server.sent, server.asked

    sent, asked = run(main())
    assert sent == [(1.0, 1.0), (8.0, 8.0)]
    first = {"role": "user", "content": "question 0"}
    assert asked == [
        {"model": "m", "messages": [first], "max_tokens": 9},
        {
            "model": "m",
            "messages": [
                first,
                {"role": "assistant", "content": "fine"},
                {"role": "user", "content": "question 1"},
            ],
            "max_tokens": 9,
        },
    ]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 100.0])
def test_arrivals_have_their_rate_and_are_as_bursty_as_asked(burstiness: float) -> None:
    due_s = arrivals(4.0, burstiness, 20_000, seed=1)
    pauses = [after - before for before, after in itertools.pairwise(due_s)]
    assert due_s[0] == 0.0 and min(pauses) >= 0.0
    assert due_s[-1] == pytest.approx(20_000 / 4.0, rel=0.01)
    mean = sum(pauses) / len(pauses)
    variance = sum((pause - mean) ** 2 for pause in pauses) / len(pauses)
    # The law of the gamma distribution; seeded, so that it is the same in each run.
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


WORDS = WordCount(per_word=2.0, more=7.0)  # as a server may count


def num_tokens(text: str) -> float:
    return WORDS.more + WORDS.per_word * len(text.split())


def texts(sessions: Iterator[Session]) -> list[list[str]]:
    return [[turn.messages[0]["content"] for turn in session] for session in sessions]


def test_random_prompts_have_their_lengths_and_prefixes() -> None:
    prompts = RandomPrompts(input_len=107, output_len=5, prefix_len=40, num_prefixes=2, turns=2)
    sessions = list(prompts.sessions(41, WORDS, seed=1))
    assert sum(map(len, sessions)) == 41 and {turn.num_output_tokens for turn in sessions[0]} == {5}
    said = texts(iter(sessions))
    assert {num_tokens(text) for turns in said for text in turns} == {107}
    assert len({" ".join(turns[0].split()[:20]) for turns in said}) == 2
    assert len({text for turns in said for text in turns}) == 41
    varied = RandomPrompts(input_len=1000, range_ratio=0.5).sessions(300, WORDS, seed=1)
    lengths = [num_tokens(text) for (text,) in texts(varied)]
    assert 499 <= min(lengths) < 600 and 1400 < max(lengths) <= 1500


def test_prompts_of_a_trace_share_what_its_prompts_share() -> None:
    requests = [
        TraceRequest(0.0, 1200, 3, (4, 5, 6)),
        TraceRequest(0.0, 1200, 3, (4, 5, 7)),
        TraceRequest(0.0, 1200, 3, (8, 9, 10)),
    ]
    (one,), (other,), (third,) = texts(trace_sessions(requests, WORDS, seed=1))
    assert [round(num_tokens(text)) for text in (one, other, third)] == [1199] * 3
    assert one.split()[:512] == other.split()[:512] != third.split()[:512]
    assert one.split()[512:] != other.split()[512:]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no lines"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2: Expected `str"),
        ('{"prompt": "a", "messages": [{}]}', "line 1: a line has either a prompt or messages"),
        ("{}", "line 1: a line has either"),
    ],
)
def test_a_dataset_that_cannot_be_read(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(RequestError, match=reason):
        read_dataset(file, 5, 16)


def test_a_dataset_begins_anew_when_it_is_shorter(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user"}], "output_tokens": 3}\n')
    sessions = read_dataset(file, 3, 16)
    assert [turn.num_output_tokens for (turn,) in sessions] == [16, 3, 16]


def test_words_are_drawn_from_the_seed() -> None:
    assert WORDS.text(60, random.Random(1)) == WORDS.text(60, random.Random(1))
