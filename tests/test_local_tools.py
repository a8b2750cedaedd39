"""Tools from end to end with a bundled model: offered, called where it must, and answered."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from disagg.config import ASSETS
from tests.test_local_structured import served

MODEL = ASSETS / "demo-large"
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "add"}}


async def test_a_bundled_model_is_offered_tools_calls_them_and_reads_their_results() -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 12 + 7?"}]
    asked: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 120}
    async with served(MODEL) as (_, client):
        asked["model"] = (await client.models.list()).data[0].id
        free = await client.chat.completions.create(tools=[ADD], **asked)
        assert free.choices[0].message.content == "19", "it learned nothing of calls"
        forced = await client.chat.completions.create(tools=[ADD], tool_choice=NAMED, **asked)
        (call,) = forced.choices[0].message.tool_calls or []
        assert call.type == "function" and forced.choices[0].finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
        streamed = await client.chat.completions.create(
            tools=[ADD], tool_choice=NAMED, stream=True, **asked
        )
        arguments = ""
        async for chunk in streamed:
            for delta in chunk.choices[0].delta.tool_calls or []:
                arguments += (delta.function and delta.function.arguments) or ""
        assert arguments == call.function.arguments
        num_before = forced.usage.prompt_tokens if forced.usage else 0
        messages += [
            forced.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "19"},
        ]
        after = await client.chat.completions.create(tools=[ADD], **asked)
        assert after.choices[0].message.content
        assert after.usage is not None and after.usage.prompt_tokens > num_before
