"""Requests that must be refused, as data: what is changed in a good one, and what comes back."""

from __future__ import annotations

from typing import Any, NamedTuple

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
ABSENT = object()


class Refusal(NamedTuple):
    change: dict[str, Any]
    code: str
    param: str | None
    status: int = 400


BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"[]", "invalid_json_object"),
    (b"42", "invalid_json_object"),
    (b'"x"', "invalid_json_object"),
    (b"null", "invalid_json_object"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"a":' * 100_000, "invalid_json"),
    (b'{"a":' * 600 + b"1" + b"}" * 600, "invalid_json"),
    (b'{"tools":' + b"[" * 129 + b"]" * 129 + b"}", "invalid_json"),
    (b'{"a":[' + b"[]," * 300_000 + b"1]}", "too_many_values"),
    (b'{"a":[' + b"1," * (1 << 20) + b"1]}", "too_many_values"),
    (b'{"a":"' + b"[" * 300_000 + b'","b":[' + b"{}," * 300_000 + b"1]}", "too_many_values"),
    (b'{"model":"\xff\xfe"}', "invalid_json"),
    ('{"model":"tiny"}'.encode("utf-16"), "invalid_json"),
    (b'{"temperature":NaN}', "invalid_json"),
    (b'{"temperature":-Infinity}', "invalid_json"),
    (b'{"temperature":1e999}', "invalid_json"),
    (b'{"n":1' + b"0" * 5000 + b"}", "invalid_json"),
    (b'{"n":1,"n":9}', "duplicate_key"),
    (b'{"metadata":{"a":"1","a":"2"}}', "duplicate_key"),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "invalid_unicode"),
    (b'{"model":"tiny"} x', "invalid_json"),
]


def _message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


