"""What a client may not see is noticed: wrong, torn and foreign text, no end, two ends."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bench.faults_gates import verdict
from tests.faults.clients import Answer, Question
from tests.faults.fake_model import expected_text
from tests.faults.oracles import check_answer

QUESTION = Question("crew", (1, 2, 3), 4, temperature=1.0, seed=7)


def chunk(text: str = "", finish_reason: str | None = None) -> bytes:
    raw = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "crew",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}],
    }
    return b"data: " + json.dumps(raw).encode()


def error(code: str) -> bytes:
    body = {"message": "m", "type": "server_error", "param": None, "code": code}
    return b"data: " + json.dumps({"error": body}).encode()


def answer(*events: bytes) -> Answer:
    """What a client has that saw these events."""
    made = Answer(QUESTION, asked_at=0.0, status=200)
    for event in events:
        made.take(event)
    return made


def whole() -> Answer:
    right = QUESTION.expected
    return answer(chunk(right[:2]), chunk(right[2:]), chunk("", "length"), b"data: [DONE]")


def foreign() -> Answer:
    other = expected_text((1, 2, 4), 4, temperature=1.0, seed=7)
    return answer(chunk(other), chunk("", "length"), b"data: [DONE]")


def test_a_right_answer_passes() -> None:
    check_answer(whole())
    assert verdict(whole()) == "ok"


WRONG: dict[str, tuple[Callable[[], Answer], str]] = {
    "foreign text": (foreign, "wrong"),
    "too short": (
        lambda: answer(chunk(QUESTION.expected[:2]), chunk("", "length"), b"data: [DONE]"),
        "wrong",
    ),
    "a token twice": (
        lambda: answer(chunk(QUESTION.expected + "x"), chunk("", "length"), b"data: [DONE]"),
        "wrong",
    ),
    "no end": (lambda: answer(chunk(QUESTION.expected)), "without end"),
    "an end, and the stream goes on": (
        lambda: answer(chunk(QUESTION.expected), chunk("", "length")),
        "without end",
    ),
    "two ends": (
        lambda: answer(chunk(QUESTION.expected), chunk("", "length"), error("worker_lost")),
        "without end",
    ),
}


@pytest.mark.parametrize(("make", "expected"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_answer_does_not(make: Callable[[], Answer], expected: str) -> None:
    assert verdict(make()) == expected
    with pytest.raises(AssertionError):
        check_answer(make())


def test_text_after_the_end_is_refused_at_once() -> None:
    with pytest.raises(AssertionError, match="after the end"):
        answer(chunk("", "length"), chunk("x"))


def test_what_is_not_in_the_schema_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="finish_reason"):
        answer(chunk("", "error"))


def test_a_failure_is_an_end_and_no_success() -> None:
    failed = answer(chunk(QUESTION.expected[:1]), error("worker_lost"))
    check_answer(failed)
    assert verdict(failed) == "failed"


def test_words_of_a_proxy_are_trouble() -> None:
    made = Answer(QUESTION, asked_at=0.0, status=503)
    made.take_body(b"<html>no server</html>")
    assert verdict(made) == "without end"
