"""A request in a form that no longer depends on the API: the result of the second of five steps.

The later steps do not know which API the request came through (`service`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from disagg.api.served_model import ServedModel
from disagg.api.slo import RequestSlo
from disagg.messages import Grammar, SamplingParams
from disagg.text.answer_reader import AnswerSyntax


class JsonText(str):
    """JSON text of an earlier call's arguments; chat templates get the parsed value."""


class Conversation(msgspec.Struct, frozen=True):
    """Messages, tools and documents in the form that chat templates read.

    That is plain types and one text per message. Text in them never becomes a control token; only
    the template writes control tokens.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    documents: Sequence[dict[str, str]] = ()
    template_arguments: Mapping[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message


class Text(msgspec.Struct, frozen=True):
    """A prompt as text. Control tokens written in it count as control tokens."""

    text: str
    add_special_tokens: bool = True


Prompt: TypeAlias = Conversation | Text | list[int]  # a list holds token ids


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for.

    Attributes:
        prompts: at least one, each with `num_choices` answers.
        prompt_param: name of the field with the prompts, for error messages.
        sampling: sampling parameters without those that are chosen later: `max_tokens`, `seed`,
            `grammar` and `bad_words_token_ids`.
        max_tokens: None if not set; the limit is then `default_max_tokens`, or as many as fit.
        seed: seed of the first choice; None if not set.
        grammar: name of the field with the schema or grammar of answers, and the grammar.
        syntax: format of reasoning and calls in an answer; None for plain text.
        include_reasoning: whether reasoning is part of the answer.
        thinking_token_budget: largest number of reasoning tokens; None for no limit.
        repeated: the request, if the response repeats some of its fields.
        echo: whether the prompt is repeated before its answer.
        only_echo: whether the answer is the repeated prompt alone.
        shows_prompt_logprobs: whether the response has a field with the prompt's log-probabilities.
        truncate_prompt_tokens: number of last tokens to which prompts are cut; -1: as many as fit.
        timeout_s: time limit of the whole answer; None for the server's default.
        priority: lower numbers go first.
        slo: SLOs from the body.
    """

    model: ServedModel
    prompts: Sequence[Prompt]
    prompt_param: str
    sampling: SamplingParams
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    seed: int | None = None
    grammar: tuple[str, Grammar] | None = None
    bad_words: tuple[str, ...] = ()
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    syntax: AnswerSyntax | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = None
    repeated: Any = None
    echo: bool = False
    only_echo: bool = False
    shows_prompt_logprobs: bool = False
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # each event says how many tokens its choice has so far
    timeout_s: float | None = None
    priority: int = 0
    slo: RequestSlo = RequestSlo()
    cache_salt: str = ""
