"""What a large request needs for long is done in threads, or refused before it is done."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from disagg.api import json_body
from disagg.api.json_body import MAX_DEPTH, load_object
from disagg.api.prompts import MANY_CHARS_A_TOKEN
from disagg.errors import InvalidRequest
from disagg.text.chat_template import ChatTemplate
from disagg.text.tokenizer import Tokenizer
from tests.api.apps import http_client, make_app
from tests.api.fakes import TOKENIZER, served_model
from tests.api.openai.test_tools import HERMES, LOOK

JSON = {"content-type": "application/json"}
PAD = " " * json_body.INLINE_NBYTES


def is_on_loop() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": [5, 6], "echo": True}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_large_bodies_are_read_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, url: str, fields: dict[str, Any]
) -> None:
    seen = []

    def load(body: bytes) -> dict[str, Any]:
        seen.append(is_on_loop())
        return load_object(body)

    monkeypatch.setattr(json_body, "load_object", load)
    small = json.dumps(fields).encode()
    async with http_client(make_app()) as client:
        for body in (small, small + PAD.encode()):
            reply = await client.post(url, content=body, headers=JSON)
            assert reply.status_code == 200, reply.text
    assert seen == [True, False]


async def test_many_ids_are_made_into_text_off_the_loop() -> None:
    """Repeating prompts, naming blocks and spelling tokens take time for each token."""
    seen: dict[str, list[bool]] = {}

    class Watched(Tokenizer):
        def decode(self, *args: Any, **options: Any) -> str:
            seen.setdefault("decode", []).append(is_on_loop())
            return super().decode(*args, **options)

        def token_text(self, token_id: int) -> str:
            seen.setdefault("token_text", []).append(is_on_loop())
            return super().token_text(token_id)

    model = replace(
        served_model(max_model_len=1 << 20), tokenizer=Watched(TOKENIZER.core), block_size=1024
    )
    large = json_body.INLINE_NBYTES
    async with http_client(make_app(None, model)) as client:
        body = {"prompt": [5] * large, "echo": True, "max_tokens": 1}
        reply = await client.post("/v1/completions", json=body)
        assert reply.json()["choices"][0]["text"].startswith(TOKENIZER.decode([5] * large))
        assert (await client.post("/detokenize", json={"tokens": [5] * large})).status_code == 200
        assert seen["decode"] == [False, False]
        body = {"prompt": "the quick fox " * 6000, "return_token_strs": True}
        reply = await client.post("/tokenize", json=body)
        assert "".join(reply.json()["token_strs"]) == body["prompt"]
    assert not any(seen["token_text"])


async def test_long_conversations_are_rendered_in_few_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thread that computes in Python delays the loop; those that encode let it run."""
    names: set[str] = set()
    render = ChatTemplate.render

    def watched(*args: Any, **options: Any) -> str:
        names.add(threading.current_thread().name)
        return render(*args, **options)

    monkeypatch.setattr(ChatTemplate, "render", watched)
    messages = [{"role": "user", "content": "the quick fox " * 1000}]
    async with http_client(make_app(None, served_model(max_model_len=1 << 20))) as client:
        asked = [client.post("/tokenize", json={"messages": messages}) for _ in range(16)]
        assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}
    assert {name.rpartition("_")[0] for name in names} == {"render"}
    assert len(names) <= 2


def never(*args: Any, **options: Any) -> Any:
    raise AssertionError("this must not begin")


