"""Functions that clients offer: shown to the model, called by it, or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import openai
import pytest

from disagg.api.http.app import AsgiApp
from disagg.messages import FinishReason, GenerateRequest, Grammar
from tests.api.apps import HI, chat, http_client, make_app, openai_client
from tests.api.fakes import CHATML, TOKENIZER, FakeGenerate, served_model

PLACE = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/place"}},
    "required": ["where"],
    "$defs": {"place": {"enum": ["here", "there"]}},
}
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "description": "sees <|im_end|> things", "parameters": PLACE},
}
REST: Any = {"type": "function", "function": {"name": "rest"}}
SHOWS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
HERMES = "{# <tool_call> #}" + SHOWS
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'
NAMED: Any = {"type": "function", "function": {"name": "look"}}


def app(says: str, template: str = HERMES, per_delta: int = 3) -> tuple[AsgiApp, FakeGenerate]:
    generate = FakeGenerate(says, per_delta=per_delta)
    return make_app(generate, served_model(template=template, max_model_len=2048)), generate


async def test_the_model_reads_what_it_may_call() -> None:
    serving, generate = app("no")
    for fields in ({"tools": [LOOK, REST]}, {"tools": [LOOK], "tool_choice": "none"}, {}):
        (choice,) = (await chat(serving, **fields)).choices
        assert (choice.message.content, choice.message.tool_calls) == ("no", None)
        assert choice.finish_reason == "stop"
    offered, refused, plain = (
        TOKENIZER.decode(request.token_ids, skip_special_tokens=False)
        for request in generate.requests
    )
    assert refused == plain
    tools = offered.removesuffix(plain)
    assert tools.endswith(json.dumps(REST))
    ends = [token for token in generate.requests[0].token_ids if token == 2]
    assert len(ends) == 1, "a description became a control token"


async def test_a_call_is_not_text() -> None:
    serving, generate = app(f"Let me see.\n{CALL}\n{CALL}")
    answer = await chat(serving, tools=[LOOK], n=2, max_tokens=300)
    ids = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        for call in choice.message.tool_calls or []:
            assert call.type == "function" and call.function.name == "look"
            assert json.loads(call.function.arguments) == {"where": "here"}
            ids.add(call.id)
    assert len(ids) == 4
    assert all(request.sampling.grammar is None for request in generate.requests)


async def test_the_answer_ends_with_the_only_call_that_is_wanted() -> None:
    serving, generate = app(f"{CALL}{CALL} and more", per_delta=1)
    answer = await chat(serving, tools=[LOOK], parallel_tool_calls=False, max_tokens=300)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert len(choice.message.tool_calls or []) == 1
    assert generate.num_closed == 1
    assert answer.usage.completion_tokens < len(generate.token_ids) / 2 + 5


async def grammar_of(**fields: Any) -> Grammar | None:
    serving, generate = app("[]")
    await chat(serving, **fields)
    return generate.requests[0].sampling.grammar


async def test_required_calls_are_asked_for_by_grammar() -> None:
    grammar = await grammar_of(tools=[LOOK, REST], tool_choice="required")
    assert grammar is not None and grammar.kind == "json"
    schema = json.loads(grammar.source)
    look = {"name": "look", "arguments": {"where": "there"}}
    rest = {"name": "rest", "arguments": {}}
    jsonschema.validate([look, rest, look], schema)
    long = {"arguments": {"long": True}}  # the function names no parameters, so it has none
    for wrong in ([], [{"name": "rest"}], [rest | long], [look | {"name": "rests"}], look,
                  [{"name": "look", "arguments": {"where": "home"}}]):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    one = await grammar_of(tools=[LOOK], tool_choice="required", parallel_tool_calls=False)
    assert one is not None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([look, look], json.loads(one.source))
    named = await grammar_of(tools=[LOOK, REST], tool_choice=NAMED)
    closed = PLACE | {"additionalProperties": False}  # it takes the arguments that it names
    assert named is not None and json.loads(named.source) == closed


async def test_required_calls_are_read_whatever_the_template_is_like() -> None:
    says = '[{"name": "look", "arguments": {"where": "here"}}]'
    wanted: list[tuple[Any, str]] = [("required", says), (NAMED, '{"where": "here"}')]
    for choice, said in wanted:
        serving, _ = app(said, template=SHOWS)
        answer = await chat(serving, tools=[LOOK], tool_choice=choice, max_tokens=200)
        (call,) = answer.choices[0].message.tool_calls
        assert call.type == "function" and call.function.name == "look"
        assert json.loads(call.function.arguments) == {"where": "here"}
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None


async def test_of_a_call_that_is_cut_there_is_what_came() -> None:
    serving, _ = app('{"where": "here"}', template=SHOWS)
    answer = await chat(serving, tools=[LOOK], tool_choice=NAMED, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content is None
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.arguments.startswith('{"')


OTHER: Any = {
    "type": "function",
    "function": {"name": "other", "parameters": {"$defs": {"place": {"type": "integer"}}}},
}


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (CHATML, {"tools": [LOOK]}, "tools"),
        (SHOWS, {"tools": [LOOK]}, "tools"),
        (HERMES, {"tools": [LOOK, OTHER], "tool_choice": "required"}, "tools"),
        (HERMES, {"tools": [LOOK], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            HERMES,
            {"tools": [LOOK], "tool_choice": NAMED, "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused(
    template: str, fields: dict[str, Any], param: str
) -> None:
    serving, _ = app("no", template=template)
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(serving, extra_body=fields)
    assert refused.value.param == param


async def test_tools_count_as_prompt() -> None:
    serving, _ = app("no")
    async with http_client(serving) as client:
        counts = [
            (await client.post("/tokenize", json={"messages": HI, **fields})).json()["count"]
            for fields in ({}, {"tools": [LOOK]})
        ]
        assert counts[0] < counts[1]
        reply = await client.post("/v1/completions", json={"prompt": "x", "tools": [LOOK]})
        assert reply.json()["error"]["param"] == "tools"


async def test_the_client_librarys_own_stream_reads_calls() -> None:
    serving, _ = app(f"So: {CALL}\n{CALL}", per_delta=2)
    pieces: dict[int, list[str]] = {0: [], 1: []}
    async with openai_client(serving) as client:
        async with client.chat.completions.stream(
            model="tiny", messages=HI, tools=[LOOK], max_tokens=300
        ) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    assert event.name == "look"
                    pieces[event.index].append(event.arguments_delta)
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "So:"
    said = [call.function.arguments for call in message.tool_calls or []]
    assert said == ["".join(each) for each in pieces.values()]
    assert all(json.loads(each) == {"where": "here"} for each in said)
    assert all(len(each) > 3 for each in pieces.values()), "they come as they are generated"
    assert final.choices[0].finish_reason == "tool_calls"


class StoppedAt(FakeGenerate):
    """Ends an answer with the first of the request's stop tokens, as engines do."""

    def _answer(self, request: GenerateRequest) -> tuple[Sequence[int], FinishReason]:
        ids, reason = super()._answer(request)
        ends = [place for place, each in enumerate(ids) if each in request.sampling.stop_token_ids]
        return (ids[: ends[0] + 1], "stop") if ends else (ids, reason)


@pytest.mark.parametrize(
    ("says", "stop", "arguments", "reason"),
    [
        # What there is of a call, which is no call to make.
        (CALL.replace('"here"', '"he;re"'), ";", '{"where": "he', "stop"),
        (f"So {CALL}", "}", '{"where": "here"', "stop"),
        (f"So {CALL}", ":", None, "stop"),  # before it began
        (f"{CALL}!", "!", '{"where": "here"}', "tool_calls"),
        ("So! I look", "!", None, "stop"),
    ],
)
async def test_a_stop_token_inside_a_call_leaves_no_call_to_make(
    says: str, stop: str, arguments: str | None, reason: str
) -> None:
    (stop_id,) = TOKENIZER.encode(stop, add_special_tokens=False)
    generate = StoppedAt(says, per_delta=1)
    serving = make_app(generate, served_model(template=HERMES, max_model_len=2048))
    body = {"model": "tiny", "messages": HI, "tools": [LOOK], "stop_token_ids": [stop_id]}
    async with http_client(serving) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert answer["finish_reason"] == reason
    calls = answer["message"].get("tool_calls") or []
    assert [each["function"]["arguments"] for each in calls] == ([arguments] if arguments else [])
