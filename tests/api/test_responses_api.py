"""`/v1/responses` through the real OpenAI client, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.apps import http_client, make_app, openai_client
from tests.api.fakes import TOKENIZER, FakeGenerate, served_model, turns_template
from tests.api.openai.test_reasoning import OPEN, app
from tests.api.openai.test_tools import HERMES

TEXT = "the quick brown fox"
URL = "/v1/responses"
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
UNENDED = '<tool_call>{"name": "look", "arguments": {"at": "fox"}}'
CALL = UNENDED + "</tool_call>"


async def test_an_answer_is_a_message() -> None:
    async with openai_client(make_app(FakeGenerate(TEXT, num_cached_tokens=4))) as client:
        answer = await client.responses.create(model="tiny", input="hi", instructions="be brief")
    assert (answer.output_text, answer.status, answer.error) == (TEXT, "completed", None)
    assert answer.id.startswith("resp_")
    assert (answer.instructions, answer.model, answer.created_at) == ("be brief", "tiny", 1000)
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.to_dict()["store"] is False


async def test_vllms_sampling_fields_apply_as_in_chats() -> None:
    generate = FakeGenerate(TEXT)
    fields = {"top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5, "seed": 7, "ignore_eos": True}
    async with http_client(make_app(generate)) as client:
        body = {"model": "tiny", "input": "hi", "stop": "brown", "cache_salt": "s"} | fields
        answer = (await client.post(URL, json=body)).json()
        refused = (await client.post(URL, json=body | {"watermarking": True})).json()["error"]
    assert answer["output"][0]["content"][0]["text"] == "the quick "
    sampling = generate.requests[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.5, 1.5)
    assert sampling.stop_token_ids == ()  # ignore_eos
    assert (refused["param"], refused["code"]) == ("watermarking", "unsupported_parameter")


async def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    async with openai_client(make_app(FakeGenerate(TEXT, finish=False))) as client:
        answer = await client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("per_delta", [1, 100])
async def test_events_are_numbered_and_add_up_to_the_answer(per_delta: int) -> None:
    app = make_app(FakeGenerate(TEXT, per_delta=per_delta))
    async with (
        openai_client(app) as client,
        client.responses.stream(model="tiny", input="hi") as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert final.output_text == TEXT
    assert final.usage is not None and final.usage.output_tokens > 1


async def test_a_conversation_with_calls_becomes_a_chat() -> None:
    """Calls that follow each other are of one message, as templates know them."""
    template = turns_template("{{ c.id }} {{ c.function.name }} {{ c.function.arguments.at }}")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what is there?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"at": "x"}'},
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": '{"at": "y"}'},
        {"type": "function_call_output", "call_id": "a", "output": "fox"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "a fox", "annotations": []}]},
    ]  # fmt: skip
    model, generate = served_model(template=template), FakeGenerate()
    async with http_client(make_app(generate, model)) as client:
        reply = await client.post(URL, json={"input": items, "instructions": "look"})
    assert reply.status_code == 200, reply.text
    said = model.tokenizer.decode(list(generate.requests[0].token_ids))
    calls = "assistant(hm [a look x][b look y])"
    assert said == f"system(look)user(what is there?){calls}tool(fox)assistant(a fox)"


@pytest.mark.parametrize("said", ["</think>" + UNENDED, "So.</think>Hi!" + UNENDED, "So, yes, and"])
async def test_a_stream_adds_up_to_the_answer_wherever_it_is_cut_off(said: str) -> None:
    """What is cut off is the last item."""
    model = served_model(template=HERMES + OPEN, max_model_len=2048)
    asked: Any = {"model": "tiny", "input": "hi", "tools": [LOOK]}
    async with http_client(make_app(FakeGenerate(said), model)) as client:
        for most in range(1, len(TOKENIZER.encode(said, add_special_tokens=False)) + 2):
            asked["max_output_tokens"] = most
            whole = (await client.post(URL, json=asked)).json()
            stream = (await client.post(URL, json=asked | {"stream": True})).text
            last = json.loads(stream.rpartition("data: ")[2])
            outputs: list[Any] = [whole["output"], last["response"]["output"]]
            for items in outputs:
                assert len({item["id"] for item in items}) == len(items)
                for item in items:
                    kind = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}[
                        item["type"]
                    ]
                    assert item.pop("id").startswith(kind)  # the rest is of its request
                    item.pop("call_id", None)
                statuses = [item["status"] for item in items]
                assert statuses == ["completed"] * (len(items) - 1) + [whole["status"]]
            assert outputs[0] == outputs[1]


@pytest.mark.parametrize("per_delta", [1, 5, 28, 38, 57, 1000])
@pytest.mark.parametrize("said", [CALL + " Wait.", f"See: {CALL} Wait. {CALL} So.", CALL * 2 + "!"])
async def test_a_stream_adds_up_where_text_follows_a_call(said: str, per_delta: int) -> None:
    """The whole answer has the text before the calls; the stream has it where it was said."""
    model = served_model(template=HERMES, max_model_len=2048)
    asked: Any = {"model": "tiny", "input": "hi", "tools": [LOOK]}
    async with openai_client(make_app(FakeGenerate(said, per_delta=per_delta), model)) as client:
        whole: Any = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events: list[Any] = [event async for event in stream]
            streamed: Any = await stream.get_final_response()
    check_identities(events, streamed.output)
    for answer in (whole, streamed):
        calls = [item for item in answer.output if item.type == "function_call"]
        assert len({call.call_id for call in calls}) == len(calls) == said.count(CALL)
        for call in calls:
            assert (call.name, call.arguments) == ("look", '{"at": "fox"}') and call.call_id
    assert streamed.output_text == whole.output_text != ""


def check_identities(events: list[Any], items: list[Any]) -> None:
    """Each item has an id of its own, which all its events have."""
    ids = [item.id for item in items]
    assert len(set(ids)) == len(ids)
    item_events = [event for event in events if hasattr(event, "output_index")]
    for event in item_events:
        item_id = event.item.id if hasattr(event, "item") else event.item_id
        assert item_id == ids[event.output_index], event.type
    assert {event.output_index for event in item_events} == set(range(len(ids)))


async def test_a_schema_is_followed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    generate = FakeGenerate()
    async with http_client(make_app(generate)) as client:
        reply = await client.post(URL, json={"input": "hi", "text": {"format": form}})
    assert reply.json()["text"]["format"]["schema"] == schema
    grammar = generate.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == "json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "bogus", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [5]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"n": 2}, "n"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [LOOK]}, "tools"),  # the model's template does not show them
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"temperature": 3}, "temperature"),
        ({"priority": 1001}, "priority"),
        ({"priority": 10**30}, "priority"),
        ({"model": "nope"}, "model"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    generate = FakeGenerate()
    async with http_client(make_app(generate)) as client:
        reply = await client.post(URL, json={"model": "tiny", "input": "hi"} | fields)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == param
    assert generate.requests == []


async def test_a_failure_in_a_stream_is_its_last_event() -> None:
    async with openai_client(make_app(FakeGenerate(TEXT, fail_after=2))) as client:
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        events: list[Any] = [event async for event in stream]
    assert (events[-1].type, events[-1].message) == ("error", "planted")
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("per_delta", [1, 5, 1000])
async def test_reasoning_is_an_item_before_the_message(per_delta: int) -> None:
    serving, _ = app("So, yes.\n</think>\n\nHi!", OPEN, per_delta)
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "reasoning": {"effort": "medium"}}
    async with openai_client(serving) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    check_identities(events, streamed.output)
    for each in (whole, streamed):
        items: list[Any] = list(each.output)
        reasoning, message = items
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "So, yes.")
        assert (message.type, each.output_text) == ("message", "Hi!")
        assert each.usage is not None and each.usage.output_tokens_details.reasoning_tokens > 0
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "So, yes."
    assert [event.sequence_number for event in events] == list(range(len(events)))
