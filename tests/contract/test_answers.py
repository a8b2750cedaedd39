"""What models write and what clients get of it, and the schemas that are taken: as tables."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from disagg.api.http.app import HttpApp
from disagg.engine.sched.grammar import Grammars
from tests.api.apps import http_client, make_app
from tests.api.fakes import CHATML, END, TOKENIZER, FakeGenerate, served_model
from tests.contract.contract import CHAT, CHAT_URL, load

SHOWS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"where": TEXT, "n": NUMBER}}}},
    {"type": "function", "function": {"name": "rest"}},
]  # fmt: skip


def serving(generate: FakeGenerate, row: dict[str, Any]) -> HttpApp:
    model = served_model(template=SHOWS, max_model_len=4096)
    parsers = {"tool_call_parser": row["parser"], "reasoning_parser": row.get("reasoning", "none")}
    return make_app(generate, replace(model, **parsers))


async def answered(row: dict[str, Any], per_delta: int, *, stream: bool) -> dict[str, Any]:
    """The parts of a chat's answer, joined if it is streamed."""
    generate = FakeGenerate(row["says"], per_delta=per_delta)
    fields = {name: row[name] for name in ("stop", "max_tokens", "tool_choice") if name in row}
    body = CHAT | {"max_tokens": 1000, "tools": TOOLS, "stream": stream} | fields
    async with http_client(serving(generate, row)) as client:
        reply = await client.post(CHAT_URL, json=body)
    assert reply.status_code == 200, reply.text
    if stream:
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        said = [choice["delta"] for choice in choices]
        reason = choices[-1]["finish_reason"]
    else:
        (choice,) = reply.json()["choices"]
        said, reason = [choice["message"]], choice["finish_reason"]
    calls: dict[int, list[str]] = {}
    for delta in said:
        for index, call in enumerate(delta.get("tool_calls") or []):
            function = call["function"]
            begun = calls.setdefault(call.get("index", index), [function.get("name"), ""])
            begun[1] += function.get("arguments") or ""
    return {
        "content": "".join(delta.get("content") or "" for delta in said),
        "reasoning": "".join(delta.get("reasoning_content") or "" for delta in said),
        "calls": [*calls.values()],
        "finish_reason": reason,
    }


@pytest.mark.parametrize("row", load("answers"), ids=lambda row: f"{row['parser']} {row['says']}")
async def test_what_a_model_writes(row: dict[str, Any]) -> None:
    gives = dict(row["gives"])
    cut = gives.pop("cut", None)
    expected = {"content": "", "reasoning": "", "calls": [], "finish_reason": "stop"} | gives
    if gives.get("calls"):
        expected["finish_reason"] = "tool_calls"
    for stream, per_delta in ((False, 7), (True, 1), (True, 1000)):
        found = await answered(row, per_delta, stream=stream)
        if cut:
            ((name, arguments),) = found.pop("calls")
            assert name == cut and arguments.startswith("{") and not arguments.endswith("}")
            expected.pop("calls", None)
        assert found == expected


@pytest.mark.parametrize("row", load("schemas"), ids=lambda row: json.dumps(row["schema"])[:60])
async def test_a_schema_is_taken_and_kept_to(row: dict[str, Any]) -> None:
    schema, form = row["schema"], row.get("form", "json_schema")
    fields: dict[str, Any] = {"response_format": {"type": form, "schema": schema}}
    if form == "json_schema":
        named = {"name": "x", "schema": schema}
        fields = {"response_format": {"type": form, "json_schema": named}}
    if form == "tool":
        function = {"name": "f", "parameters": schema}
        tool = {"type": "function", "function": function}
        named = {"type": "function", "function": {"name": "f"}}
        fields = {"tools": [tool], "tool_choice": named}
    generate = FakeGenerate("{}")
    async with http_client(serving(generate, {"parser": "hermes"})) as client:
        reply = await client.post(CHAT_URL, json=CHAT | fields)
    assert reply.status_code == 200, reply.text
    grammar = generate.requests[0].sampling.grammar
    assert grammar is not None
    compiled = Grammars(TOKENIZER.core.to_str, [END]).compile(grammar).result()
    for text, fits in [(each, True) for each in row["fits"]] + [
        (each, False) for each in row.get("not", ())
    ]:
        token_ids = [*TOKENIZER.encode(text, add_special_tokens=False), END]
        assert compiled.matcher().consume_tokens(token_ids) is fits, text


@pytest.mark.parametrize("salt", ["a", "dGVzdA+/==", "a b", "ü", "s" * 512])
async def test_a_salt_may_be_any_text(salt: str) -> None:
    async with http_client(make_app()) as client:
        assert (await client.post(CHAT_URL, json=CHAT | {"cache_salt": salt})).status_code == 200
