"""The fields of a request that control reasoning: on or off, its budget and its effort.

Each field is applied, or refused with a message. What a model supports is read from its chat
template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from disagg.api.refusals import invalid_value, unsupported
from disagg.api.served_model import ServedModel

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_SWITCHES = ("enable_thinking", "thinking")  # names of the same switch in different templates
_HARMONY_EFFORTS = ("low", "medium", "high")


class BudgetField(Protocol):
    thinking_token_budget: int | None


def thinking_budget(request: BudgetField, model: ServedModel) -> int | None:
    """The largest number of reasoning tokens; None for no limit.

    Raises:
        InvalidRequest: the model has no known reasoning format.
    """
    budget = request.thinking_token_budget
    if budget is None or budget < 0:
        return None
    if model.reasoning_format is None:
        raise unsupported("thinking_token_budget", _no_reasoning(model))
    return budget


def template_arguments(
    given: Mapping[str, Any] | None, effort: Effort | None, model: ServedModel
) -> dict[str, Any]:
    """The variables of the chat template besides the messages.

    Args:
        given: `chat_template_kwargs`.
        effort: `reasoning_effort`.

    Raises:
        InvalidRequest: the template does not use a given variable, or not with this value.
    """
    read = model.template.arguments if model.template else frozenset()
    arguments = {}
    for name, value in (given or {}).items():
        known = name if name in read else _switch(read) if name in _SWITCHES else None
        if known is not None:
            arguments[known] = value
        elif not (name in _SWITCHES and value is False and model.reasoning_format is None):
            reads = ", ".join(sorted(read)) or "nothing"
            raise unsupported(
                f"chat_template_kwargs.{name[:64]}",
                f"The chat template of {model.name!r} does not use it. Besides the messages it"
                f" uses: {reads}.",
            )
    if effort is not None:
        arguments = _of_effort(effort, model, read) | arguments
    return arguments


def _of_effort(effort: Effort, model: ServedModel, read: frozenset[str]) -> dict[str, Any]:
    reasoning, switch = model.reasoning_format, _switch(read)
    if effort == "none" and switch is not None:
        return {switch: False}
    if "reasoning_effort" in read:
        if reasoning is not None and reasoning.is_harmony and effort not in _HARMONY_EFFORTS:
            raise _no_such_effort(effort, model, _HARMONY_EFFORTS)
        return {"reasoning_effort": effort}
    if switch is not None:
        if effort not in ("none", "medium"):
            raise _no_such_effort(effort, model, ("none", "medium"))
        return {switch: effort != "none"}
    if reasoning is None and effort != "none":
        raise unsupported("reasoning_effort", _no_reasoning(model))
    if reasoning is not None and effort != "medium":
        raise _no_such_effort(effort, model, ("medium",))
    return {}


def _switch(read: frozenset[str]) -> str | None:
    return next((name for name in _SWITCHES if name in read), None)


def _no_such_effort(effort: str, model: ServedModel, efforts: tuple[str, ...]) -> Exception:
    return invalid_value(
        "reasoning_effort",
        f"the chat template of {model.name!r} does not support {effort!r}; it supports"
        f" {', '.join(efforts)}. thinking_token_budget limits the reasoning of every model.",
    )


def _no_reasoning(model: ServedModel) -> str:
    return (
        f"The chat template of {model.name!r} shows no reasoning; if the model reasons anyway,"
        " start the server with --reasoning-parser."
    )