CHAT_REFUSALS = [
    # required fields and types
    Refusal({"model": "nope"}, "model_not_found", "model", 404),
    Refusal({"model": ""}, "model_not_found", "model", 404),
    Refusal({"model": "../x"}, "model_not_found", "model", 404),
    Refusal({"model": 5}, "invalid_type", "model"),
    Refusal({"model": "m" * 10_000}, "string_above_max_length", "model"),
    Refusal({"messages": ABSENT}, "missing_required_parameter", "messages"),
    Refusal({"messages": []}, "empty_array", "messages"),
    Refusal({"messages": "hi"}, "invalid_type", "messages"),
    Refusal({"messages": [None]}, "invalid_type", "messages[0]"),
    Refusal({"messages": [5]}, "invalid_type", "messages[0]"),
    Refusal(_message(role="bogus"), "invalid_value", "messages[0].role"),
    Refusal(_message(role=5), "invalid_type", "messages[0].role"),
    Refusal({"messages": [{"content": "a"}]}, "missing_required_parameter", "messages[0].role"),
    Refusal({"messages": [{"role": "user"}]}, "invalid_type", "messages[0].content"),
    Refusal(_message(content=None), "invalid_type", "messages[0].content"),
    Refusal(_message(content=5), "invalid_type", "messages[0].content"),
    Refusal(_message(content={}), "invalid_type", "messages[0].content"),
    Refusal(_message(content=[]), "empty_array", "messages[0].content"),
    Refusal(
        _message(content=[{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]),
        "unsupported_content",
        "messages[0].content[0].type",
    ),
    Refusal(
        _message(content=[{"type": "text"}]),
        "missing_required_parameter",
        "messages[0].content[0].text",
    ),
    Refusal(_message(role="tool"), "missing_required_parameter", "messages[0].tool_call_id"),
    Refusal({"stream": "yes"}, "invalid_type", "stream"),
    Refusal({"stream": 1}, "invalid_type", "stream"),
    Refusal({"priority": -1}, "invalid_value", "priority"),
    Refusal({"priority": "1"}, "invalid_type", "priority"),
    Refusal({"priority": 1001}, "integer_above_max_value", "priority"),
    Refusal({"user": "u" * 10**6}, "string_above_max_length", "user"),
    Refusal({"metadata": {str(i): "" for i in range(17)}}, "array_above_max_length", "metadata"),
    # fields of our own machinery, code, tensors, and what is not implemented
    *(
        Refusal({name: {"a": 1}}, "unsupported_parameter", name)
        for name in (
            "bootstrap_room", "chat_template", "ec_transfer_params", "kv_transfer_params",
            "logits_processors", "prompt_embeds", "request_id", "rid", "vllm_xargs",
            "prompt_logprobs", "audio",
        )
    ),
    Refusal(
        {"chat_template_kwargs": {"chat_template": "x"}},
        "unsupported_parameter",
        "chat_template_kwargs.chat_template",
    ),
    Refusal(
        {"chat_template_kwargs": {"tokenize": True}},
        "unsupported_parameter",
        "chat_template_kwargs.tokenize",
    ),
    Refusal({"tools": [{"type": "function"}]},
            "missing_required_parameter", "tools[0].function"),
    Refusal({"tools": [{"type": "retrieval", "function": {"name": "f"}}]},
            "invalid_value", "tools[0].type"),
    Refusal({"tools": [{"type": "function", "function": {"name": "f g"}}]},
            "invalid_value", "tools[0].function.name"),
    Refusal({"tools": [{"type": "function", "function": {"name": "f"}}]},
            "unsupported_parameter", "tools"),  # the model's template does not show them
    Refusal({"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
            "invalid_value", "tools[1].function.name"),
    Refusal({"tool_choice": "bogus"}, "invalid_value", "tool_choice"),
    Refusal({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    Refusal({"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "invalid_value", "tool_choice"),
    Refusal({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
    Refusal({"structured_outputs": {"regex": "("}}, "invalid_grammar", "structured_outputs.regex"),
    Refusal({"guided_json": {"a": 1}, "guided_regex": "a"}, "invalid_value", "guided_regex"),
    Refusal({"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
    Refusal({"bad_words": [""]}, "unsupported_parameter", "bad_words"),
    Refusal({"continue_final_message": True}, "unsupported_parameter", "continue_final_message"),
    # numbers
    Refusal({"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    Refusal({"temperature": 2.1}, "decimal_above_max_value", "temperature"),
    Refusal({"temperature": "1"}, "invalid_type", "temperature"),
    Refusal({"temperature": True}, "invalid_type", "temperature"),
    Refusal({"top_p": 0}, "decimal_below_min_value", "top_p"),
    Refusal({"top_p": 1.1}, "decimal_above_max_value", "top_p"),
    Refusal({"top_k": -2}, "integer_below_min_value", "top_k"),
    Refusal({"top_k": 1.5}, "invalid_type", "top_k"),
    Refusal({"min_p": 1.1}, "decimal_above_max_value", "min_p"),
    Refusal({"presence_penalty": 2.1}, "decimal_above_max_value", "presence_penalty"),
    Refusal({"frequency_penalty": -2.1}, "decimal_below_min_value", "frequency_penalty"),
    Refusal({"repetition_penalty": 0}, "decimal_below_min_value", "repetition_penalty"),
    Refusal({"repetition_penalty": -1}, "decimal_below_min_value", "repetition_penalty"),
    Refusal({"n": 0}, "integer_below_min_value", "n"),
    Refusal({"n": -1}, "integer_below_min_value", "n"),
    Refusal({"n": 1.5}, "invalid_type", "n"),
    Refusal({"n": 9}, "integer_above_max_value", "n"),
    Refusal({"n": 10**9}, "integer_above_max_value", "n"),
    Refusal({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    Refusal({"max_tokens": -1}, "integer_below_min_value", "max_tokens"),
    Refusal({"max_tokens": 2**31}, "integer_above_max_value", "max_tokens"),
    Refusal({"max_tokens": 2**63}, "integer_above_max_value", "max_tokens"),
    Refusal({"max_tokens": 2**64}, "integer_above_max_value", "max_tokens"),
    Refusal({"max_tokens": "5"}, "invalid_type", "max_tokens"),
    Refusal({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
    Refusal({"max_tokens": 512}, "context_length_exceeded", "max_tokens"),
    Refusal({"min_tokens": 5}, "invalid_value", "min_tokens"),
    Refusal({"min_tokens": -1}, "integer_below_min_value", "min_tokens"),
    Refusal({"max_tokens": ABSENT, "min_tokens": 600}, "invalid_value", "min_tokens"),
    Refusal({"seed": 2**63}, "integer_above_max_value", "seed"),
    Refusal({"seed": -(2**63) - 1}, "integer_below_min_value", "seed"),
    Refusal({"seed": 1.5}, "invalid_type", "seed"),
    Refusal({"logprobs": 5}, "invalid_type", "logprobs"),
    Refusal({"logprobs": True, "top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    Refusal({"logprobs": True, "top_logprobs": -1}, "integer_below_min_value", "top_logprobs"),
    Refusal({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    Refusal(_message(content="fox " * 600), "context_length_exceeded", "messages"),
    Refusal(_message(content="a" * 10**6), "context_length_exceeded", "messages"),
    # lists and strings
    Refusal({"stop": ""}, "invalid_value", "stop"),
    Refusal({"stop": [""]}, "invalid_value", "stop[0]"),
    Refusal({"stop": ["a"] * 5}, "array_above_max_length", "stop"),
    Refusal({"stop": ["a" * 10**6]}, "string_above_max_length", "stop[0]"),
    Refusal({"stop": [5]}, "invalid_type", "stop[0]"),
    Refusal({"stop": {}}, "invalid_type", "stop"),
    Refusal({"stop_token_ids": [-1]}, "integer_below_min_value", "stop_token_ids[0]"),
    Refusal({"stop_token_ids": [2**40]}, "integer_above_max_value", "stop_token_ids[0]"),
    Refusal({"stop_token_ids": ["x"]}, "invalid_type", "stop_token_ids[0]"),
    Refusal({"stop_token_ids": [10**6]}, "invalid_value", "stop_token_ids"),
    Refusal({"stream_options": {}}, "invalid_value", "stream_options"),
    Refusal(
        {"stream": True, "stream_options": {"include_usage": "x"}},
        "invalid_type",
        "stream_options.include_usage",
    ),
    Refusal({"cache_salt": ""}, "invalid_value", "cache_salt"),
    Refusal({"cache_salt": "a\0"}, "invalid_value", "cache_salt"),
    Refusal({"cache_salt": "a\n"}, "invalid_value", "cache_salt"),
    Refusal({"cache_salt": "../"}, "invalid_value", "cache_salt"),
    Refusal({"cache_salt": "a" * 10**6}, "invalid_value", "cache_salt"),
]  # fmt: skip

TEXT_REFUSALS = [
    Refusal({"prompt": ABSENT}, "missing_required_parameter", "prompt"),
    Refusal({"prompt": []}, "empty_array", "prompt"),
    Refusal({"prompt": [[]]}, "empty_array", "prompt[0]"),
    Refusal({"prompt": ""}, "invalid_value", "prompt"),
    Refusal({"prompt": [-1]}, "integer_below_min_value", "prompt[0]"),
    Refusal({"prompt": [2**31]}, "integer_above_max_value", "prompt[0]"),
    Refusal({"prompt": [10**6]}, "invalid_value", "prompt"),
    Refusal({"prompt": [[1], [10**6]]}, "invalid_value", "prompt"),
    Refusal({"prompt": ["a", 5]}, "invalid_type", "prompt[1]"),
    Refusal({"prompt": [5, "a"]}, "invalid_type", "prompt[1]"),
    Refusal({"prompt": [True]}, "invalid_type", "prompt[0]"),
    Refusal({"prompt": [None]}, "invalid_type", "prompt[0]"),
    Refusal({"prompt": {}}, "invalid_type", "prompt"),
    Refusal({"prompt": ["a"] * 10_000}, "array_above_max_length", "prompt"),
    Refusal({"prompt": ["a"] * 65, "n": 2}, "array_above_max_length", "prompt"),
    Refusal({"prompt": [3] * 509}, "context_length_exceeded", "max_tokens"),
    Refusal({"prompt": [3] * 512}, "context_length_exceeded", "prompt"),
    Refusal({"prompt": ["a", [3]]}, "invalid_type", "prompt[1]"),
    Refusal({"logprobs": 6}, "integer_above_max_value", "logprobs"),
    Refusal({"best_of": 21}, "integer_above_max_value", "best_of"),
    Refusal({"best_of": 2}, "invalid_value", "best_of"),
    Refusal({"suffix": "end"}, "unsupported_parameter", "suffix"),
    *(
        Refusal({name: {"a": 1}}, "unsupported_parameter", name)
        for name in (
            "bootstrap_host",
            "bootstrap_room",
            "ec_transfer_params",
            "kv_transfer_params",
            "prompt_embeds",
            "request_id",
            "rid",
            "vllm_xargs",
        )
    ),
    Refusal({"echo": True, "logprobs": 1}, "invalid_value", "echo"),
]


def changed(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (base | change).items() if value is not ABSENT}
