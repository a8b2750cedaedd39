"""Renders messages to a prompt text with the model's own Jinja template, in a sandbox.

Equal to transformers' `apply_chat_template`, whose filters and globals templates are written
against. The template comes from the operator's model directory, never from a request. The sandbox
bounds the time and the size of whatever is made on the way, so that a bad template fails the
request that meets it and nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from disagg.errors import InvalidRequest, ModelError
from disagg.text.template_sandbox import MAX_NUM_CHARS, Sandbox, check_json

RENDER_LIMIT_S = 10.0


class ChatTemplate:
    """A compiled template. `variables` are the special tokens it may name (`bos_token`...).

    Args:
        now: what a template that prints the date is told.
        timer: monotonic seconds.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        environment = self._environment = Sandbox(
            timer,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"The chat template does not compile: {error}.") from error
        self.shows_tools = "tools" in source
        self.source = source
        self._variables = dict(variables)
        self.key = (source, tuple(sorted(self._variables.items())))  # equal for equal templates

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        limit_s: float = RENDER_LIMIT_S,
    ) -> str:
        """The prompt's text. May be called in several threads at a time.

        Raises:
            InvalidRequest: the template refuses the messages or fails on them.
            TemplateTooSlow: it takes longer than `limit_s`.
        """
        self._environment.begin(limit_s)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                **self._variables,
                **(arguments or {}),
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                num_chars += len(piece)
                if num_chars > MAX_NUM_CHARS:
                    raise OverflowError("its output is too long")
                pieces.append(piece)
        # Template expressions raise what Python raises on odd operands; none of it is our fault.
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"The model's chat template does not accept these messages: {str(error)[:300]}",
                code="invalid_prompt",
                param="messages",
            ) from None
        except (AttributeError, RecursionError, MemoryError):
            raise InvalidRequest(
                "The model's chat template fails on these messages.",
                code="invalid_prompt",
                param="messages",
            ) from None
        return "".join(pieces)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks answers for training; here just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    check_json(value, indent)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
