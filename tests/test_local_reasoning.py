"""Reasoning of the whole system: a request moves from prefill to decode while the model thinks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.test_local import LONG
from tests.test_local_structured import FORM, SCHEMA, messages, served
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model

OPEN = "{% if add_generation_prompt and thinking is not defined %}<think>{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its `</think>` is a token, and its template writes `<think>`."""
    directory = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "</think>"))
    config = directory / "tokenizer_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT_TEMPLATE + OPEN})
    )
    return directory


def reasoning_tokens(answer: Any) -> int:
    return int(answer.usage.completion_tokens_details.reasoning_tokens)


async def test_a_budget_is_kept_wherever_the_request_runs(model: Path) -> None:
    async with served(model) as (_, client):
        for content in ("hi", LONG):  # on one worker, and on two
            fields: Any = {"model": "tiny", "messages": messages(content), "temperature": 0}
            free = await client.chat.completions.create(max_tokens=30, **fields)
            assert reasoning_tokens(free) == 30 and free.choices[0].message.content is None
            for budget in (0, 1, 12):
                limited = await client.chat.completions.create(
                    max_tokens=30, extra_body={"thinking_token_budget": budget}, **fields
                )
                message: Any = limited.choices[0].message
                assert reasoning_tokens(limited) == budget
                thought = getattr(message, "reasoning_content", "")
                assert free.choices[0].message.reasoning_content.startswith(thought)
                assert limited.usage is not None and limited.usage.completion_tokens == 30
                assert message.content


async def test_a_schema_is_followed_behind_the_reasoning(model: Path) -> None:
    async with served(model) as (_, client):
        fields: Any = {"model": "tiny", "messages": messages(), "response_format": FORM}
        for budget in (0, 9):
            answer = await client.chat.completions.create(
                seed=3, extra_body={"thinking_token_budget": budget}, **fields
            )
            assert answer.choices[0].finish_reason == "stop"
            assert reasoning_tokens(answer) == budget
            jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
