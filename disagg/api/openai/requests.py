"""OpenAI's chats and text completions: converts requests to `RequestSpec`s.

Unknown fields are ignored because clients send extra ones. Unsupported fields that would change the
answer are refused by name. Everything that can be refused without a tokenizer is refused here: all
functions raise `InvalidRequest` with the JSON path of the field as `param`.

`tools` are passed to the chat template. With `tool_choice` "auto" the model decides whether to call
a function, in the format of its template. If a call is required, a grammar restricts the answer to
JSON: a list of calls, or the arguments of the named function. Whether a model can reason, and with
which fields, is read from its chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from disagg.api.images import ImageRules, RemoteImage, read_image
from disagg.api.json_body import invalid_field
from disagg.api.openai.fields import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Effort,
    FunctionDefinition,
    ImageUrl,
    NamedTool,
    PlacedPart,
    SamplingFields,
    TokenId,
    TokenizeRequest,
    Tool,
    ToolCall,
)
from disagg.api.openai.structured_output import json_text, make_strict, requested_grammar
from disagg.api.refusals import (
    invalid_value,
    missing_parameter,
    only_text,
    unsupported,
)
from disagg.api.request_spec import Conversation, JsonText, Prompt, RequestSpec, Text, in_body
from disagg.api.served_model import ServedModel
from disagg.errors import InvalidRequest
from disagg.messages import Grammar, SamplingParams
from disagg.text.answer_delta import Reader
from disagg.text.answer_reader import AnswerSyntax, read_arguments_of
from disagg.text.tool_parsers.json_calls import read_llama3_json

MAX_NUM_CHOICES = 128  # largest number of prompts times n in one request
GREEDY_BELOW = 1e-5  # a temperature this small overflows the division and means greedy

# Fields that have the same name in requests and in `SamplingParams` are copied.
_OTHERWISE = ("max_tokens", "seed", "stop_token_ids", "logit_bias")
_SAMPLING = [
    name
    for name in SamplingParams.__struct_fields__
    if name in SamplingFields.__struct_fields__ and name not in _OTHERWISE
]
# Names that chat templates use for the reasoning of an earlier answer; the last one is GPT-OSS's.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def understand_chat(request: ChatRequest, model: ServedModel) -> RequestSpec:
    """Convert a chat request."""
    if request.top_logprobs and not request.logprobs:
        raise invalid_value("top_logprobs", "it needs logprobs: true.")
    check_tools(request)
    arguments = template_arguments(request.chat_template_kwargs, request.reasoning_effort, model)
    conversation = _conversation(request, offered_tools(request), arguments, model)
    grammar = requested_grammar(request, required_calls(request))
    spec = _spec(request, model, [conversation], grammar)
    return replace(
        spec,
        syntax=answer_syntax(request, model),
        include_reasoning=request.include_reasoning is not False,
        thinking_token_budget=thinking_budget(request, model),
    )


def understand_completion(request: CompletionRequest, model: ServedModel) -> RequestSpec:
    """Convert a request for a text completion, as `understand_chat`."""
    num_choices = request.n or 1
    if request.best_of is not None and request.best_of != num_choices:
        raise invalid_value(
            "best_of", f"it must be equal to n ({num_choices}); larger values are not supported."
        )
    if request.max_tokens == 0 and not request.echo:
        raise invalid_value("max_tokens", "0 needs echo: true, or the answer would be empty.")
    special, most = request.add_special_tokens is not False, MAX_NUM_CHOICES // num_choices
    prompts = read_prompts(request.prompt, "prompt", special, most)
    grammar = requested_grammar(request)
    spec = _spec(request, model, prompts, grammar)
    spec = replace(spec, echo=bool(request.echo), only_prompt=request.max_tokens == 0)
    if not request.echo or request.logprobs is None:
        return spec
    if request.stream:
        raise invalid_value("echo", "together with logprobs it needs stream: false.")
    num_top = max(request.logprobs, request.prompt_logprobs or 0)
    return replace(spec, sampling=replace(spec.sampling, prompt_logprobs=num_top))


def understand_tokenize(request: TokenizeRequest, model: ServedModel) -> Prompt:
    """The prompt of a request to `/tokenize`."""
    if (request.prompt is None) == (request.messages is None):
        raise invalid_value("prompt", "give either prompt or messages, and not both.")
    if request.prompt is not None:
        return Text(request.prompt, request.add_special_tokens is not False)
    arguments = template_arguments(request.chat_template_kwargs, None, model)
    return _conversation(request, request.tools or (), arguments, model)


def _spec(
    request: ChatRequest | CompletionRequest,
    model: ServedModel,
    prompts: Sequence[Prompt],
    grammar: tuple[str, Grammar] | None,
) -> RequestSpec:
    """Convert the fields that chats and text completions have in common."""
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options", "it needs stream: true.")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid_value("prompt_logprobs", "it needs stream: false.")
    check_truncated(request.truncate_prompt_tokens, model)
    if any(isinstance(each, Conversation) and each.images for each in prompts):
        for name in ("prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(request, name) is not None:
                raise unsupported(name, "A prompt with images cannot have it.")
    if grammar is not None and request.allowed_token_ids:
        raise invalid_value(
            "allowed_token_ids",
            f"{grammar[0]} already restricts the answer; set only one of the two.",
        )
    stop, options = request.stop or (), request.stream_options
    include_usage = bool(options and options.include_usage)
    hints = request.nvext.agent_hints if request.nvext is not None else None
    return RequestSpec(
        model=model,
        prompts=prompts,
        prompt_param=request.prompt_field,
        sampling=_sampling(request, model),
        max_tokens=request.token_limit,
        default_max_tokens=request.default_token_limit,
        seed=request.seed,
        grammar=grammar,
        num_choices=request.n or 1,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        bad_words=tuple(request.bad_words or ()),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        shows_prompt_logprobs=request.prompt_logprobs is not None,
        return_token_ids=bool(request.return_token_ids),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        stream=bool(request.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        timeout_s=request.timeout,
        priority=request.priority,
        hinted_priority=hints.order if hints is not None else 0,
        slo=in_body(request.slo_ttft_ms, request.slo_tpot_ms),
        cache_salt=request.cache_salt or "",
    )


def _sampling(request: ChatRequest | CompletionRequest, model: ServedModel) -> SamplingParams:
    """The sampling parameters of the request, with the model's defaults for those not set."""
    fields = {name: getattr(request, name) for name in _SAMPLING}
    requested = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if value is not None
    }
    chosen: dict[str, Any] = {**vars(model.defaults), **requested}
    chosen["top_k"] = max(0, chosen["top_k"])  # -1 is vLLM's "off"
    if chosen["temperature"] < GREEDY_BELOW:
        chosen["temperature"] = 0.0
    ends = () if request.ignore_eos else model.eos_token_ids
    stops = dict.fromkeys((*ends, *(request.stop_token_ids or ())))
    biases = (request.logit_bias or {}).items()
    return SamplingParams(
        max_tokens=0,
        logprobs=request.num_logprobs,
        stop_token_ids=tuple(stops),
        logit_bias=tuple((int(token_id), bias) for token_id, bias in biases),
        **chosen,
    )


