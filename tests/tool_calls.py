"""What a client and demo-tools say to each other: a call that is streamed, its result, an answer.

The model decides for the call itself (`tool_choice` is "auto"), and no grammar helps it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai

QUESTION = "What is the weather in Paris?"
ARGUMENTS = {"city": "Paris"}
RESULT = json.dumps({"temperature": 21})
ANSWER = "The temperature is 21."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": SCHEMA,
}


async def chat(client: openai.AsyncOpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", "function": FUNCTION}
    asked: dict[str, Any] = {"model": model, "tools": [tool], "tool_choice": "auto"}
    stream = await client.chat.completions.create(messages=messages, stream=True, **asked)
    deltas: list[Any] = []
    reasons, said = [], ""
    async for chunk in stream:
        deltas += chunk.choices[0].delta.tool_calls or []
        said += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    first, *later = deltas
    assert first.id and first.function and first.function.name == "get_weather"
    pieces = [each.function.arguments for each in later if each.function]
    assert len(pieces) > 2, "arguments come as they are generated"
    arguments = "".join((first.function.arguments or "", *map(str, pieces)))
    assert json.loads(arguments) == ARGUMENTS
    assert reasons[-1] == "tool_calls" and not said
    call = {"name": "get_weather", "arguments": arguments}
    messages += [
        {
            "role": "assistant",
            "tool_calls": [{"id": first.id, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": first.id, "content": RESULT},
    ]
    answer = await client.chat.completions.create(messages=messages, **asked)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"


async def responses(client: openai.AsyncOpenAI, model: str) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", "strict": False, **FUNCTION}
    asked: dict[str, Any] = {"model": model, "tools": [tool]}
    pieces, done = [], None
    stream = await client.responses.create(input=items, stream=True, **asked)
    async for event in stream:
        if event.type == "response.function_call_arguments.delta":
            pieces.append(event.delta)
        if event.type == "response.completed":
            done = event.response
    assert len(pieces) > 2 and json.loads("".join(pieces)) == ARGUMENTS
    assert done is not None
    (call,) = done.output
    assert call.type == "function_call" and call.name == "get_weather"
    items += [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": RESULT},
    ]
    answer = await client.responses.create(input=items, **asked)
    assert answer.output_text == ANSWER


async def messages(client: openai.AsyncOpenAI, model: str) -> None:
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    description = FUNCTION["description"]
    tool = {"name": "get_weather", "description": description, "input_schema": SCHEMA}
    asked = {"model": model, "max_tokens": 100, "tools": [tool], "messages": said}
    streamed = await client.post("/messages", body={**asked, "stream": True}, cast_to=str)
    lines = [line.removeprefix("data: ") for line in streamed.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    (block,) = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert len(pieces) > 2 and json.loads("".join(pieces)) == ARGUMENTS
    (end,) = [e["delta"] for e in events if e["type"] == "message_delta"]
    assert end["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
    said += [
        {"role": "assistant", "content": [{**block, "input": ARGUMENTS}]},
        {"role": "user", "content": [result]},
    ]
    answer = json.loads(await client.post("/messages", body=asked, cast_to=str))
    assert answer["content"] == [{"type": "text", "text": ANSWER}]


DIALOGUES: tuple[Callable[[openai.AsyncOpenAI, str], Awaitable[None]], ...] = (
    chat,
    responses,
    messages,
)
