"""Structured output of the whole system, by the real OpenAI client and a real (tiny) model."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

import disagg.engine.sched.grammar as grammar_module
from disagg.engine.sched.grammar import Compiled, Grammars, GrammarState
from disagg.errors import GrammarError
from disagg.local import LocalCluster
from disagg.messages import Grammar
from disagg.worker.worker import Worker
from tests.test_local import LONG, cluster, until_empty

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                 "maxItems": 4},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["kind", "ages", "name"],
    "additionalProperties": False,
}  # fmt: skip
FORM: Any = {
    "type": "json_schema",
    "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA},
}


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Wheel(BaseModel):
    color: Color
    size: int = Field(ge=1, le=30)


class Car(BaseModel):
    wheels: list[Wheel] = Field(min_length=1, max_length=3)
    spare: Wheel | None
    plate: str = Field(pattern=r"^[A-Z]{2}-[0-9]{3}$")


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[LocalCluster, openai.AsyncOpenAI]]:
    async with cluster(model) as (running, _):
        transport = httpx2.ASGITransport(running.ingress.app)
        async with httpx2.AsyncClient(transport=transport, timeout=60) as http:
            yield (
                running,
                openai.AsyncOpenAI(
                    api_key="none", base_url="http://local/v1", http_client=http, max_retries=0
                ),
            )


def messages(content: str = LONG) -> list[Any]:
    return [{"role": "user", "content": content}]


def check(text: str | None) -> None:
    assert text is not None
    jsonschema.validate(json.loads(text), SCHEMA)


async def test_answers_follow_a_schema(model: Path) -> None:
    async with served(model) as (running, client):
        seeds = range(4)
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="tiny", messages=messages(), response_format=FORM, seed=seed
                )
                for seed in seeds
            )
        )
        for answer in answers:
            assert answer.choices[0].finish_reason == "stop"
            check(answer.choices[0].message.content)
        assert len({answer.choices[0].message.content for answer in answers}) > 1
        for worker in running.workers:
            await until_empty(worker)


async def test_a_pydantic_model_is_parsed(model: Path) -> None:
    async with served(model) as (_, client):
        for seed in range(3):
            answer = await client.chat.completions.parse(
                model="tiny", messages=messages(), response_format=Car, seed=seed
            )
            car = answer.choices[0].message.parsed
            assert isinstance(car, Car) and 1 <= len(car.wheels) <= 3


async def test_choices_of_a_stream_interleave_and_validate(model: Path) -> None:
    async with served(model) as (_, client):
        stream = await client.chat.completions.create(
            model="tiny", messages=messages(), response_format=FORM, n=3, stream=True, seed=5
        )
        texts, ends = ["", "", ""], []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
    assert ends == ["stop"] * 3
    assert len(set(texts)) > 1
    for text in texts:
        check(text)


async def test_expressions_choices_and_grammars(model: Path) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": "[a-f]{3}[0-9]{2}"}, "[a-f]{3}[0-9]{2}"),
        ({"choice": ["maybe", "never", "maybe not"]}, "maybe|never|maybe not"),
        ({"grammar": 'start: "a" start "b" | "c"'}, "a*cb*"),
        ({"json_object": True}, r"\{.*"),
    ]
    async with served(model) as (_, client):
        for form, pattern in forms:
            body = {"structured_outputs": form}
            for temperature in (0.0, 1.0):
                text = await client.completions.create(
                    model="tiny", prompt="say", max_tokens=60, temperature=temperature, seed=2,
                    extra_body=body,
                )  # fmt: skip
                chat = await client.chat.completions.create(
                    model="tiny", messages=messages(), max_tokens=60, temperature=temperature,
                    seed=2, extra_body=body,
                )  # fmt: skip
                for said, why in (
                    (text.choices[0].text, text.choices[0].finish_reason),
                    (chat.choices[0].message.content or "", chat.choices[0].finish_reason),
                ):
                    is_cut = "grammar" in form and why == "length"  # perhaps before any "c"
                    assert re.fullmatch("a+" if is_cut else pattern, said, re.DOTALL), said


async def test_an_answer_that_is_cut_says_so(model: Path) -> None:
    async with served(model) as (_, client):
        answer = await client.chat.completions.create(
            model="tiny", messages=messages(), response_format=FORM, max_tokens=1
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "{"
        stopped = await client.chat.completions.create(
            model="tiny", messages=messages(), response_format=FORM, stop='"kind"'
        )
        assert stopped.choices[0].finish_reason == "stop"
        assert '"kind"' not in (stopped.choices[0].message.content or "")


async def test_a_schema_that_cannot_be_followed_is_a_bad_request(model: Path) -> None:
    async with served(model) as (_, client):
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="tiny", messages=messages(), response_format=form
            )
        assert refused.value.code == "invalid_grammar"
        assert refused.value.param == "response_format.json_schema.schema"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Rome"]}, "days": {"enum": [1, 2, 7]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


async def test_a_model_that_must_call_a_function_does(model: Path, tmp_path: Path) -> None:
    shows_tools = tmp_path / "tiny"
    shutil.copytree(model, shows_tools)
    config_file = shows_tools / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["chat_template"] = "{{ tools | tojson }}" + config["chat_template"]
    config_file.write_text(json.dumps(config))
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
    async with served(shows_tools) as (running, client):
        for seed, choice in enumerate(choices):
            answer = await client.chat.completions.create(
                model="tiny", messages=messages("hi"), tools=[WEATHER], tool_choice=choice,
                parallel_tool_calls=False, temperature=1, seed=seed,
            )  # fmt: skip
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.type == "function" and call.function.name == "weather"
            schema = WEATHER["function"]["parameters"]
            jsonschema.validate(json.loads(call.function.arguments), schema)
            assert answer.choices[0].finish_reason == "tool_calls"
        for worker in running.workers:
            await until_empty(worker)


class SlowGrammars:
    """Stands in for a worker's `Grammars`: nothing is compiled until the test says so."""

    def __init__(self, worker: Worker) -> None:
        self.grammars = worker._engine.grammars
        self.future: Future[Compiled] = Future()
        self.worker = worker
        worker._engine.grammars = self  # type: ignore[assignment]

    def is_ready(self, grammar: Grammar) -> bool:
        if not self.future.done():
            return False
        self.future.result()
        return True

    def follow(self, grammar: Grammar, num_prompt_tokens: int) -> GrammarState:
        assert self.grammars is not None
        return self.grammars.follow(grammar, num_prompt_tokens)


