"""The second step of a request: from OpenAI's fields to a `Wanted`. Pure.

Everything that can be refused without a tokenizer is refused here, by the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from disagg.api.json_body import invalid_field
from disagg.api.openai.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Sampled,
    TokenId,
    TokenizeRequest,
)
from disagg.api.openai.structured_output import wanted_grammar
from disagg.api.openai.tool_calls import CallSyntax
from disagg.api.openai.tools import call_syntax, check_tools, offered, required_calls
from disagg.api.refusals import invalid_value, missing_parameter, unsupported
from disagg.api.served_model import ServedModel
from disagg.api.wanted import Conversation, JsonText, Prompt, Text, Wanted
from disagg.errors import InvalidRequest
from disagg.messages import Grammar, SamplingParams

MAX_NUM_CHOICES = 128  # prompts * n of one request
GREEDY_BELOW = 1e-5  # a temperature this small overflows the division and means greedy

# What a request and `SamplingParams` call the same is handed on by its name.
_LEFT_TO_LATER_STEPS = ("max_tokens", "seed", "stop_token_ids")
_SAMPLING = [
    name
    for name in SamplingParams.__struct_fields__
    if name in Sampled.__struct_fields__ and name not in _LEFT_TO_LATER_STEPS
]
_TEMPLATE_ARGUMENTS = ("enable_thinking", "reasoning_effort", "thinking")


def understand_chat(request: ChatRequest, model: ServedModel, min_priority: int) -> Wanted:
    """
    Args:
        min_priority: the lowest number that its sender may ask for.

    Raises:
        InvalidRequest: two fields contradict each other, or the model cannot do what is asked.
    """
    if request.top_logprobs and not request.logprobs:
        raise invalid_value("top_logprobs", "It needs logprobs: true.")
    check_tools(request)
    conversation = _conversation(request, offered(request))
    calls = call_syntax(request, model)
    grammar = wanted_grammar(request, required_calls(request))
    return _wanted(request, model, min_priority, [conversation], grammar, calls)


def understand_completion(
    request: CompletionRequest, model: ServedModel, min_priority: int
) -> Wanted:
    """As `understand_chat`."""
    num_choices = request.n or 1
    if request.best_of is not None and request.best_of != num_choices:
        raise invalid_value(
            "best_of", f"Only best_of = n ({num_choices}) is supported: nothing is discarded."
        )
    if request.echo and request.logprobs is not None:
        raise invalid_value(
            "echo", "With logprobs it needs the prompt's log-probabilities, which are not kept."
        )
    prompts, grammar = _prompts(request), wanted_grammar(request)
    wanted = _wanted(request, model, min_priority, prompts, grammar)
    return replace(wanted, echo=bool(request.echo))


def understand_tokenize(request: TokenizeRequest) -> Prompt:
    """Raises `InvalidRequest`."""
    conversation = _conversation(request, request.tools or ())
    if (request.prompt is None) == (request.messages is None):
        raise invalid_value("prompt", "Give either prompt or messages.")
    if request.prompt is None:
        return conversation
    return Text(request.prompt, request.add_special_tokens is not False)


def _wanted(
    request: ChatRequest | CompletionRequest,
    model: ServedModel,
    min_priority: int,
    prompts: Sequence[Prompt],
    grammar: tuple[str, Grammar] | None,
    calls: CallSyntax | None = None,
) -> Wanted:
    """What chats and completions have in common."""
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options", "It needs stream: true.")
    limit, least = request.token_limit, request.min_tokens
    if limit is not None and least is not None and least > limit:
        raise invalid_value("min_tokens", f"{least} is above max_tokens, {limit}.")
    stop = request.stop or ()
    return Wanted(
        model=model,
        prompts=prompts,
        prompt_param=request.prompt_field,
        sampling=_sampling(request, model),
        max_tokens=limit,
        default_max_tokens=request.default_token_limit,
        seed=request.seed,
        grammar=grammar,
        num_choices=request.n or 1,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(request.include_stop_str_in_output),
        # Some models mark their calls by control tokens.
        skip_special_tokens=calls is None and request.skip_special_tokens is not False,
        calls=calls,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        timeout_s=request.timeout,
        priority=_priority(request, min_priority),
        cache_salt=request.cache_salt or "",
    )


def _sampling(request: ChatRequest | CompletionRequest, model: ServedModel) -> SamplingParams:
    """As the request says, else as the model's authors advise."""
    asked = {name: getattr(request, name) for name in _SAMPLING}
    said = {name: value for name, value in asked.items() if value is not None}
    chosen: dict[str, Any] = {**vars(model.defaults), **said}
    chosen["top_k"] = max(0, chosen["top_k"])  # -1 is vLLM's "off"
    if chosen["temperature"] < GREEDY_BELOW:
        chosen["temperature"] = 0.0
    ends = () if request.ignore_eos else model.eos_token_ids
    stops = dict.fromkeys((*ends, *(request.stop_token_ids or ())))
    return SamplingParams(
        max_tokens=0, logprobs=request.num_logprobs, stop_token_ids=tuple(stops), **chosen
    )