def check_truncated(num_tokens: int | None, model: ServedModel) -> None:
    """Check the `truncate_prompt_tokens` of a request."""
    if num_tokens == 0 or (num_tokens is not None and num_tokens >= model.max_model_len):
        raise invalid_value(
            "truncate_prompt_tokens",
            f"{num_tokens} must be -1, or from 1 to {model.max_model_len - 1}, the limit of"
            f" {model.name!r}.",
        )


def read_prompts(raw: str | list[Any], param: str, special: bool, most: int) -> list[Prompt]:
    """Up to `most` prompts, as texts or token ids, which cannot be mixed.

    Args:
        param: name of the field.
        special: whether the tokenizer adds special tokens to texts.
    """
    if isinstance(raw, str):
        return [Text(raw, special)]
    if not raw:
        raise InvalidRequest(f"Invalid {param}: it is empty.", code="empty_array", param=param)
    kind: Any = list[str]
    if isinstance(raw[0], int):
        kind = list[TokenId]
    elif isinstance(raw[0], list):
        kind = list[Annotated[list[TokenId], Meta(min_length=1)]]
    try:
        checked: list[Any] = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), parent=param) from None
    found = [checked] if isinstance(raw[0], int) else checked
    if len(found) > most:
        raise InvalidRequest(
            f"Invalid {param}: it has {len(found)} prompts, and the request may have {most}; send"
            " several requests.",
            code="array_above_max_length",
            param=param,
        )
    return [Text(each, special) if isinstance(each, str) else each for each in found]


def _conversation(
    request: ChatRequest | TokenizeRequest,
    tools: Sequence[Any],
    arguments: Mapping[str, Any],
    model: ServedModel,
) -> Conversation:
    reasoning = model.reasoning_format
    is_harmony = reasoning is not None and reasoning.is_harmony
    images: list[bytes | RemoteImage] = []
    messages = [
        _message(message, f"messages[{index}]", model, images, is_harmony=is_harmony)
        for index, message in enumerate(request.messages or ())
    ]
    if request.documents and not (model.template and model.template.shows_documents):
        raise unsupported("documents", f"The chat template of {model.name!r} does not use them.")
    plain_tools = [msgspec.to_builtins(tool) for tool in tools]
    for tool in plain_tools if is_harmony else ():
        tool["function"].setdefault("description", "")  # the template fails without a description
    continues = bool(request.continue_final_message)
    is_text = bool(messages) and isinstance(messages[-1]["content"] or None, str)
    if continues and (request.add_generation_prompt or not is_text):
        raise invalid_value(
            "continue_final_message",
            "the last message must be text, and add_generation_prompt must not be set.",
        )
    return Conversation(
        messages,
        plain_tools,
        request.documents or (),
        arguments,
        request.add_generation_prompt is not False and not continues,
        continues,
        tuple(images),
    )


