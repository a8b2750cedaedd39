"""OpenAI's chats and text completions: reads requests and converts them to `RequestSpec`s.

Types are strict (no `"5"` for 5, no 1 for true) and every number, string and list has a bound.
Unknown fields are ignored because clients send extra ones. Unsupported fields that would change the
answer are refused by name. Everything that can be refused without a tokenizer is refused here, with
the name of the field and without side effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from disagg.api.json_body import invalid_field, read_struct
from disagg.api.openai.reasoning import Effort, template_arguments, thinking_budget
from disagg.api.openai.structured_output import (
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    requested_grammar,
)
from disagg.api.openai.tools import (
    ToolChoice,
    Tools,
    answer_syntax,
    check_tools,
    offered_tools,
    required_calls,
)
from disagg.api.refusals import invalid_value, missing_parameter, only_text, unsupported
from disagg.api.request_spec import (
    Conversation,
    JsonText,
    Milliseconds,
    Prompt,
    RequestSpec,
    Text,
    in_body,
)
from disagg.api.served_model import ServedModel
from disagg.config import MAX_PRIORITY
from disagg.errors import InvalidRequest
from disagg.messages import Grammar, SamplingParams

Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIdKey: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]
Bias: TypeAlias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Label: TypeAlias = Annotated[str, Meta(max_length=512)]
Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)
]
TemplateArguments: TypeAlias = dict[str, bool | int | Label]
Documents: TypeAlias = list[dict[str, str]]  # for retrieval, as vLLM takes them: title and text


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnswerFields(msgspec.Struct, kw_only=True):
    """Fields that chat completions, text completions and responses have in common."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    logit_bias: Annotated[dict[TokenIdKey, Bias], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    timeout: Annotated[float, Meta(gt=0.0)] | None = None  # in seconds, for the whole answer
    priority: Priority | None = None
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    user: Label | None = None
    metadata: Metadata | None = None


class SamplingFields(AnswerFields, kw_only=True):
    """More fields that chat completions and text completions have in common."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=8192)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=128)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None  # vLLM's older names for parts of `structured_outputs`
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    name: Label
    arguments: str = ""


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: Label | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1)] | None = None
    name: Label | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer name of `reasoning_content`


class ChatRequest(SamplingFields, kw_only=True):
    prompt_field: ClassVar = "messages"
    default_token_limit: ClassVar[int | None] = None  # as many as fit

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: no limit
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    documents: Documents | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """The limit of answer tokens. `max_completion_tokens` is its newer name and wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt_field: ClassVar = "prompt"
    default_token_limit: ClassVar = 16  # OpenAI's

    prompt: str | list[Any]  # text, texts, token ids or lists of token ids; see `understand`
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # 0 with `echo`: no answer
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    add_special_tokens: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    documents: Documents | None = None
    tools: Tools | None = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    input: str | list[Any]
    model: Annotated[str, Meta(max_length=256)] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]
    model: Annotated[str, Meta(max_length=256)] | None = None


Request = TypeVar(
    "Request",
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
)

# Fields that clients may never set: they control internal transfers, or carry code or tensors.
_INTERNAL_FIELDS = (
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "chat_template", "ec_transfer_params",
    "kv_transfer_params", "logits_processors", "prompt_embeds", "request_id", "rid",
    "vllm_xargs",
)  # fmt: skip

# Fields that would change the answer, with the values (besides null) that have no effect.
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1.0,),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "web_search_options": (),
}


# Fields of chats that are refused in text completions, because clients rely on their effect.
_OF_CHATS = ("tools", "documents", "reasoning_effort", "thinking_token_budget")


def read_request(body: bytes, kind: type[Request]) -> Request:
    """Parse `body` and check types and limits.

    Raises:
        InvalidRequest: has the JSON path of the first invalid field as `param`.
    """
    checks = {ChatRequest: _check_chat, CompletionRequest: _check_text}
    return read_struct(body, kind, checks.get(kind, refuse_unsupported))


def _check_text(raw: dict[str, Any]) -> None:
    refuse_unsupported(raw)
    for name in _OF_CHATS:
        if raw.get(name):
            raise unsupported(name, "Use /v1/chat/completions, which supports it.")


def _check_chat(raw: dict[str, Any]) -> None:
    refuse_unsupported(raw)
    for name in ("echo", "add_special_tokens"):
        if raw.get(name):
            raise unsupported(name, "Only /v1/completions has it.")


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """Raises `InvalidRequest` if a field is set that clients may not set, or is not implemented."""
    for name in _INTERNAL_FIELDS:
        if raw.get(name) is not None:
            raise unsupported(name, "Leave it out: clients may not set it.")
    for name, harmless in _UNSUPPORTED_FIELDS.items():
        value = raw.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name, "Leave it out: this server does not implement it.")


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


def understand_chat(request: ChatRequest, model: ServedModel, min_priority: int) -> RequestSpec:
    """Convert a chat request.

    Args:
        min_priority: the lowest priority number that the client may set.

    Raises:
        InvalidRequest: two fields contradict each other, or the model does not support a field.
    """
    if request.top_logprobs and not request.logprobs:
        raise invalid_value("top_logprobs", "it needs logprobs: true.")
    check_tools(request)
    arguments = template_arguments(request.chat_template_kwargs, request.reasoning_effort, model)
    conversation = _conversation(request, offered_tools(request), arguments, model)
    grammar = requested_grammar(request, required_calls(request))
    spec = _spec(request, model, min_priority, [conversation], grammar)
    return replace(
        spec,
        syntax=answer_syntax(request, model),
        include_reasoning=request.include_reasoning is not False,
        thinking_token_budget=thinking_budget(request, model),
    )


