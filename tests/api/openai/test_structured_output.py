"""What clients say about the form of answers: taken as OpenAI and vLLM mean it, or refused."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from disagg.api.openai import structured_output
from disagg.api.openai.structured_output import GrammarChecks
from disagg.engine.sched.grammar import Compiled
from disagg.errors import DeadlineExceeded, GrammarError
from disagg.messages import Grammar, SamplingParams
from tests.api.apps import http_client, make_app, until
from tests.api.fakes import FakeGenerate, served_model
from tests.contract.contract import CHAT, TEXT
from tests.engine.sched.test_grammar import HOSTILE

SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["z", "a"],
    "additionalProperties": False,
}
CLOSED = {"type": "object", "properties": {}, "additionalProperties": False}
CLOSED_TEXT = json.dumps(CLOSED, separators=(",", ":"))
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def form(schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": schema, **fields},
        }
    }


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


async def sampling(url: str, base: dict[str, Any], change: dict[str, Any]) -> list[SamplingParams]:
    generate = FakeGenerate()
    async with http_client(make_app(generate)) as client:
        reply = await client.post(url, json=base | change)
        assert reply.status_code == 200, reply.text
    return [request.sampling for request in generate.requests]


TAKEN: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json", '{"type":"object"}')),
    ({"response_format": {"type": "json_object", "schema": CLOSED}}, Grammar("json", CLOSED_TEXT)),
    (form(CLOSED), Grammar("json", CLOSED_TEXT)),
    (form(CLOSED, strict=True, description="A thing."), Grammar("json", CLOSED_TEXT)),
    (form(SCHEMA, strict=False), Grammar("json", SCHEMA_TEXT)),
    (form({}), Grammar("json", "{}")),
    (outputs(json=SCHEMA), Grammar("json", SCHEMA_TEXT)),
    (outputs(json=SCHEMA_TEXT), Grammar("json", SCHEMA_TEXT)),
    (outputs(regex="[a-c]+ü"), Grammar("regex", "[a-c]+ü")),
    (outputs(choice=["yes", 'n"o']), Grammar("choice", '["yes","n\\"o"]')),
    (outputs(grammar='start: "a"'), Grammar("lark", 'start: "a"')),
    (outputs(json_object=True), Grammar("json", '{"type":"object"}')),
    (outputs(regex="a", json_object=False), Grammar("regex", "a")),
    ({"guided_json": SCHEMA}, Grammar("json", SCHEMA_TEXT)),
    ({"guided_regex": "a"}, Grammar("regex", "a")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ({"response_format": {"type": "text"}, **outputs(regex="a")}, Grammar("regex", "a")),
    (outputs(regex="a") | {"min_tokens": 0, "ignore_eos": False}, Grammar("regex", "a")),
]


@pytest.mark.parametrize(("change", "grammar"), TAKEN, ids=lambda value: repr(value)[:50])
async def test_the_form_of_an_answer_reaches_the_workers(
    change: dict[str, Any], grammar: Grammar | None
) -> None:
    for url, base in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        (params,) = await sampling(url, base, change)
        assert params.grammar == grammar


async def _refusal(client: Any, change: dict[str, Any], url: str = "/v1/chat/completions") -> Any:
    reply = await client.post(url, json=(CHAT if "chat" in url else TEXT) | change)
    assert reply.status_code == 400, reply.text
    assert reply.headers["x-should-retry"] == "false"
    assert len(reply.content) < 1000
    return reply.json()["error"]


FIELDS = {"json": "json", "regex": "regex", "lark": "grammar"}


@pytest.mark.parametrize(
    "name",
    sorted(set(HOSTILE) - {"many copies", "copies of copies", "optional copies", "doubling rules"}),
)
async def test_hostile_grammars_are_refused_at_the_front(name: str) -> None:
    """Those left out explode in large vocabularies only, as `test_grammar.py` shows of one."""
    generate = FakeGenerate()
    grammar = HOSTILE[name]
    async with http_client(make_app(generate)) as client:
        change = outputs(**{FIELDS[grammar.kind]: grammar.source})
        assert (await _refusal(client, change))["code"] == "invalid_grammar"
    assert generate.requests == []


async def test_a_deeply_nested_schema_is_refused() -> None:
    body = json.dumps(CHAT)[:-1] + ', "response_format": {"type": "json_schema", "json_schema": '
    async with http_client(make_app()) as client:
        for depth in (70, 500, 900, 5000):
            schema = '{"items":' * depth + "{}" + "}" * depth
            reply = await client.post(
                "/v1/chat/completions",
                content=f'{body}{{"name": "x", "schema": {schema}}}}}}}',
                headers={"content-type": "application/json"},
            )
            assert reply.status_code == 400, depth


async def test_a_model_without_an_end_takes_no_grammars() -> None:
    model = replace(served_model(), eos_token_ids=())
    async with http_client(make_app(None, model)) as client:
        error = await _refusal(client, outputs(regex="a"))
    assert error["param"] == "structured_outputs.regex"


class SlowGrammars:
    """Stands in for `Grammars`: nothing is compiled until the test says so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.future: Future[Compiled] = Future()

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        return self.future


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[SlowGrammars]:
    made: list[SlowGrammars] = []

    def make(*args: Any, **options: Any) -> SlowGrammars:
        made.append(SlowGrammars())
        return made[-1]

    monkeypatch.setattr(structured_output, "Grammars", make)
    return made


async def test_a_grammar_that_takes_long_keeps_nobody_waiting(slow: list[SlowGrammars]) -> None:
    async with http_client(make_app()) as client:
        waiting = asyncio.create_task(
            client.post("/v1/chat/completions", json=CHAT | outputs(regex="a"))
        )
        await until(lambda: bool(slow))
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert not waiting.done()
        _from_thread(lambda: slow[0].future.set_exception(GrammarError("It is wrong.")))
        assert (await waiting).json()["error"]["message"].endswith("It is wrong.")


async def test_who_gives_up_does_not_end_the_compiling_for_others(
    slow: list[SlowGrammars],
) -> None:
    checks, grammar = GrammarChecks(), Grammar("regex", "a")
    hasty = asyncio.create_task(checks.check("p", grammar, served_model()))
    patient = asyncio.create_task(checks.check("p", grammar, served_model()))
    await asyncio.sleep(0)
    hasty.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hasty
    _from_thread(lambda: slow[0].future.set_result(Compiled(grammar, None, 0)))  # type: ignore[arg-type]
    await patient


async def test_a_wrong_grammar_of_who_has_given_up_is_no_error_of_the_server(
    slow: list[SlowGrammars],
) -> None:
    logged: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: logged.append(context["message"]))
    check = asyncio.create_task(GrammarChecks().check("p", Grammar("regex", "a"), served_model()))
    await asyncio.sleep(0)
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    _from_thread(lambda: slow[0].future.set_exception(GrammarError("It is wrong.")))
    slow.clear()
    await asyncio.sleep(0.01)
    del check
    gc.collect()
    assert not logged


async def test_the_deadline_counts_while_a_grammar_is_compiled(slow: list[SlowGrammars]) -> None:
    async with http_client(make_app(timeout_s=0.01)) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT | outputs(regex="a"))
    assert reply.status_code == DeadlineExceeded.http_status
    assert "grammar" in reply.json()["error"]["message"]


def _from_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
