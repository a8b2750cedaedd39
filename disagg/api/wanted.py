"""A request independent of any API's format: the result of the second of its five steps.

The later steps do not know which API the request came through (`service`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from disagg.api.served_model import ServedModel
from disagg.api.slo import Slo
from disagg.messages import Grammar, SamplingParams
from disagg.text.answer_reader import AnswerSyntax


class JsonText(str):
    """Arguments of an earlier call, as the model wrote them: templates get what they say."""


class Conversation(msgspec.Struct, frozen=True):
    """Messages and tools as chat templates know them: plain types, and each message one text.

    Nothing in them counts as a control token: only the template writes those.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    template_arguments: Mapping[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer is the rest of the last message


class Text(msgspec.Struct, frozen=True):
    """A prompt as it stands, control tokens written out in it included."""

    text: str
    add_special_tokens: bool = True


Prompt: TypeAlias = Conversation | Text | list[int]  # the last are token ids


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        prompts: at least one, each with `num_choices` answers.
        prompt_param: the field that they stand in, for refusals.
        sampling: of each answer, without what is chosen later: `max_tokens`, `seed`, `grammar` and
        `bad_words_token_ids`.
        max_tokens: None: left open; then `default_max_tokens`, or as many as fit.
        seed: of the first choice; None: left open.
        grammar: the field that says what answers must look like, and what it says.
        syntax: how reasoning and calls are read in an answer; None: it is text.
        include_reasoning: whether reasoning is part of the answer.
        thinking_token_budget: tokens of reasoning; None: no limit.
        repeated: a request that its answer repeats.
        echo: whether the prompt is repeated before its answer.
        only_echo: and whether nothing follows it.
        shows_prompt_logprobs: in a field of their own.
        truncate_prompt_tokens: prompts are cut to their last so many tokens; -1: so many as fit.
        timeout_s: for the whole answer; None: the server's.
        priority: lower is earlier.
        slo: that its body asks for.
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
    slo: Slo = Slo()
    cache_salt: str = ""
