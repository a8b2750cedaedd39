"""The reasoning settings for engines: the tokens of the marks around reasoning, and its budget."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.api.refusals import unsupported
from disagg.api.request_spec import RequestSpec
from disagg.api.served_model import ServedModel
from disagg.messages import Grammar, Thinking
from disagg.text.reasoning import ReasoningFormat, prompt_tail
from disagg.text.tool_parsers.harmony import ANALYSIS, FINAL_THEN


def thinking_of(
    spec: RequestSpec, grammar: Grammar | None, token_ids: Sequence[int]
) -> Thinking | None:
    """The reasoning settings of a request with the prompt `token_ids`; None if there are none.

    Raises:
        InvalidRequest: the request has a budget, but the model's marks are ordinary text or tokens
            that the model does not have, so that no budget can be enforced.
    """
    reasoning = spec.syntax.reasoning if spec.syntax else None
    budget = spec.thinking_token_budget
    if reasoning is None or (grammar is None and budget is None):
        return None
    model = spec.model
    marks = reasoning.ends[:1]
    if reasoning.is_harmony:
        marks = (*marks, reasoning.forced_end, FINAL_THEN)
    if any(token_id >= model.vocab_size for mark in marks for token_id in _ids(model, mark)):
        _refuse_budget(spec, "with a token that its weights do not have")
        return None
    if reasoning.is_harmony:
        return Thinking(
            starts=(_ids(model, ANALYSIS),),
            end=_ids(model, reasoning.ends[0]),
            forced_end=_ids(model, reasoning.forced_end),
            then=_ids(model, FINAL_THEN),
            is_framed=True,
            budget=budget,
        )
    end = _ids(model, reasoning.ends[0])
    if len(end) > 1:  # a model may write the same text with other tokens
        _refuse_budget(spec, "with ordinary text instead of a special token")
        return None
    tail = prompt_tail(model.tokenizer, token_ids)
    if grammar is not None and reasoning.is_closed(tail):
        return None  # the answer starts at once, without reasoning
    return Thinking(
        starts=_starts(reasoning, model),
        end=end,
        forced_end=end,
        is_open=reasoning.is_open(tail),
        budget=budget,
    )


def _refuse_budget(spec: RequestSpec, ends: str) -> None:
    if spec.thinking_token_budget is not None:
        raise unsupported(
            "thinking_token_budget", f"The model {spec.model.name!r} ends its reasoning {ends}."
        )


def _starts(reasoning: ReasoningFormat, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The marks that start reasoning, also with a line break before, as some models write it."""
    return tuple(_ids(model, before + mark) for mark in reasoning.starts for before in ("", "\n"))


def _ids(model: ServedModel, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))