def _priority(request: Sampled, min_priority: int) -> int:
    if request.priority is None:
        return max(0, min_priority)
    if request.priority < min_priority:
        raise invalid_value(
            "priority",
            f"{request.priority} is more urgent than {min_priority}, the lowest number that your"
            " key may ask for.",
        )
    return request.priority


# Prompts


def _prompts(request: CompletionRequest) -> list[Prompt]:
    """Texts or token ids, at least one.

    Raises:
        InvalidRequest: mixed kinds, an empty list or too many prompts.
    """
    raw, special = request.prompt, request.add_special_tokens is not False
    if isinstance(raw, str):
        return [Text(raw, special)]
    if not raw:
        raise InvalidRequest("Invalid prompt: it is empty.", code="empty_array", param="prompt")
    kind: Any = list[str]
    if isinstance(raw[0], int):
        kind = list[TokenId]
    elif isinstance(raw[0], list):
        kind = list[Annotated[list[TokenId], Meta(min_length=1)]]
    try:
        checked: list[Any] = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), parent="prompt") from None
    found = [checked] if isinstance(raw[0], int) else checked
    num_choices = request.n or 1
    if len(found) * num_choices > MAX_NUM_CHOICES:
        raise InvalidRequest(
            f"Invalid prompt: {len(found)} prompts with n={num_choices} ask for more than"
            f" {MAX_NUM_CHOICES} choices in one request; send several requests.",
            code="array_above_max_length",
            param="prompt",
        )
    return [Text(each, special) if isinstance(each, str) else each for each in found]


def _conversation(request: ChatRequest | TokenizeRequest, tools: Sequence[Any]) -> Conversation:
    arguments: Mapping[str, Any] = request.chat_template_kwargs or {}
    for name in arguments:
        if name not in _TEMPLATE_ARGUMENTS:
            raise unsupported(
                f"chat_template_kwargs.{name[:64]}", f"Allowed: {', '.join(_TEMPLATE_ARGUMENTS)}."
            )
    messages = [
        _message(message, f"messages[{index}]")
        for index, message in enumerate(request.messages or ())
    ]
    return Conversation(
        messages,
        [msgspec.to_builtins(tool) for tool in tools],
        arguments,
        request.add_generation_prompt is not False,
    )


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    """A message as templates know it: plain types, one text, `developer` as `system`.

    Parts are joined by newlines, so that words of two parts do not run together.
    """
    content = message.content
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise InvalidRequest(
            f"Invalid {path}.content: a {message.role} message needs content.",
            code="invalid_type",
            param=f"{path}.content",
        )
    if message.role == "tool" and message.tool_call_id is None:
        raise missing_parameter(f"{path}.tool_call_id")
    if isinstance(content, list):
        parts = enumerate(content)
        content = "\n".join(_part(part, f"{path}.content[{number}]") for number, part in parts)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": JsonText(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _part(part: ContentPart, path: str) -> str:
    if part.type not in ("text", "refusal"):
        raise InvalidRequest(
            f"Invalid {path}.type: only text is supported, not {part.type[:64]!r}.",
            code="unsupported_content",
            param=f"{path}.type",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise missing_parameter(f"{path}.{part.type}")
    return text
