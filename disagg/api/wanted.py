"""A request independent of any API's format: the result of the second of its five steps.

The later steps know nothing of the API that it came through (`service`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from disagg.api.openai.tool_calls import CallSyntax
from disagg.api.served_model import ServedModel
from disagg.messages import Grammar, SamplingParams


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
        sampling: of each answer, without what is chosen later: `max_tokens`, `seed`, `grammar`.
        max_tokens: None: left open; then `default_max_tokens`, or as many as fit.
        seed: of the first choice; None: left open.
        grammar: the field that says what answers must look like, and what it says.
        calls: how tool calls are read in an answer; None: it is text.
        echo: whether the prompt is repeated before its answer.
        timeout_s: for the whole answer; None: the server's.
        priority: lower is earlier.
    """

    model: ServedModel
    prompts: Sequence[Prompt]
    prompt_param: str
    sampling: SamplingParams
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    seed: int | None = None
    grammar: tuple[str, Grammar] | None = None
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    calls: CallSyntax | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    timeout_s: float | None = None
    priority: int = 0
    cache_salt: str = ""
