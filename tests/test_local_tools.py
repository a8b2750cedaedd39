"""Tools from end to end with a bundled model: offered, called where it must, and answered."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from disagg.config import ASSETS
from tests.test_local_structured import served
from tests.tool_calls import DIALOGUES, FUNCTION

MODEL = ASSETS / "demo-tools"
WEATHER: Any = {"type": "function", "function": FUNCTION}
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


async def test_a_bundled_model_calls_functions_where_they_fit_and_where_it_must() -> None:
    def asked(content: str, tools: list[Any]) -> dict[str, Any]:
        return {
            "model": name,
            "messages": [{"role": "user", "content": content}],
            "tools": tools,
            "max_tokens": 120,
        }

    async with served(MODEL) as (_, client):
        name = (await client.models.list()).data[0].id
        for dialogue in DIALOGUES:
            await dialogue(client, name)
        create = client.chat.completions.create
        both = "What is 12 + 7? What is the weather in Rome?"
        answer = await create(**asked(both, [WEATHER, ADD]))
        calls: list[Any] = answer.choices[0].message.tool_calls or []
        assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == [
            ("add", {"a": 12, "b": 7}),
            ("get_weather", {"city": "Rome"}),
        ]
        one = await create(parallel_tool_calls=False, **asked(both, [WEATHER, ADD]))
        (only,) = one.choices[0].message.tool_calls or []
        assert only.type == "function" and only.function.name == "add"
        unfit = await create(**asked("What is the price of a lamp?", [WEATHER, ADD]))
        assert unfit.choices[0].message.content == "I do not know."
        assert not unfit.choices[0].message.tool_calls
        forced = await create(tool_choice=NAMED, **asked("What is the weather in Rome?", [ADD]))
        (call,) = forced.choices[0].message.tool_calls or []
        assert call.type == "function" and forced.choices[0].finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
