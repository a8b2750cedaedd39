"""The `tools` of a request: checked, passed to the chat template, and enforced by grammar.

With `tool_choice` "auto" the model decides whether to call a function, in the format of its chat
template. If a call is required, a grammar restricts the answer to JSON: a list of calls, or the
arguments of the named function.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from disagg.api.openai.structured_output import strict
from disagg.api.refusals import invalid_value, unsupported
from disagg.api.served_model import ServedModel
from disagg.messages import Grammar
from disagg.text.answer_delta import Reader
from disagg.text.answer_reader import AnswerSyntax, read_arguments_of
from disagg.text.tool_parsers.json_calls import read_llama3_json

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]


MAX_REQUIRED_CALLS = 32  # per answer; a weak model would generate calls until its limit of tokens


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


class ToolFields(Protocol):
    """The request fields of tool calling."""

    tools: Tools | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None


def offered_tools(request: ToolFields) -> Sequence[Tool]:
    """The functions that the model may call; none with `tool_choice: "none"`."""
    return () if request.tool_choice == "none" else request.tools or ()


def check_tools(request: ToolFields) -> None:
    """Check tools and `tool_choice`.

    Raises:
        InvalidRequest: two functions have the same name, or `tool_choice` names an unknown one.
    """
    names = [tool.function.name for tool in request.tools or ()]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid_value(
                f"tools[{index}].function.name", f"two functions have the name {name!r}."
            )
    choice = request.tool_choice
    if choice == "required" and not names:
        raise invalid_value("tool_choice", "'required' needs tools.")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid_value("tool_choice", f"the tools have no function {choice.function.name!r}.")


def required_calls(request: ToolFields) -> Grammar | None:
    """The grammar of the answer if a call is required, else None.

    Raises:
        InvalidRequest: two functions have different definitions of the same name in their schemas.
    """
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        function = next(t.function for t in request.tools or () if t.function.name == name)
        return _grammar(_parameters(function))
    if request.tool_choice != "required":
        return None
    definitions: dict[str, dict[str, Any]] = {}
    calls = [_call_schema(tool.function, definitions) for tool in request.tools or ()]
    most = 1 if request.parallel_tool_calls is False else MAX_REQUIRED_CALLS
    items = {"anyOf": calls}
    return _grammar(
        {"type": "array", "minItems": 1, "maxItems": most, "items": items, **definitions}
    )


def _call_schema(
    function: FunctionDefinition, definitions: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The schema of a call.

    Definitions in the schema of its parameters move to `definitions`, so that references stay
    valid.
    """
    parameters = dict(_parameters(function))
    for place in ("$defs", "definitions"):
        own = parameters.pop(place, None)
        if not isinstance(own, dict):
            continue
        known = definitions.setdefault(place, {})
        for name, definition in own.items():
            if known.setdefault(name, definition) != definition:
                raise invalid_value(
                    "tools",
                    f"two functions have different definitions of {place}/{name}; rename one.",
                )
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    """The schema of a function's arguments, always strict; without one a function has none.

    They are an object, also where the schema leaves the type out or allows others, such as null.
    """
    return strict({**(function.parameters or {"properties": {}}), "type": "object"})


def _grammar(schema: dict[str, Any]) -> Grammar:
    try:
        return Grammar("json", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
    except RecursionError:
        raise invalid_value("tools", "a schema is nested too deeply.") from None


def answer_syntax(request: ToolFields, model: ServedModel) -> AnswerSyntax | None:
    """How reasoning and calls are parsed in the answers to `request`; None for plain text.

    Raises:
        InvalidRequest: the model's chat template does not support tools, or its format of calls is
            unknown.
    """
    reasoning, tools = model.reasoning_format, offered_tools(request)
    if reasoning is None and not tools:
        return None
    return AnswerSyntax.from_formats(
        reasoning,
        model.tool_format,
        {tool.function.name: tool.function.parameters or {} for tool in tools},
        read_calls=_checked_reader(request, model) if tools else None,
        parallel=request.parallel_tool_calls is not False,
    )


def _checked_reader(request: ToolFields, model: ServedModel) -> Reader | None:
    """The reader of calls that a grammar enforces; None if the model calls in its own format."""
    if model.template is None or not model.template.shows_tools:
        raise unsupported("tools", f"The chat template of {model.name!r} does not support tools.")
    if isinstance(request.tool_choice, NamedTool):
        return read_arguments_of(request.tool_choice.function.name)
    if request.tool_choice == "required":
        return read_llama3_json
    if model.tool_format is None:
        raise unsupported(
            "tools",
            f"The format of tool calls of {model.name!r} is unknown; set tool_choice to"
            " 'required', to a function or to 'none', or start the server with"
            " --tool-call-parser.",
        )
    return None
