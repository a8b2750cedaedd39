"""The first step of a request: parses bytes into one of OpenAI's requests.

Types are strict (no `"5"` for 5, no 1 for true) and every number, string and list has a bound.
Unknown fields are ignored because clients send extra ones. Unsupported fields that would change the
answer are refused by name. `understand` checks fields that depend on each other.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from disagg.api.json_body import read_struct
from disagg.api.openai.reasoning import Effort
from disagg.api.openai.structured_output import Choices, ResponseFormat, Schema, StructuredOutputs
from disagg.api.openai.tools import ToolChoice, Tools
from disagg.api.refusals import unsupported
from disagg.api.slo import Milliseconds
from disagg.config import MAX_PRIORITY

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
    "documents": ([],),
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
_OF_CHATS = ("tools", "reasoning_effort", "thinking_token_budget")


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