@pytest.mark.parametrize("unit", ["[],", "1,", "{},", '"",', "[[[]]],"])
def test_values_are_counted_before_any_is_made(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    monkeypatch.setattr("json.loads", never)
    body = '{"a":[' + unit * (15_000_000 // len(unit)) + "1]}"
    with pytest.raises(InvalidRequest, match="too many values") as refused:
        load_object(body.encode())
    assert refused.value.code == "too_many_values"


@pytest.mark.parametrize("text", ["[{,", 'say \\"[{,', "\\\\[{,", "[{, \\n"])
def test_what_stands_in_strings_is_no_value(text: str) -> None:
    body = '{"content":"' + text * 800_000 + '","n":[1,2]}'
    assert len(load_object(body.encode())["content"]) >= 800_000


def test_many_ids_fit() -> None:
    assert len(load_object(b'{"prompt":[' + b"31," * 1_000_000 + b"1]}")["prompt"]) == 1_000_001


@pytest.mark.parametrize("body", [b'{"a":[[]]}', b'{"a":', b'{"a":1,"a":2}'])
def test_garbage_is_collected_after_a_body_as_before(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        load_object(body)
    assert gc.isenabled()


def test_depth_counts_levels_not_lists() -> None:
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert load_object(f'{{"a":{deep},"b":{deep}}}'.encode())
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        load_object(f'{{"a":[{deep}]}}'.encode())


async def test_lengths_are_checked_before_ids_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("disagg.api.service.check_ids", never)
    monkeypatch.setattr(Tokenizer, "decode", never)
    async with http_client(make_app()) as client:
        body = {"prompt": [5] * 10_000, "echo": True}
        reply = await client.post("/v1/completions", json=body)
        assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_a_text_that_is_clearly_too_long_is_not_encoded_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its length alone does not say so: `longest_num_chars` is that of the longest token."""
    app = make_app()
    monkeypatch.setattr(Tokenizer, "encode", never)
    monkeypatch.setattr(Tokenizer, "encode_chat", never)
    long = "a" * (MANY_CHARS_A_TOKEN * 512 + 1000)
    assert len(long) < 512 * TOKENIZER.longest_num_chars
    async with http_client(app) as client:
        for url, body in (
            ("/v1/completions", {"prompt": long}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ):
            reply = await client.post(url, json=body)
            assert reply.json()["error"]["code"] == "context_length_exceeded"


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": messages, "max_tokens": 1}


SHOWS_CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"a": "\ud800"}',
        r'{"\uDFFF": 1}',
        "[" * 600 + "]" * 600,
        '{"a":' * 900 + "1" + "}" * 900,
        "[" * 100_000,
        '{"a": ',
    ],
    ids=lambda arguments: arguments[:12],
)
async def test_arguments_that_no_prompt_can_hold_as_json_are_shown_as_written(
    arguments: str,
) -> None:
    model = replace(served_model(max_model_len=1 << 20), template=ChatTemplate(SHOWS_CALLS, {}))
    async with http_client(make_app(None, model)) as client:
        reply = await client.post("/v1/chat/completions", json=calling(arguments))
        assert reply.status_code == 200, reply.text
        reply = await client.post("/tokenize", json=calling(arguments))
        assert TOKENIZER.decode(reply.json()["tokens"]).startswith(arguments)


async def test_values_of_arguments_are_counted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    many = "[" + "[]," * 300_000 + "1]"
    loads: Callable[..., Any] = json.loads

    def few(text: str, **options: Any) -> Any:
        assert text != many
        return loads(text, **options)

    monkeypatch.setattr("json.loads", few)
    model = replace(served_model(), template=ChatTemplate("{{ messages[0].role }}", {}))
    async with http_client(make_app(None, model)) as client:
        reply = await client.post("/v1/chat/completions", json=calling(many))
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("depth", [130, 600, 750, 900, 990, 5000])
async def test_deep_schemas_of_tools_are_a_refusal(depth: int) -> None:
    schema = '{"a":' * depth + "1" + "}" * depth
    tool = json.dumps(LOOK).replace('"parameters": {', f'"parameters": {{"deep": {schema},')
    body = '{"messages":[{"role":"user","content":"hi"}],"tools":[' + tool + "]}"
    async with http_client(make_app(None, served_model(template=HERMES))) as client:
        for url in ("/v1/chat/completions", "/tokenize"):
            reply = await client.post(url, content=body, headers=JSON)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


def test_an_integer_of_too_many_digits_is_refused_in_the_words_of_the_api() -> None:
    with pytest.raises(InvalidRequest, match="an integer has 5001 digits, which is too many"):
        load_object(b'{"n":1' + b"0" * 5000 + b"}")