def understand_completion(
    request: CompletionRequest, model: ServedModel, min_priority: int
) -> RequestSpec:
    """Convert a request for a text completion, like `understand_chat`."""
    num_choices = request.n or 1
    if request.best_of is not None and request.best_of != num_choices:
        raise invalid_value(
            "best_of", f"it must be equal to n ({num_choices}); larger values are not supported."
        )
    if request.max_tokens == 0 and not request.echo:
        raise invalid_value("max_tokens", "0 needs echo: true, or the answer would be empty.")
    prompts, grammar = _prompts(request), requested_grammar(request)
    spec = _spec(request, model, min_priority, prompts, grammar)
    spec = replace(spec, echo=bool(request.echo), only_echo=request.max_tokens == 0)
    if not request.echo or request.logprobs is None:
        return spec
    if request.stream:
        raise invalid_value("echo", "together with logprobs it needs stream: false.")
    num_top = max(request.logprobs, request.prompt_logprobs or 0)
    return replace(spec, sampling=replace(spec.sampling, prompt_logprobs=num_top))


def understand_tokenize(request: TokenizeRequest, model: ServedModel) -> Prompt:
    """The prompt of a request to `/tokenize`. Raises `InvalidRequest`."""
    if (request.prompt is None) == (request.messages is None):
        raise invalid_value("prompt", "give either prompt or messages, and not both.")
    if request.prompt is not None:
        return Text(request.prompt, request.add_special_tokens is not False)
    arguments = template_arguments(request.chat_template_kwargs, None, model)
    return _conversation(request, request.tools or (), arguments, model)


def _spec(
    request: ChatRequest | CompletionRequest,
    model: ServedModel,
    min_priority: int,
    prompts: Sequence[Prompt],
    grammar: tuple[str, Grammar] | None,
) -> RequestSpec:
    """Convert the fields that chats and text completions have in common."""
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options", "it needs stream: true.")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid_value("prompt_logprobs", "it needs stream: false.")
    truncated = request.truncate_prompt_tokens
    if truncated == 0 or (truncated is not None and truncated >= model.max_model_len):
        raise invalid_value(
            "truncate_prompt_tokens",
            f"{truncated} must be -1, or from 1 to {model.max_model_len - 1}, the limit of"
            f" {model.name!r}.",
        )
    limit, least = request.token_limit, request.min_tokens
    if limit is not None and least is not None and least > limit:
        raise invalid_value("min_tokens", f"{least} is above max_tokens, {limit}.")
    if grammar is not None and request.allowed_token_ids:
        raise invalid_value(
            "allowed_token_ids",
            f"{grammar[0]} already restricts the answer; set only one of the two.",
        )
    stop, options = request.stop or (), request.stream_options
    include_usage = bool(options and options.include_usage)
    return RequestSpec(
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
        bad_words=tuple(request.bad_words or ()),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        shows_prompt_logprobs=request.prompt_logprobs is not None,
        return_token_ids=bool(request.return_token_ids),
        truncate_prompt_tokens=truncated,
        stream=bool(request.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        timeout_s=request.timeout,
        priority=_priority(request, min_priority),
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


def _priority(request: SamplingFields, min_priority: int) -> int:
    if request.priority is None:
        return max(0, min_priority)
    if request.priority < min_priority:
        raise invalid_value(
            "priority",
            f"{request.priority} is below {min_priority}, the lowest number that your API key"
            " allows.",
        )
    return request.priority


# Prompts


def _prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a request, as texts or token ids.

    Raises:
        InvalidRequest: the list is empty, too long, or mixes texts and token ids.
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
            f"Invalid prompt: {len(found)} prompts with n = {num_choices} have more than"
            f" {MAX_NUM_CHOICES} choices in total; send several requests.",
            code="array_above_max_length",
            param="prompt",
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
    messages = [
        _message(message, f"messages[{index}]", is_harmony=is_harmony)
        for index, message in enumerate(request.messages or ())
    ]
    if request.documents and not (model.template and model.template.shows_documents):
        raise unsupported("documents", f"The chat template of {model.name!r} does not use them.")
    plain_tools = [msgspec.to_builtins(tool) for tool in tools]
    for tool in plain_tools if is_harmony else ():
        tool["function"].setdefault("description", "")  # the template fails without a description
    continues = bool(request.continue_final_message)
    if continues and (request.add_generation_prompt or not messages[-1]["content"]):
        raise invalid_value(
            "continue_final_message",
            "the last message must have content, and add_generation_prompt must not be set.",
        )
    return Conversation(
        messages,
        plain_tools,
        request.documents or (),
        arguments,
        request.add_generation_prompt is not False and not continues,
        continues,
    )


def _message(message: ChatMessage, path: str, *, is_harmony: bool) -> dict[str, Any]:
    """A message in the form that templates read: plain types, one text, `developer` as `system`.

    Content parts are joined by newlines, so that the words of two parts stay separate.
    """
    content = message.content
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
        parts = enumerate(content)
        content = "\n".join(_part(part, f"{path}.content[{number}]") for number, part in parts)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain |= dict.fromkeys(REASONING_KEYS, reasoning)
        if is_harmony and message.tool_calls and content:  # the template accepts only one of both
            plain |= {"content": None, "thinking": f"{reasoning}\n\n{content}"}
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
        raise only_text(f"{path}.type", part.type)
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise missing_parameter(f"{path}.{part.type}")
    return text
