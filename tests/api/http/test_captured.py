"""What spans show of prompts and answers, if a server was told to capture them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from disagg import telemetry
from disagg.api.http.request_spans import input_messages, output_messages
from disagg.api.request_spec import Conversation, JsonText, Text
from disagg.api.running_job import ChoiceDelta
from disagg.text.answer_delta import CallDelta
from tests.api.apps import URL, http_client, make_app
from tests.api.fakes import FakeGenerate
from tests.contract.contract import CHAT
from tests.otlp_collector import OtlpCollector, traced

SAID, ANSWERED = "a secret question", "the quick brown fox"
ASKED = CHAT | {"messages": [{"role": "user", "content": SAID}]}
VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


@pytest.fixture
def collector(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OtlpCollector]:
    monkeypatch.setenv(VARIABLE, request.param)
    with traced(monkeypatch) as collector:
        yield collector


@pytest.mark.parametrize("collector", ["true", "SPAN_ONLY", "span_and_event"], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_are_shown_on_request(
    stream: bool, collector: OtlpCollector
) -> None:
    async with http_client(make_app(FakeGenerate(ANSWERED))) as client:
        await client.post(URL, json=ASKED | {"stream": stream, "n": 2})
    assert telemetry.flush(30)
    (span,) = collector.named("chat tiny")
    assert json.loads(span.attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": SAID}]}
    ]
    answer = [{"type": "text", "content": ANSWERED}]
    assert json.loads(span.attributes["gen_ai.output.messages"]) == 2 * [
        {"role": "assistant", "parts": answer, "finish_reason": "length"}
    ]


@pytest.mark.parametrize("collector", ["", "false", "no_content", "event_only", "1"], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_otherwise_no_span_has_a_word_of_them(stream: bool, collector: OtlpCollector) -> None:
    async with http_client(make_app(FakeGenerate(ANSWERED))) as client:
        await client.post(URL, json=ASKED | {"stream": stream})
    assert telemetry.flush(30)
    shown = repr([span.attributes for span in collector.spans])
    assert "chat" in shown and not any(word in shown for word in ("secret", "quick", "messages"))


def test_conversations_are_in_the_conventions_form() -> None:
    call = {"name": "add", "arguments": JsonText('{"a": 1}')}
    conversation = Conversation(
        [
            {"role": "system", "content": "be kind"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": call}],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ]
    )
    called = {"type": "tool_call", "id": "c1", "name": "add", "arguments": '{"a": 1}'}
    assert json.loads(input_messages([conversation, Text("once"), [5, 6]])) == [
        {"role": "system", "parts": [{"type": "text", "content": "be kind"}]},
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, called]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "2"}]},
        {"role": "user", "parts": [{"type": "text", "content": "once"}]},
        {"role": "user", "parts": [{"type": "token_ids", "content": [5, 6]}]},
    ]
    deltas = [CallDelta(0, '{"a"', "c1", "add"), CallDelta(0, ": 1}")]
    answers = [
        ChoiceDelta(0, reasoning="hm", calls=deltas, finish_reason="tool_calls"),
        ChoiceDelta(1, text="cut o"),
    ]
    assert json.loads(output_messages(answers)) == [
        {
            "role": "assistant",
            "parts": [{"type": "reasoning", "content": "hm"}, called],
            "finish_reason": "tool_calls",
        },
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "cut o"}],
            "finish_reason": "error",
        },
    ]
