"""Anthropic's `/v1/messages`: reads requests strictly, converts them to chat requests, and writes
responses, events of streams and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from disagg.api.json_body import Body
from disagg.api.openai.fields import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    Count,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    Label,
    NamedFunction,
    NamedTool,
    PlacedPart,
    ResponseFormat,
    StopString,
    Tool,
    ToolCall,
    ToolChoice,
)
from disagg.api.openai.requests import understand_chat
from disagg.api.refusals import (
    NOT_IMPLEMENTED,
    invalid_value,
    missing_parameter,
    unsupported,
)
from disagg.api.request_spec import Prompt, RequestSpec
from disagg.api.running_job import BlockFrames, ChoiceDelta, RunningJob, named_event
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError
from disagg.text.answer_delta import join_calls


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ImageData(msgspec.Struct, tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageSource(msgspec.Struct, tag="url"):
    url: str


class ImageBlock(msgspec.Struct, tag="image"):
    source: ImageData | ImageSource


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: Label
    name: FunctionName
    input: dict[str, Any]


class ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: Label
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str


class RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    """Encrypted reasoning of another server; it is ignored."""


Block: TypeAlias = TextBlock | ImageBlock | ToolUse | ToolResult | ThinkingBlock | RedactedThinking


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


class MessagesPrompt(Body, kw_only=True):
    """Fields that `/v1/messages` and `/v1/messages/count_tokens` have in common."""

    refused: ClassVar = dict.fromkeys(
        ("container", "mcp_servers", "output_format"), NOT_IMPLEMENTED
    )

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: Annotated[str, Meta(max_length=256)] | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=128)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    @staticmethod
    def prepare(raw: dict[str, Any]) -> None:
        """Raises `InvalidRequest` for edits of the conversation that would change the prompt.

        Claude Code asks to clear or keep earlier reasoning, which the chat template decides.
        """
        management = raw.get("context_management")
        edits = management.get("edits") if isinstance(management, dict) else None
        for edit in edits if isinstance(edits, list) else ():
            kind = str(edit.get("type"))[:64] if isinstance(edit, dict) else ""
            if not kind.startswith("clear_thinking_"):
                raise unsupported("context_management", f"This server makes no edits {kind!r}.")


class MessagesRequest(MessagesPrompt, kw_only=True):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None


class CountTokensRequest(MessagesPrompt, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""


def understand_messages(request: MessagesRequest, model: ServedModel) -> RequestSpec:
    """Like `understand_chat`. Errors name the field of a chat request if both APIs have it."""
    chat = as_chat(request)
    effort = request.output_config.effort if request.output_config is not None else None
    reads_effort = model.template is not None and "reasoning_effort" in model.template.arguments
    if effort is not None and reads_effort and chat.reasoning_effort is None:
        effort = effort if effort in ("low", "medium") else "high"
        chat = replace(chat, reasoning_effort=effort)
    return understand_chat(chat, model)


def understand_count(request: CountTokensRequest, model: ServedModel) -> Prompt:
    """The prompt whose tokens are to be counted. Raises `InvalidRequest`."""
    fields = {name: getattr(request, name) for name in CountTokensRequest.__struct_fields__}
    spec = understand_messages(MessagesRequest(max_tokens=1, **fields), model)
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
        tools=[
            Tool("function", FunctionDefinition(each.name, each.description, each.input_schema))
            for each in request.tools or ()
        ]
        or None,
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


def _choice(choice: MessagesToolChoice) -> ToolChoice:
    if choice.type == "any":
        return "required"
    if choice.type != "tool":
        return choice.type
    if choice.name is None:
        raise missing_parameter("tool_choice.name")
    return NamedTool("function", NamedFunction(choice.name))


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
    texts = (block.text for block in content)
    return "\n".join(text for text in texts if not text.startswith(_OF_BILLING))


def _as_chat_messages(message: Message, path: str) -> list[ChatMessage]:
    """Convert a message to chat messages, where tool results are separate messages.

    Tool results come before the text of the same user message.
    """
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    parts, thoughts = list[ContentPart](), list[str]()
    calls, results = list[ToolCall](), list[ChatMessage]()
    for number, block in enumerate(message.content):
        place = f"{path}.content[{number}]"
        if isinstance(block, ToolUse | ToolResult) != (message.role == _ROLES.get(type(block))):
            raise invalid_value(
                place,
                f"a message with role {message.role!r} cannot have this type of block.",
            )
        match block:
            case TextBlock() | ImageBlock():
                parts.append(_part(block, place))
            case ThinkingBlock(thinking=text):
                thoughts.append(text)
            case ToolUse():
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(ToolCall(FunctionCall(block.name, arguments), block.id))
            case ToolResult():
                content: Any = block.content or ""
                if isinstance(content, list):
                    content = [
                        _part(each, f"{place}.content[{n}]") for n, each in enumerate(content)
                    ]
                results.append(ChatMessage("tool", content, tool_call_id=block.tool_use_id))
    if not parts and not calls and results:
        return results
    own = ChatMessage(
        message.role,
        parts or (None if calls else ""),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )
    return [*results, own]


def _part(block: TextBlock | ImageBlock, path: str) -> ContentPart:
    if isinstance(block, TextBlock):
        return ContentPart("text", block.text)
    source = block.source
    if isinstance(source, ImageData):
        url = f"data:{source.media_type};base64,{source.data}"
    else:
        url = source.url
    return PlacedPart("image", image_url=url, path=path, image_field="source")


_OF_BILLING = "x-anthropic-billing-header"
_ROLES: dict[type, str] = {ToolUse: "assistant", ToolResult: "user"}


_to_json = msgspec.json.Encoder().encode

# Kind of a block -> the type of its deltas and the key of new text.
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_body(run: RunningJob) -> bytes:
    (answer,) = run.kept
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append(_thinking(answer.reasoning))
    if answer.text or not (answer.calls or content):
        content.append({"type": "text", "text": answer.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in join_calls(answer.calls)
    ]
    return _to_json(_message(run, run.model_name, content) | _stop(answer) | {"usage": _usage(run)})


def _input(arguments: str) -> msgspec.Raw:
    """The arguments of a call as the model wrote them; `{}` if the answer was cut off in them."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return msgspec.Raw(b"{}")
    return msgspec.Raw(arguments.encode())


