"""Anthropic's `/v1/messages`: reads requests strictly and converts them to chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from disagg.api.json_body import read_struct
from disagg.api.openai.requests import (
    ChatMessage,
    ChatRequest,
    Count,
    FunctionCall,
    Label,
    StopString,
    ToolCall,
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
from disagg.api.refusals import invalid_value, missing_parameter, only_text, unsupported
from disagg.api.request_spec import Prompt, RequestSpec
from disagg.api.served_model import ServedModel


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: Label
    name: FunctionName
    input: dict[str, Any]


class ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: Label
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str


class RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    """Encrypted reasoning of another server; it is ignored."""


Block: TypeAlias = TextBlock | ToolUse | ToolResult | ThinkingBlock | RedactedThinking
_BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]  # system: reminders of Claude Code
    content: str | Annotated[list[Block], Meta(min_length=1)]


class ToolDefinition(msgspec.Struct):
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class MessagesToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    # A hint, which only chat templates that read `reasoning_effort` get.
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(msgspec.Struct):
    user_id: Label | None = None


class MessagesPrompt(msgspec.Struct, kw_only=True):
    """Fields that `/v1/messages` and `/v1/messages/count_tokens` have in common."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: Annotated[str, Meta(max_length=256)] | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=128)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(MessagesPrompt, kw_only=True):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None


class CountTokensRequest(MessagesPrompt, kw_only=True):
    """A request for the number of tokens of a prompt."""


_UNSUPPORTED = ("container", "mcp_servers", "output_format")


def read_messages(body: bytes) -> MessagesRequest:
    """Parse the body of `/v1/messages`. Raises `InvalidRequest`."""
    return read_struct(body, MessagesRequest, _check)


def read_count(body: bytes) -> CountTokensRequest:
    """Parse the body of `/v1/messages/count_tokens`. Raises `InvalidRequest`."""
    return read_struct(body, CountTokensRequest, _check)


def _check(raw: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise unsupported(name, "Leave it out: this server does not implement it.")
    _check_edits(raw.get("context_management"))
    messages = raw.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _check_blocks(message.get("content"), f"messages[{index}].content")


def _check_edits(management: Any) -> None:
    """Raises `InvalidRequest` for edits of the conversation that would change the prompt.

    Claude Code asks to clear or keep earlier reasoning, which the chat template decides.
    """
    edits = management.get("edits") if isinstance(management, dict) else None
    for edit in edits if isinstance(edits, list) else ():
        kind = str(edit.get("type"))[:64] if isinstance(edit, dict) else ""
        if not kind.startswith("clear_thinking_"):
            raise unsupported("context_management", f"This server makes no edits {kind!r}.")


def _check_blocks(content: Any, path: str) -> None:
    """Raises `InvalidRequest` for content other than text and calls."""
    for number, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in _BLOCK_TYPES:
            raise only_text(f"{path}[{number}].type", kind)
        if kind == "tool_result":
            _check_blocks(block.get("content"), f"{path}[{number}].content")


def understand_messages(
    request: MessagesRequest, model: ServedModel, min_priority: int
) -> RequestSpec:
    """Like `understand_chat`. Errors name the field of a chat request if both APIs have it."""
    chat = as_chat(request)
    effort = request.output_config.effort if request.output_config is not None else None
    reads_effort = model.template is not None and "reasoning_effort" in model.template.arguments
    if effort is not None and reads_effort and chat.reasoning_effort is None:
        effort = effort if effort in ("low", "medium") else "high"
        chat = replace(chat, reasoning_effort=effort)
    return understand_chat(chat, model, min_priority)


def understand_count(request: CountTokensRequest, model: ServedModel) -> Prompt:
    """The prompt whose tokens are to be counted. Raises `InvalidRequest`."""
    fields = {name: getattr(request, name) for name in CountTokensRequest.__struct_fields__}
    spec = understand_messages(MessagesRequest(max_tokens=1, **fields), model, 0)
    return spec.prompts[0]


def as_chat(request: MessagesRequest) -> ChatRequest:
    """Convert the request to a chat request. Raises `InvalidRequest`."""
    choice, thinking = request.tool_choice, request.thinking
    return ChatRequest(
        messages=_messages(request),
        model=request.model,
        stream=request.stream,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=list(request.stop_sequences) if request.stop_sequences else None,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=None if choice is None else _choice(choice),
        response_format=_format(request.output_config),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        reasoning_effort="none" if thinking is not None and thinking.type == "disabled" else None,
        thinking_token_budget=None if thinking is None else thinking.budget_tokens,
        # If the last message is the assistant's, the answer continues it.
        continue_final_message=request.messages[-1].role == "assistant" or None,
    )


def _format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    return ResponseFormat("json_schema", JsonSchemaFormat("answer", config.format.schema))


def _tool(tool: ToolDefinition) -> Tool:
    function = FunctionDefinition(tool.name, tool.description, tool.input_schema)
    return Tool("function", function)


def _choice(choice: MessagesToolChoice) -> ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise missing_parameter("tool_choice.name")
            return NamedTool("function", NamedFunction(choice.name))
        case "auto" | "none":
            return choice.type


def _messages(request: MessagesPrompt) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    system = _system(request.system or "")
    if system:
        messages.append(ChatMessage("system", system))
    for index, message in enumerate(request.messages):
        messages += _as_chat_messages(message, f"messages[{index}]")
    return messages


def _system(content: str | Sequence[TextBlock]) -> str:
    """The system prompt without the text that Claude Code changes with each request.

    It would begin the prompt, and no request would find the cached prefix of another.
    """
    if isinstance(content, str):
        return content
    return _text([block for block in content if not block.text.startswith(_OF_BILLING)])


def _as_chat_messages(message: Message, path: str) -> list[ChatMessage]:
    """Convert a message to chat messages, where tool results are separate messages.

    Tool results come before the text of the same user message.
    """
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    texts, thoughts, calls, results = [], [], list[ToolCall](), list[ChatMessage]()
    for number, block in enumerate(message.content):
        if isinstance(block, ToolUse | ToolResult) != (message.role == _ROLES.get(type(block))):
            raise invalid_value(
                f"{path}.content[{number}]",
                f"a message with role {message.role!r} cannot have this type of block.",
            )
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=text):
                thoughts.append(text)
            case ToolUse():
                calls.append(
                    ToolCall(
                        FunctionCall(block.name, msgspec.json.encode(block.input).decode()),
                        block.id,
                    )
                )
            case ToolResult():
                content = _text(block.content or "")
                results.append(ChatMessage("tool", content, tool_call_id=block.tool_use_id))
    if not texts and not calls and results:
        return results
    own = ChatMessage(
        message.role,
        "\n".join(texts) if texts or not calls else None,
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )
    return [*results, own]


_OF_BILLING = "x-anthropic-billing-header"
_ROLES: dict[type, str] = {ToolUse: "assistant", ToolResult: "user"}


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