def _message(
    message: ChatMessage,
    path: str,
    model: ServedModel,
    images: list[bytes | RemoteImage],
    *,
    is_harmony: bool,
) -> dict[str, Any]:
    """A message in the form that templates read: plain types, one text, `developer` as `system`.

    Content parts are joined by newlines, so that the words of two parts stay separate; those of a
    message with images stay parts. Its images are added to `images`.
    """
    content: Any = message.content
    if message.role == "assistant" and not message.tool_calls:
        content = content or ""  # null in an answer that ended during its reasoning
    elif content is None and message.role != "assistant":
        raise InvalidRequest(
            f"Invalid {path}.content: a {message.role} message needs content.",
            code="invalid_type",
            param=f"{path}.content",
        )
    if message.role == "tool" and message.tool_call_id is None:
        raise missing_parameter(f"{path}.tool_call_id")
    if isinstance(content, list):
        num_before, rules = len(images), model.images if message.role == "user" else None
        parts = [
            _part(part, f"{path}.content[{number}]", rules, images)
            for number, part in enumerate(content)
        ]
        has_images = len(images) > num_before
        content = parts if has_images else "\n".join(part["text"] for part in parts)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    known = {"name": message.name, "tool_call_id": message.tool_call_id}
    plain |= {name: value for name, value in known.items() if value is not None}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain |= dict.fromkeys(REASONING_KEYS, reasoning)
        if is_harmony and message.tool_calls and content:  # the template accepts only one of both
            plain |= {"content": None, "thinking": f"{reasoning}\n\n{content}"}
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": JsonText(call.function.arguments)}
    return {"id": call.id or "", "type": "function", "function": function}


def _part(
    part: ContentPart, path: str, rules: ImageRules | None, images: list[bytes | RemoteImage]
) -> dict[str, str]:
    """A part of any API as templates read it. An image is added to `images`."""
    field = "image_url"
    if isinstance(part, PlacedPart):
        path, field = part.path, part.image_field
    if part.type in _IMAGES and rules is not None:
        url, path = part.image_url, f"{path}.{field}"
        if isinstance(url, ImageUrl):
            url, path = url.url, f"{path}.url"
        if url is None:
            raise missing_parameter(path)
        images.append(read_image(url, path, rules))
        return {"type": "image"}
    if part.type not in _TEXTS:
        raise only_text(f"{path}.type", part.type)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise missing_parameter(f"{path}.{_TEXTS[part.type]}")
    return {"type": "text", "text": text}


# Types of parts in chats, responses and messages. Of texts: -> the field that has the content.
_TEXTS = dict.fromkeys(("text", "input_text", "output_text"), "text") | {"refusal": "refusal"}
_IMAGES = ("image_url", "input_image", "image")


MAX_REQUIRED_CALLS = 32  # per answer; a weak model would generate calls until its limit of tokens


def offered_tools(request: ChatRequest) -> Sequence[Tool]:
    """The functions that the model may call; none with `tool_choice: "none"`."""
    return () if request.tool_choice == "none" else request.tools or ()


def check_tools(request: ChatRequest) -> None:
    """Check that functions have different names, and that `tool_choice` names one of them."""
    names = [tool.function.name for tool in request.tools or ()]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid_value(
                f"tools[{index}].function.name", f"two functions have the name {name!r}."
            )
    choice = request.tool_choice
    if choice == "required" and not names:
        raise invalid_value("tool_choice", "'required' needs tools.")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid_value("tool_choice", f"the tools have no function {choice.function.name!r}.")


def required_calls(request: ChatRequest) -> Grammar | None:
    """The grammar of the answer if a call is required, else None."""
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        function = next(t.function for t in request.tools or () if t.function.name == name)
        return Grammar("json", json_text(_parameters(function), "tools"))
    if request.tool_choice != "required":
        return None
    definitions: dict[str, dict[str, Any]] = {}
    calls = [_call_schema(tool.function, definitions) for tool in request.tools or ()]
    most = 1 if request.parallel_tool_calls is False else MAX_REQUIRED_CALLS
    schema = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
    return Grammar("json", json_text(schema | definitions, "tools"))