async def until_waiting(num_sequences: int, slow: list[SlowGrammars]) -> None:
    async with asyncio.timeout(120):
        while sum(len(each.worker._core._kv_import._queued) for each in slow) != num_sequences:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> str | None:
    answer = await client.chat.completions.create(
        model="tiny", messages=messages(), **{"temperature": 0, **fields}
    )
    content: str | None = answer.choices[0].message.content
    return content


async def test_nobody_waits_for_the_grammar_of_another(model: Path) -> None:
    body = {"structured_outputs": {"regex": "[xyz]{9}"}}
    async with served(model) as (running, client):
        expected = await ask(client, extra_body=body, seed=1)
        slow = [SlowGrammars(worker) for worker in running.workers]
        waiting = asyncio.create_task(ask(client, extra_body=body, seed=1))
        await until_waiting(1, slow)
        assert await ask(client, max_tokens=5)
        assert not waiting.done()
        for each in slow:
            each.future.set_result(None)  # type: ignore[arg-type]
        assert await waiting == expected
        for worker in running.workers:
            await until_empty(worker)


async def test_a_client_that_leaves_while_its_grammar_is_compiled_is_forgotten(
    model: Path,
) -> None:
    async with served(model) as (running, client):
        slow = [SlowGrammars(worker) for worker in running.workers]
        asking = asyncio.create_task(ask(client, extra_body={"guided_regex": "a{9}"}))
        await until_waiting(1, slow)
        asking.cancel()
        await until_waiting(0, slow)
        for worker in running.workers:
            await until_empty(worker)


async def test_a_grammar_that_a_worker_cannot_follow_ends_its_request_alone(model: Path) -> None:
    async with served(model) as (running, client):
        slow = [SlowGrammars(worker) for worker in running.workers]
        asking = asyncio.create_task(ask(client, extra_body={"guided_regex": "a{9}"}))
        await until_waiting(1, slow)
        for each in slow:
            each.future.set_exception(GrammarError("This worker has no llguidance."))
        with pytest.raises(openai.BadRequestError, match="no llguidance"):
            await asking
        assert await ask(client, max_tokens=5)
        for worker in running.workers:
            await until_empty(worker)


class Watch:
    """Notes who asks a worker's grammars to compile, or waits for them, inside a step."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, grammars = worker._engine, worker._engine.grammars
        assert grammars is not None
        self.num_forgotten = 0
        self.wrong: list[str] = []
        is_stepping, step = False, engine.step

        def watched_step() -> Any:
            nonlocal is_stepping
            is_stepping = True
            try:
                return step()
            finally:
                is_stepping = False

        def watched(name: str, call: Any) -> Any:
            def outside(*args: Any) -> Any:
                if is_stepping:
                    self.wrong.append(name)
                return call(*args)

            return outside

        def forget(worn: Compiled) -> None:
            self.num_forgotten += 1
            Grammars.forget(grammars, worn)

        monkeypatch.setattr(engine, "step", watched_step)
        for name in ("compile", "follow"):
            monkeypatch.setattr(grammars, name, watched(name, getattr(grammars, name)))
        monkeypatch.setattr(grammars, "forget", forget)


async def test_a_grammar_that_is_worn_out_is_never_compiled_inside_a_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers use up the states that they share. Those under way come back when it is compiled."""
    limits = grammar_module._LIMITS | {"max_lexer_states": 120}
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=8)) for _ in range(400)]
    body = {"structured_outputs": {"choice": words}}
    async with served(model) as (running, client):
        watches = [Watch(worker, monkeypatch) for worker in running.workers]
        for first in range(0, 48, 8):
            answers = await asyncio.gather(
                *(
                    ask(client, extra_body=body, temperature=2, seed=seed)
                    for seed in range(first, first + 8)
                )
            )
            assert set(answers) <= set(words)
        assert sum(watch.num_forgotten for watch in watches) > 0, "nothing was worn out"
        assert [watch.wrong for watch in watches] == [[], []]
        for worker in running.workers:
            await until_empty(worker)
