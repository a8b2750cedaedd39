"""A request in a form that no longer depends on the API: the result of the second of five steps.

The later steps do not know which API the request came through (`service`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from disagg.api.images import RemoteImage
from disagg.api.refusals import invalid_value
from disagg.api.served_model import ServedModel
from disagg.messages import Grammar, SamplingParams
from disagg.text.answer_reader import AnswerSyntax

NONE = "none"

Milliseconds: TypeAlias = Annotated[float, Meta(gt=0.0, le=1e9)] | Literal["none"]


class RequestSlo(NamedTuple):
    """TTFT and TPOT SLO in seconds. 0: not set by the request; inf: no SLO.

    A client sets them with the headers `x-slo-ttft-ms` and `x-slo-tpot-ms`, or with `slo_ttft_ms`
    and `slo_tpot_ms` in the body, which take precedence. "none" marks batch work: the request has
    no such SLO, and never goes before requests that have one.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    @property
    def kind(self) -> str:
        """The label in metrics that says which SLO applies to the request."""
        if self == RequestSlo():
            return "model"
        return "none" if math.isinf(self.ttft_s) and math.isinf(self.tpot_s) else "request"


def in_headers(headers: Mapping[bytes, bytes]) -> RequestSlo:
    """The SLOs in the headers. Raises `InvalidRequest`."""
    ttft_s, tpot_s = (
        _read_header(name, headers.get(name.encode(), b"").decode("latin-1").strip())
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms")
    )
    return RequestSlo(ttft_s, tpot_s)


def in_body(*ttft_tpot_ms: float | str | None) -> RequestSlo:
    """The SLOs in the fields of a body."""
    return RequestSlo(
        *(math.inf if isinstance(each, str) else (each or 0.0) / 1e3 for each in ttft_tpot_ms)
    )


def choose_slo(
    body: RequestSlo, headers: RequestSlo, least: RequestSlo, of_model: RequestSlo
) -> RequestSlo:
    """The SLOs that apply to a request.

    Args:
        least: the shortest SLOs that its tenant may set; 0 for those of the model.
        of_model: the SLOs of the model; 0 for none.

    Raises:
        InvalidRequest: the request sets a shorter SLO than it may.
    """
    chosen_s = []
    for name, body_s, header_s, tenant_s, model_s in zip(
        ("slo_ttft_ms", "slo_tpot_ms"), body, headers, least, of_model, strict=True
    ):
        slo_s, least_s = body_s or header_s, tenant_s or model_s
        if 0.0 < slo_s < least_s:
            raise invalid_value(
                name if body_s else f"x-{name.replace('_', '-')}",
                f"{1e3 * slo_s:g} ms is less than {1e3 * least_s:g} ms, the shortest SLO that"
                " your key allows for this model.",
            )
        chosen_s.append(slo_s)
    return RequestSlo(*chosen_s)


def _read_header(name: str, text: str) -> float:
    if not text:
        return 0.0
    if text == NONE:
        return math.inf
    with suppress(ValueError):
        if 0.0 < (seconds := float(text) / 1e3) <= 1e6:
            return seconds
    raise invalid_value(
        name, f'{text[:64]!r} is neither "{NONE}" nor a number of milliseconds greater than 0.'
    )


class JsonText(str):
    """JSON text of an earlier call's arguments; chat templates get the parsed value."""


class Conversation(msgspec.Struct, frozen=True):
    """Messages, tools and documents in the form that chat templates read.

    That is plain types and one text per message, or a list of parts where a message has images.
    Text in them never becomes a control token; only the template writes control tokens.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    documents: Sequence[dict[str, str]] = ()
    template_arguments: Mapping[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message
    images: Sequence[bytes | RemoteImage] = ()  # in their order in the messages


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
        only_prompt: whether only the prompt matters, so that no token of an answer is shown.
        shows_prompt_logprobs: whether the response has a field with the prompt's log-probabilities.
        truncate_prompt_tokens: number of last tokens to which prompts are cut; -1: as many as fit.
        timeout_s: time limit of the whole answer; None for the server's default.
        priority: lower numbers go first; None if not set.
        hinted_priority: without one, the same as far as the tenant's limit allows.
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
    only_prompt: bool = False
    shows_prompt_logprobs: bool = False
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # each event says how many tokens its choice has so far
    timeout_s: float | None = None
    priority: int | None = None
    hinted_priority: int = 0
    slo: RequestSlo = RequestSlo()
    cache_salt: str = ""
