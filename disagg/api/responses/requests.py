"""OpenAI's `/v1/responses`: reads requests strictly and converts them to chat requests.

Nothing is stored between requests: the client sends the whole conversation each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from disagg.api.json_body import read_struct
from disagg.api.openai.reasoning import Effort
from disagg.api.openai.requests import (
    AnswerFields,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Count,
    FunctionCall,
    Label,
    SamplingFields,
    TemplateArguments,
    ToolCall,
    refuse_unsupported,
    understand_chat,
)
from disagg.api.openai.structured_output import JsonSchemaFormat, ResponseFormat
from disagg.api.openai.tools import (
    FunctionDefinition,
    FunctionName,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)
from disagg.api.refusals import missing_parameter, only_text, unsupported
from disagg.api.request_spec import RequestSpec
from disagg.api.served_model import ServedModel


class MessageItem(msgspec.Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]


class CallItem(msgspec.Struct, tag="function_call"):
    call_id: Label
    name: FunctionName
    arguments: str


class OutputItem(msgspec.Struct, tag="function_call_output"):
    call_id: Label
    output: str | list[ContentPart]


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    """Reasoning of an earlier answer; chat templates get it as `reasoning_content`."""

    content: list[ContentPart] | None = None


Item: TypeAlias = MessageItem | CallItem | OutputItem | ReasoningItem
_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class FunctionTool(msgspec.Struct):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceFunction(msgspec.Struct):
    type: Literal["function"]
    name: FunctionName


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    effort: Effort | None = None


class ResponsesRequest(AnswerFields, kw_only=True):
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None


_IS_STATELESS = "This server stores no conversations: send the whole conversation as input."
_UNSUPPORTED = {
    "previous_response_id": _IS_STATELESS,
    "conversation": _IS_STATELESS,
    "background": "Wait for the response, or use stream: true.",
    "prompt": "This server stores no prompts: send the text as input.",
    "top_logprobs": "Use /v1/chat/completions for log-probabilities.",
    "max_tool_calls": "The client executes all calls, so it can limit their number.",
    "documents": "Use /v1/chat/completions, which supports them.",
    "max_tokens": "Here its name is max_output_tokens.",
    "response_format": "Here its name is text.format.",
}
# `stream_options` has other fields here, which change no answer.
_OF_COMPLETIONS = [
    name
    for name in SamplingFields.__struct_fields__
    if name not in (*AnswerFields.__struct_fields__, *_UNSUPPORTED, "stream_options")
]


def read_response_request(body: bytes) -> ResponsesRequest:
    """Parse the body of `/v1/responses`. Raises `InvalidRequest`."""
    return read_struct(body, ResponsesRequest, _check)


def _check(raw: dict[str, Any]) -> None:
    refuse_unsupported(raw)
    for name, why in _UNSUPPORTED.items():
        if raw.get(name):
            raise unsupported(name, why)
    for name in _OF_COMPLETIONS:
        if raw.get(name):
            raise unsupported(name, "Use /v1/chat/completions, which supports it.")
    items = raw.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        kind = item.setdefault("type", "message") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind not in _ITEM_TYPES:
            raise unsupported(
                f"input[{index}].type",
                f"The type {kind[:64]!r} is none of {', '.join(_ITEM_TYPES)}.",
            )
    tools = raw.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise unsupported(
                f"tools[{index}].type", f"Tools must be functions, not {kind[:64]!r}."
            )


def understand_response_request(
    request: ResponsesRequest, model: ServedModel, min_priority: int
) -> RequestSpec:
    """Like `understand_chat`. Errors name the field of a chat request if both APIs have it."""
    spec = understand_chat(as_chat(request), model, min_priority)
    return replace(spec, repeated=request)


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Convert the request to a chat request. Raises `InvalidRequest`."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    return ChatRequest(
        **{name: getattr(request, name) for name in AnswerFields.__struct_fields__},
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        reasoning_effort=effort,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        include_reasoning=request.include_reasoning,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)
    return Tool("function", function)


def _choice(request: ResponsesRequest) -> ToolChoice | None:
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceFunction):
        return NamedTool("function", NamedFunction(choice.name))
    return choice


def _format(text: TextOptions | None) -> ResponseFormat | None:
    form = None if text is None else text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat("json_object")
    if form.schema is None:
        raise missing_parameter("text.format.schema")
    schema = JsonSchemaFormat(form.name or "answer", form.schema, strict=form.strict)
    return ResponseFormat("json_schema", schema)


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if request.instructions:
        messages.append(ChatMessage("system", request.instructions))
    if isinstance(request.input, str):
        return [*messages, ChatMessage("user", request.input)]
    reasoning = ""
    for index, item in enumerate(request.input):
        path = f"input[{index}]"
        match item:
            case ReasoningItem():
                reasoning = "\n".join(part.text for part in item.content or () if part.text)
                continue
            case MessageItem():
                content = _content(item.content, f"{path}.content")
                messages.append(ChatMessage(item.role, content))
            case OutputItem():
                output = _content(item.output, f"{path}.output")
                messages.append(ChatMessage("tool", output, tool_call_id=item.call_id))
            case CallItem():
                call = ToolCall(FunctionCall(item.name, item.arguments), item.call_id)
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage("assistant"))
                calls = messages[-1].tool_calls or []
                calls.append(call)
                messages[-1].tool_calls = calls
        if reasoning and messages[-1].role == "assistant":
            before = messages[-1].reasoning_content
            messages[-1].reasoning_content = f"{before}\n{reasoning}" if before else reasoning
        reasoning = ""
    return messages


def _content(content: str | Sequence[ContentPart], path: str) -> str | list[ContentPart]:
    """Convert content parts to those of chats, which have other type names."""
    if isinstance(content, str):
        return content
    parts = []
    for number, part in enumerate(content):
        if part.type not in _PART_TYPES:
            raise only_text(f"{path}[{number}].type", part.type)
        parts.append(ContentPart(_PART_TYPES[part.type], part.text, part.refusal))
    return parts or ""


_PART_TYPES = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
