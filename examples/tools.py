"""The model calls a function, and answers with what it returned."""

import json

from disagg import LLM, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def get_weather(city: str) -> str:
    return json.dumps({"city": city, "weather": "sunny"})


with LLM("demo-tools") as llm:
    params = SamplingParams(temperature=0, max_tokens=64)
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    (output,) = llm.chat(messages, params, tools=[WEATHER])
    (call,) = output.outputs[0].tool_calls
    print("call ->", call.name, call.arguments)
    asked = {"name": call.name, "arguments": call.arguments}
    messages += [
        {
            "role": "assistant",
            "tool_calls": [{"id": call.id, "type": "function", "function": asked}],
        },
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": get_weather(**json.loads(call.arguments)),
        },
    ]
    (output,) = llm.chat(messages, params, tools=[WEATHER])
    print("answer ->", output.outputs[0].text)