def _thinking(text: str) -> dict[str, Any]:
    """A thinking block. Its signature is empty, because the server does not check signatures."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _message(run: RunningJob, model_name: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": run.id,
        "type": "message",
        "role": "assistant",
        "model": model_name,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(answer: ChoiceDelta) -> dict[str, Any]:
    if answer.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    reason = answer.finish_reason or "stop"
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def _usage(run: RunningJob) -> dict[str, int]:
    """The usage object. Anthropic counts cached tokens separately from input tokens."""
    num_cached = run.num_cached_tokens
    return {
        "input_tokens": run.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": run.num_completion_tokens,
    }


class MessageFrames(BlockFrames):
    """Events of a streamed message: blocks, each with a start, deltas and a stop."""

    _block = -1  # index of the open block

    def opening(self) -> bytes:
        usage = {"input_tokens": self._run.num_prompt_tokens, "output_tokens": 0}
        message = _message(self._run, self._model_name, []) | {"usage": usage}
        return named_event("message_start", message=message)

    def closing(self) -> bytes:
        events = b"" if self._kind else self._begin("text")
        end = named_event("message_delta", delta=_stop(self._last), usage=_usage(self._run))
        return events + self._end() + end + named_event("message_stop")

    def error(self, error: DisaggError) -> bytes:
        return named_event("error", **_error(error))

    def _begin_block(self) -> bytes:
        self._block += 1
        call = self._call
        if self._kind == "reasoning":
            block = _thinking("")
        elif self._kind == "text":
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        return named_event("content_block_start", index=self._block, content_block=block)

    def _grow(self, text: str) -> bytes:
        if not text:
            return b""
        kind, key = _DELTAS[self._kind]
        delta = {"type": kind, key: text}
        return named_event("content_block_delta", index=self._block, delta=delta)

    def _end(self) -> bytes:
        return named_event("content_block_stop", index=self._block) if self._kind else b""


def error_body(error: DisaggError) -> bytes:
    return _to_json({"type": "error"} | _error(error))


def _error(error: DisaggError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "api_error"
    return {"error": {"type": kind, "message": error.message}}