def _call_schema(
    function: FunctionDefinition, definitions: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The schema of a call.

    Definitions in the schema of its parameters move to `definitions`, so that references stay
    valid.
    """
    parameters = dict(_parameters(function))
    for section in ("$defs", "definitions"):
        own = parameters.pop(section, None)
        if not isinstance(own, dict):
            continue
        known = definitions.setdefault(section, {})
        for name, definition in own.items():
            if known.setdefault(name, definition) != definition:
                raise invalid_value(
                    "tools",
                    f"two functions have different definitions of {section}/{name}; rename one.",
                )
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    """The schema of a function's arguments, always strict; without one a function has none.

    They are an object, also where the schema leaves the type out or allows others, such as null.
    """
    return make_strict({**(function.parameters or {"properties": {}}), "type": "object"})


def answer_syntax(request: ChatRequest, model: ServedModel) -> AnswerSyntax | None:
    """How reasoning and calls are parsed in the answers to `request`; None for plain text."""
    reasoning, tools = model.reasoning_format, offered_tools(request)
    if reasoning is None and not tools:
        return None
    return AnswerSyntax(
        reasoning,
        model.tool_format,
        {tool.function.name: tool.function.parameters or {} for tool in tools},
        _checked_reader(request, model) if tools else None,
        parallel=request.parallel_tool_calls is not False,
    )


def _checked_reader(request: ChatRequest, model: ServedModel) -> Reader | None:
    """The reader of calls that a grammar enforces; None if the model calls in its own format."""
    if model.template is None or not model.template.shows_tools:
        raise unsupported("tools", f"The chat template of {model.name!r} does not support tools.")
    if isinstance(request.tool_choice, NamedTool):
        return read_arguments_of(request.tool_choice.function.name)
    if request.tool_choice == "required":
        return read_llama3_json
    if model.tool_format is None:
        raise unsupported(
            "tools",
            f"The format of tool calls of {model.name!r} is unknown; set tool_choice to"
            " 'required', to a function or to 'none', or start the server with"
            " --tool-call-parser.",
        )
    return None


_SWITCHES = ("enable_thinking", "thinking")  # names of the same switch in different templates
_HARMONY_EFFORTS = ("low", "medium", "high")


def thinking_budget(request: ChatRequest, model: ServedModel) -> int | None:
    """The largest number of reasoning tokens; None for no limit."""
    budget = request.thinking_token_budget
    if budget is None or budget < 0:
        return None
    if model.reasoning_format is None:
        raise unsupported("thinking_token_budget", _no_reasoning(model))
    return budget


def template_arguments(
    given: Mapping[str, Any] | None, effort: Effort | None, model: ServedModel
) -> dict[str, Any]:
    """The variables of the chat template besides the messages.

    Args:
        given: `chat_template_kwargs`.
        effort: `reasoning_effort`.
    """
    read = model.template.arguments if model.template else frozenset()
    arguments = {}
    for name, value in (given or {}).items():
        known = name if name in read else _switch(read) if name in _SWITCHES else None
        if known is not None:
            arguments[known] = value
        elif not (name in _SWITCHES and value is False and model.reasoning_format is None):
            reads = ", ".join(sorted(read)) or "nothing"
            raise unsupported(
                f"chat_template_kwargs.{name[:64]}",
                f"The chat template of {model.name!r} does not use it. Besides the messages it"
                f" uses: {reads}.",
            )
    if effort is not None:
        arguments = _choose_effort(effort, model, read) | arguments
    return arguments


def _choose_effort(effort: Effort, model: ServedModel, read: frozenset[str]) -> dict[str, Any]:
    reasoning, switch = model.reasoning_format, _switch(read)
    if effort == "none" and switch is not None:
        return {switch: False}
    if "reasoning_effort" in read:
        if reasoning is not None and reasoning.is_harmony and effort not in _HARMONY_EFFORTS:
            raise _no_such_effort(effort, model, _HARMONY_EFFORTS)
        return {"reasoning_effort": effort}
    if switch is not None:
        if effort not in ("none", "medium"):
            raise _no_such_effort(effort, model, ("none", "medium"))
        return {switch: effort != "none"}
    if reasoning is None and effort != "none":
        raise unsupported("reasoning_effort", _no_reasoning(model))
    if reasoning is not None and effort != "medium":
        raise _no_such_effort(effort, model, ("medium",))
    return {}


def _switch(read: frozenset[str]) -> str | None:
    return next((name for name in _SWITCHES if name in read), None)


def _no_such_effort(effort: str, model: ServedModel, efforts: tuple[str, ...]) -> Exception:
    return invalid_value(
        "reasoning_effort",
        f"the chat template of {model.name!r} does not support {effort!r}; it supports"
        f" {', '.join(efforts)}. thinking_token_budget limits the reasoning of every model.",
    )


def _no_reasoning(model: ServedModel) -> str:
    return (
        f"The chat template of {model.name!r} shows no reasoning; if the model reasons anyway,"
        " start the server with --reasoning-parser."
    )
