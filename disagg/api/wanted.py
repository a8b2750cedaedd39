"""A request independent of any API's format: the result of the second of its five steps.

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
    """Arguments of an earlier call as JSON text; templates get the parsed value."""


class Conversation(msgspec.Struct, frozen=True):
    """Messages and tools in the form that chat templates read: plain types, one text per message.

    No text in them becomes a control token; only the template writes control tokens.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    template_arguments: Mapping[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer is the rest of the last message


class Text(msgspec.Struct, frozen=True):
    """A prompt as text; control tokens that are written in it are parsed."""

    text: str
    add_special_tokens: bool = True


Prompt: TypeAlias = Conversation | Text | list[int]  # the last are token ids


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        prompts: at least one, each with `num_choices` answers.
        prompt_param: the field of the prompts, for error messages.
        sampling: of each answer, without the parameters that are chosen later: `max_tokens`,
            `seed`, `grammar` and `bad_words_token_ids`.
        max_tokens: None: not set; then `default_max_tokens`, or as many as fit.
        seed: of the first choice; None: not set.
        grammar: the field with the schema or grammar of answers, and its value.
        syntax: the format of reasoning and calls in an answer; None: plain text.
        include_reasoning: whether reasoning is part of the answer.
        thinking_token_budget: tokens of reasoning; None: no limit.
        repeated: the request, if its answer repeats fields of it.
        echo: whether the prompt is repeated before its answer.
        only_echo: whether nothing follows the repeated prompt.
        shows_prompt_logprobs: whether they have a field of their own.
        truncate_prompt_tokens: prompts are cut to this many last tokens; -1: as many as fit.
        timeout_s: for the whole answer; None: the server's default.
        priority: lower is earlier.
        slo: the SLOs in the body.
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
    timeout_s: float | None = None
    priority: int = 0
    slo: RequestSlo = RequestSlo()
    cache_salt: str = ""
