"""OpenAI's `/v1/responses`: reads requests strictly, converts them to chat requests, and writes
responses and the events of streams.

A response is a list of items: reasoning, messages with text, and one item per function call. In a
stream every event has a number, and each item is complete before the next one is added.

Nothing is stored between requests: the client sends the whole conversation each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from disagg.api.openai.fields import (
    REFUSED,
    AnswerFields,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Count,
    Effort,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    Label,
    NamedFunction,
    NamedTool,
    PlacedPart,
    ResponseFormat,
    SamplingFields,
    TemplateArguments,
    Tool,
    ToolCall,
    ToolChoice,
)
from disagg.api.openai.requests import understand_chat
from disagg.api.refusals import missing_parameter
from disagg.api.request_spec import RequestSpec
from disagg.api.running_job import BlockFrames, ChoiceDelta, RunningJob, named_event
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError


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


_IS_STATELESS = "This server stores no conversations: send the whole conversation as input."
_REFUSED = {
    # Fields of completions. `stream_options` has other fields here, which change no answer.
    **{
        name: "Use /v1/chat/completions, which supports it."
        for name in SamplingFields.__struct_fields__
        if name not in (*AnswerFields.__struct_fields__, "stream_options")
    },
    **REFUSED,
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


class ResponsesRequest(AnswerFields, kw_only=True):
    refused: ClassVar = _REFUSED

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

    @staticmethod
    def prepare(raw: dict[str, Any]) -> None:
        """Items without a type are messages."""
        items = raw.get("input")
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict):
                item.setdefault("type", "message")


def understand_response_request(request: ResponsesRequest, model: ServedModel) -> RequestSpec:
    """Like `understand_chat`. Errors name the field of a chat request if both APIs have it."""
    return replace(understand_chat(as_chat(request), model), repeated=request)


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Convert the request to a chat request. Raises `InvalidRequest`."""
    asked, tools = request.tool_choice, request.tools or ()
    choice: ToolChoice | None
    if isinstance(asked, ToolChoiceFunction):
        choice = NamedTool("function", NamedFunction(asked.name))
    else:
        choice = asked
    return ChatRequest(
        **{name: getattr(request, name) for name in AnswerFields.__struct_fields__},
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        tools=[
            Tool("function", FunctionDefinition(t.name, t.description, t.parameters, t.strict))
            for t in tools
        ]
        or None,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        include_reasoning=request.include_reasoning,
        chat_template_kwargs=request.chat_template_kwargs,
    )


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
    if isinstance(content, str):
        return content
    parts: list[ContentPart] = [
        PlacedPart(part.type, part.text, part.refusal, part.image_url, path=f"{path}[{number}]")
        for number, part in enumerate(content)
    ]
    return parts or ""


_to_json = msgspec.json.Encoder().encode

# Kind of a block -> the name of its events.
_DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def response_body(run: RunningJob) -> bytes:
    """The response at the end of a stream, as if the answer had come at once."""
    frames = ResponseFrames(run)
    frames.piece(run.kept[0])
    frames.closing()
    return _to_json(frames.response())


def _status(answer: ChoiceDelta) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _response(
    run: RunningJob, model_name: str, answer: ChoiceDelta | None, items: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The response object. `answer` is None at the start of a stream."""
    request, sampling = run.spec.repeated, run.spec.sampling
    assert isinstance(request, ResponsesRequest)
    status = "in_progress" if answer is None else _status(answer)
    is_cut = status == "incomplete"
    text = request.text.format if request.text is not None else None
    return {
        "id": run.id,
        "object": "response",
        "created_at": run.created_unix_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": model_name,
        "output": items,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"} if text is None else text},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": sampling.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(run: RunningJob) -> dict[str, Any]:
    num_prompt, num_output = run.num_prompt_tokens, run.num_completion_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": run.num_cached_tokens},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": run.num_reasoning_tokens},
        "total_tokens": num_prompt + num_output,
    }


class ResponseFrames(BlockFrames):
    """Events of a streamed response. Its blocks are items."""

    def __init__(self, run: RunningJob) -> None:
        super().__init__(run)
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # complete items
        self._located: dict[str, Any] = {}  # event fields that locate the open item
        self._parts: list[str] = []  # pieces of the open item's text or arguments

    def opening(self) -> bytes:
        response = _response(self._run, self._model_name, None, [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def closing(self) -> bytes:
        events = b"" if self._kind else self._begin("text")
        events += self._end(_status(self._last))  # only the last item can be cut off
        response = self.response()
        return events + self._event(f"response.{response['status']}", response=response)

    def response(self) -> dict[str, Any]:
        """The complete response, after `closing`."""
        run = self._run
        return _response(run, run.model_name, self._last, self._items) | {"usage": _usage(run)}

    def error(self, error: DisaggError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _begin_block(self) -> bytes:
        item = self._item("in_progress")
        self._located = {"output_index": len(self._items), "item_id": item["id"]}
        if self._kind != "call":
            self._located["content_index"] = 0
        if self._kind == "text":
            self._located["logprobs"] = []
        added = self._item_event("added", item)
        return added + self._part_event("added", "") if self._kind == "text" else added

    def _grow(self, text: str) -> bytes:
        if not text:
            return b""
        self._parts.append(text)
        return self._event(f"response.{_DELTAS[self._kind]}.delta", delta=text, **self._located)

    def _end(self, status: str = "completed") -> bytes:
        if not self._kind:
            return b""
        text, kind = "".join(self._parts), f"response.{_DELTAS[self._kind]}.done"
        if self._kind == "call":
            done = self._event(kind, name=self._call.name, arguments=text, **self._located)
        else:
            done = self._event(kind, text=text, **self._located)
        if self._kind == "text":
            done += self._part_event("done", text)
        item = self._item(status)
        done += self._item_event("done", item)
        self._items.append(item)
        self._parts.clear()
        return done

    def _item(self, status: str) -> dict[str, Any]:
        """The open item as it is now."""
        text, call = "".join(self._parts), self._call
        # A stream may have several messages, with calls between them.
        unique = f"{self._run.id.removeprefix('resp_')}_{len(self._items)}"
        if self._kind == "call":
            return {
                "id": "fc_" + call.id.removeprefix("call_"),
                "type": "function_call",
                "status": status,
                "call_id": call.id,
                "name": call.name,
                "arguments": text,
            }
        if self._kind == "reasoning":
            return {
                "id": f"rs_{unique}",
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [{"type": "reasoning_text", "text": text}] if text else [],
            }
        return {
            "id": f"msg_{unique}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if status == "in_progress" else [_part(text)],
        }

    def _item_event(self, change: str, item: dict[str, Any]) -> bytes:
        number = len(self._items)
        return self._event(f"response.output_item.{change}", output_index=number, item=item)

    def _part_event(self, change: str, text: str) -> bytes:
        return self._event(f"response.content_part.{change}", part=_part(text), **self._located)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return named_event(kind, sequence_number=self._num_events - 1, **fields)
