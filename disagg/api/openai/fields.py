"""The requests of OpenAI's chats and text completions: their fields, types and bounds.

Types are strict (no `"5"` for 5, no 1 for true) and every number, string and list has a bound.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from disagg.api.json_body import Body
from disagg.api.refusals import INTERNAL_FIELDS, NOT_IMPLEMENTED
from disagg.api.request_spec import Milliseconds
from disagg.config import MAX_PRIORITY
from disagg.messages import KVEviction

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
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]


class FunctionDefinition(msgspec.Struct, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct):
    name: FunctionName


class NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Meta(max_length=128)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


Choices = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1000)
]
Schema = dict[str, Any] | str


class JsonSchemaFormat(msgspec.Struct):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None  # of `json_object`, as llama.cpp and others have it


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AgentHints(msgspec.Struct):
    """What an agent knows of its request, in the fields of NVIDIA Dynamo, where higher priorities
    go first. A strict one counts before the other."""

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    strict_priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    @property
    def order(self) -> int:
        """The same as a `priority` of ours, of which lower ones go first."""
        hint = self.strict_priority or self.priority or 0
        return -max(-MAX_PRIORITY, min(MAX_PRIORITY, hint))


class NvExt(msgspec.Struct):
    agent_hints: AgentHints | None = None


# Fields that are refused, and why. Those that are not implemented would change the answer.
REFUSED = {
    **dict.fromkeys(INTERNAL_FIELDS, "Leave it out: clients may not set it."),
    **dict.fromkeys(
        (
            "audio", "embed_dtype", "endianness", "function_call", "functions", "length_penalty",
            "logprob_token_ids", "max_tokens_per_doc", "max_tokens_per_query", "modalities",
            "normalize", "prediction", "repetition_detection", "return_prompt_text",
            "return_token_offsets", "return_tokens_as_token_ids", "suffix", "truncation_side",
            "use_beam_search", "watermarking", "web_search_options",
        ),
        NOT_IMPLEMENTED,
    ),
}  # fmt: skip


class OpenAiBody(Body, kw_only=True):
    refused: ClassVar = REFUSED


class RequestFields(OpenAiBody, kw_only=True):
    """Fields that all requests to workers have in common."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    timeout: Annotated[float, Meta(gt=0.0)] | None = None  # in seconds, for the whole answer
    priority: Priority | None = None
    slo_ttft_ms: Milliseconds | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    user: Label | None = None


class AnswerFields(RequestFields, kw_only=True):
    """Fields that chat completions, text completions and responses have in common."""

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
    slo_tpot_ms: Milliseconds | None = None
    structured_outputs: StructuredOutputs | None = None
    nvext: NvExt | None = None
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
    kv_eviction: KVEviction | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None  # vLLM's older names for parts of `structured_outputs`
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class ImageUrl(msgspec.Struct):
    url: str
    detail: Literal["auto", "low", "high"] | None = None  # has no effect


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class PlacedPart(ContentPart, kw_only=True):
    """A part of another API's request. Errors name its place there, and the field of its image."""

    path: str
    image_field: str = "image_url"


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
    refused: ClassVar = REFUSED | dict.fromkeys(
        ("echo", "add_special_tokens"), "Only /v1/completions has it."
    )
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
    refused: ClassVar = REFUSED | dict.fromkeys(  # clients rely on their effect
        ("tools", "documents", "reasoning_effort", "thinking_token_budget"),
        "Use /v1/chat/completions, which supports it.",
    )
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


class TokenizeRequest(OpenAiBody, kw_only=True):
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


AdapterName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterRequest(OpenAiBody, kw_only=True):
    """As vLLM's. `base_model` is needed only where several served models take adapters."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    base_model: AdapterName | None = None
    load_inplace: bool = False


class UnloadAdapterRequest(OpenAiBody, kw_only=True):
    lora_name: AdapterName


class DetokenizeRequest(OpenAiBody, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]
    model: Annotated[str, Meta(max_length=256)] | None = None
