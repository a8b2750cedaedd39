"""Response bodies of chats and text completions, and the other JSON replies of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from disagg.api.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from disagg.api.running_job import ChoiceDelta, Job, RunningJob
from disagg.api.served_model import ServedModel
from disagg.text.answer_delta import joined

_to_json = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct):
    """A delta of a call. Only the first one has `id`, `type` and the function's name."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # vLLM's newer name of the same
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str  # as vLLM's: what was served; its benchmark finds the tokenizer by it
    num_parameters: int = 0  # 0 if unknown
    parent: None = None
    object: Literal["model"] = "model"
    owned_by: str = "disagg"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


def models_body(models: Iterable[ServedModel]) -> bytes:
    return _to_json(ModelList([_described(model) for model in models]))


def model_body(model: ServedModel) -> bytes:
    return _to_json(_described(model))


def _described(model: ServedModel) -> Model:
    root = model.full_name or model.name
    return Model(model.name, model.created_unix_s, model.max_model_len, root, model.num_parameters)


def usage_of(run: RunningJob) -> Usage:
    num_prompt, num_completion = run.job.num_prompt_tokens, run.num_completion_tokens
    return Usage(
        num_prompt,
        num_completion,
        num_prompt + num_completion,
        PromptTokensDetails(run.num_cached_tokens),
        CompletionTokensDetails(run.num_reasoning_tokens),
    )


def chat_body(run: RunningJob, answers: Sequence[ChoiceDelta]) -> bytes:
    job = run.job
    choices = [
        ChatChoice(
            answer.index,
            _message(answer),
            None
            if job.spec.sampling.logprobs is None
            else chat_logprobs(answer.scored, job.model.tokenizer),
            answer.finish_reason,
            token_ids=_token_ids(job, answer),
        )
        for answer in answers
    ]
    return _to_json(
        ChatCompletion(
            job.id,
            job.created_unix_s,
            run.model_name,
            choices,
            usage_of(run),
            prompt_logprobs=_prompt_logprobs(job, answers[0]),
            prompt_token_ids=_prompt_token_ids(job, 0),
        )
    )


def _message(answer: ChoiceDelta) -> AssistantMessage:
    if not answer.calls and not answer.reasoning:
        return AssistantMessage(answer.text)
    message = AssistantMessage(answer.text or None)
    if answer.reasoning:
        message.reasoning_content = message.reasoning = answer.reasoning
    if answer.calls:
        message.tool_calls = [
            MessageToolCall(call.id, CalledFunction(call.name, call.arguments))
            for call in joined(answer.calls)
        ]
    return message


def completion_body(run: RunningJob, answers: Sequence[ChoiceDelta]) -> bytes:
    job = run.job
    choices = [
        CompletionChoice(
            answer.index,
            echo_of(job, answer.index) + answer.text,
            _completion_logprobs(job, answer),
            answer.finish_reason,
            prompt_logprobs=_prompt_logprobs(job, answer),
            prompt_token_ids=_prompt_token_ids(job, answer.index),
            token_ids=_token_ids(job, answer),
        )
        for answer in answers
    ]
    return _to_json(Completion(job.id, job.created_unix_s, run.model_name, choices, usage_of(run)))


def _completion_logprobs(job: Job, answer: ChoiceDelta) -> CompletionLogprobs | None:
    if job.spec.sampling.logprobs is None:
        return None
    tokenizer, echo = job.model.tokenizer, echo_of(job, answer.index)
    own = completion_logprobs(answer.scored, tokenizer, len(echo))
    if not job.spec.echo:
        return own
    prompt = job.requests[answer.index].token_ids
    return echoed_logprobs(prompt, answer.prompt_logprobs or (), own, tokenizer)


def _prompt_logprobs(job: Job, answer: ChoiceDelta) -> PromptLogprobs | msgspec.UnsetType:
    if not job.spec.shows_prompt_logprobs:
        return msgspec.UNSET
    prompt = job.requests[answer.index].token_ids
    return prompt_logprobs(prompt, answer.prompt_logprobs or (), job.model.tokenizer)


def _prompt_token_ids(job: Job, index: int) -> list[int] | msgspec.UnsetType:
    return list(job.requests[index].token_ids) if job.spec.return_token_ids else msgspec.UNSET


def _token_ids(job: Job, answer: ChoiceDelta) -> list[int] | msgspec.UnsetType:
    return answer.token_ids if job.spec.return_token_ids else msgspec.UNSET


def echo_of(job: Job, index: int) -> str:
    return job.echoes[index // job.spec.num_choices] if job.echoes else ""
