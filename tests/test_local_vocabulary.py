"""Tokenizers with a token more or less than the model: no request can bring it to an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_local import body, chat, cluster, text
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model

NUM_ROWS = 260  # of the embedding and the head
BEYOND = "<beyond>"  # has the first id that is no row
AT_LIMITS = (0, 258, 259, 260, 261, 2**31 - 1, 2**31, 2**63, -1)
FIELDS_OF_IDS = ("stop_token_ids", "allowed_token_ids")
REASONING = "{% if enable_thinking %}<think>\n{% endif %}"


@pytest.fixture(params=[0, 3], ids=["fewer tokens than rows", "more tokens than rows"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return with_tokens(tmp_path, *("<last>", BEYOND, "</think>")[: request.param])


def with_tokens(directory: Path, *added: str) -> Path:
    """The tiny model with these tokens more in its tokenizer."""
    model = write_tiny_model(directory / "tiny")
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for content in added:
        last = tokenizer["added_tokens"][-1]
        token = last | {"id": last["id"] + 1, "content": content, "special": False}
        tokenizer["added_tokens"].append(token)
    file.write_text(json.dumps(tokenizer))
    template = {"chat_template": CHAT_TEMPLATE + REASONING, "eos_token": "<|im_end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(template))
    return model


BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": body("hi", 3),
    "/v1/messages": body("hi", 3),
    "/v1/messages/count_tokens": {"model": "tiny"},
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 3},
    "/tokenize": {"model": "tiny"},
}


def changes() -> Iterator[tuple[str, dict[str, Any]]]:
    """A path, and fields with a value at or beyond a limit."""
    chats, texts = "/v1/chat/completions", "/v1/completions"
    responses, messages = "/v1/responses", "/v1/messages"
    for token_id in AT_LIMITS:
        for path in (chats, texts):
            for name in FIELDS_OF_IDS:
                yield path, {name: [token_id]}
        for path in (chats, texts, responses):
            yield path, {"logit_bias": {str(token_id): 100}}
        yield responses, {"stop_token_ids": [token_id]}
        yield texts, {"prompt": [token_id]}
        yield texts, {"prompt": [[1], [token_id]]}
        yield chats, {"top_k": token_id}
        yield chats, {"guided_grammar": f"start: <[{token_id}]>"}
        yield chats, {"guided_grammar": f'start: "a" <[{token_id}]>'}
    for word in (BEYOND, "a" + BEYOND, BEYOND + "a", "</think>"):
        for path in (chats, texts):
            yield path, {"bad_words": [word]}
            yield path, {"stop": [word]}
            yield path, {"guided_choice": [word]}
            yield path, {"guided_regex": "a?" + word}
            yield path, {"guided_grammar": f'start: "{word}"'}
            yield path, {"guided_grammar": f"start: {word}"}
            schema = {"type": "object", "properties": {"x": {"const": word}}, "required": ["x"]}
            yield path, {"guided_json": schema, "max_tokens": 30}
        conversation = {"messages": [{"role": "user", "content": word}]}
        for path in (chats, messages, "/v1/messages/count_tokens", "/tokenize"):
            yield path, conversation
        answered = [*conversation["messages"], {"role": "assistant", "content": word}]
        yield messages, {"messages": answered}
        yield chats, {"messages": answered, "continue_final_message": True,
                      "add_generation_prompt": False}  # fmt: skip
        yield texts, {"prompt": word}
        yield texts, {"prompt": ["a", word], "echo": True, "logprobs": 1}
        yield responses, {"input": word}
        yield "/tokenize", {"prompt": word}
    for fields in ({}, {"guided_regex": "[a-z]{3}"}, {"response_format": {"type": "json_object"}}):
        for budget in (0, 2):
            thinking = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 12}
            yield chats, thinking | fields | {"thinking_token_budget": budget}
        yield chats, thinking | fields


async def test_every_value_is_answered_or_refused_and_the_engines_live(model: Path) -> None:
    async with cluster(model) as (running, client):
        before = text(await chat(client, "hi", 3))
        for path, fields in changes():
            answer = await client.post(path, json=BASES[path] | fields)
            assert answer.status_code in (200, 400), (path, fields, answer.text)
        assert text(await chat(client, "hi", 3)) == before
        for worker in running.workers:
            await worker.check()


async def test_a_prompt_of_such_a_token_is_refused_by_its_name(tmp_path: Path) -> None:
    async with cluster(with_tokens(tmp_path, "<last>", BEYOND)) as (_, client):
        for path, fields in (
            ("/v1/completions", {"prompt": f"a{BEYOND}"}),
            ("/v1/completions", {"prompt": [NUM_ROWS]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": BEYOND}]}),
        ):
            answer = await client.post(path, json=BASES[path] | fields)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == next(iter(fields))
            assert f"token id {NUM_ROWS} ('{BEYOND}') is not below {NUM_ROWS}" in error["message"]
