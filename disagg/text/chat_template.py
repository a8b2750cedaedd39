"""Renders messages to a prompt text with the model's Jinja template, in a sandbox.

It provides the same filters and globals as transformers' `apply_chat_template`. The template comes
from the operator's model directory, never from a request. The sandbox limits its time, so a bad
template fails only the request that uses it.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from disagg.errors import InvalidRequest, ModelError

MAX_NUM_CHARS = 32 << 20  # longest prompt
_MAX_PRODUCT = 1 << 20  # longest repeated text or list
_MAX_WIDTH = 1 << 16  # largest number given to a method or filter that makes texts or lists
_WIDE = re.compile(r"[%:.][^a-zA-Z%{}]*(\d{5}|\*)")  # such a number in a format
_WIDENING = ("batch", "center", "indent", "round", "slice", "tojson")


class TemplateTooSlow(InvalidRequest):
    """Rendering took longer than allowed."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates: Jinja's own sandbox, with limits.

    Jinja's sandbox forbids attributes and mutation. Templates come from model files, never from
    requests, so a few checks are enough besides: the time in every iteration and at every call, and
    the numbers with which a short expression makes a text of gigabytes at once.

    Args:
        timer: returns monotonic seconds.
        now: returns the date.
    """

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, timer: Callable[[], float], now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self._timer = timer
        self._limits = threading.local()
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        for name, filter_ in {**self.filters, "tojson": _to_json}.items():
            self.filters[name] = self._watch(name, filter_)

    def begin(self, limit_s: float) -> None:
        """Start the time limit of the calling thread."""
        self._limits.seconds = limit_s
        self._limits.ends_s = self._timer() + limit_s

    def tick(self) -> None:
        """Raises `TemplateTooSlow` if the time is over."""
        if self._timer() > self._limits.ends_s:
            raise TemplateTooSlow(
                "The model's chat template takes longer than"
                f" {self._limits.seconds:g} s on these messages.",
                code="invalid_prompt",
                param="messages",
            )

    def _watch(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        num_own = int(hasattr(filter_, "jinja_pass_arg"))  # Jinja's own argument before the value

        @functools.wraps(filter_)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            value, *others = args[num_own:]
            if name in _WIDENING:
                _check_widths(*others, *kwargs.values())
            elif name == "format":
                _check_form(value)
            return filter_(*args, **kwargs)

        return checked

    def call_test(self, *args: Any, **kwargs: Any) -> bool:
        """Called for each item by `select` and similar filters."""
        self.tick()
        return bool(super().call_test(*args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: list[jinja2.nodes.For | jinja2.nodes.Macro] = []
        loops += tree.find_all(jinja2.nodes.For)
        loops += tree.find_all(jinja2.nodes.Macro)
        for loop in loops:
            tick = jinja2.nodes.EnvironmentAttribute("tick")
            look = jinja2.nodes.ExprStmt(jinja2.nodes.Call(tick, [], [], None, None))
            loop.body.insert(0, look.set_lineno(loop.lineno).set_environment(self))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("** is not allowed in a chat template")
        if operator == "%":
            _check_form(left)
        elif abs(_size(left) * _size(right)) > _MAX_PRODUCT:
            raise SecurityError("a product is too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The parameters have Jinja's names. Its own arguments, such as `_loop_vars`, are in
        # `kwargs` and mean nothing here.
        __self.tick()
        if isinstance(getattr(__obj, "__self__", None), str | bytes | int):
            _check_widths(*args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_form(value.__self__)
        return wrapped


def _check_widths(*values: Any) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > _MAX_WIDTH:
            raise SecurityError(f"a width is above {_MAX_WIDTH}")


def _check_form(form: Any) -> None:
    if isinstance(form, str) and _WIDE.search(form):
        raise SecurityError("a width in a format must be a number of at most four digits")


def _size(operand: Any) -> float:
    if isinstance(operand, Sequence):
        return len(operand)
    return operand if isinstance(operand, int | float) else 1


RENDER_LIMIT_S = 10.0
PROBE_LIMIT_S = 1.0
_OWN = ("messages", "tools", "documents", "add_generation_prompt")


_UP_TO_A_MARK = re.compile(r".*[>\]\n]", re.DOTALL)


class CallShape(NamedTuple):
    """How a template expects earlier tool calls.

    Attributes:
        has_text_arguments: whether arguments are JSON text instead of parsed values.
        no_content: the content of a message without text.
    """

    has_text_arguments: bool = False
    no_content: str | None = None


_SHAPES = (CallShape(), CallShape(no_content=""), CallShape(True), CallShape(True, ""))
PROBE_NAME, _PROBE_KEY = "name_of_a_function", "name_of_an_argument"
PROBE_ARGUMENTS = {_PROBE_KEY: "a"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "another_function",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


# Mistral's templates take ids of nine characters only; Kimi-K2's show the id, not the name.
_PROBE_IDS = ("call00001", f"functions.{PROBE_NAME}:0")


def _calling(shape: CallShape, call_id: str = _PROBE_IDS[0]) -> list[dict[str, Any]]:
    """A conversation with a tool call."""
    arguments: Any = PROBE_ARGUMENTS
    if shape.has_text_arguments:
        arguments = json.dumps(arguments)
    function = {"name": PROBE_NAME, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": shape.no_content, "tool_calls": [call]},
        {"role": "tool", "content": "a", "tool_call_id": call_id},
    ]


def _read_by(tree: jinja2.nodes.Template) -> frozenset[str]:
    """The variables that a template reads from its caller.

    A variable that it also sets counts if it tests whether the variable is defined, because the
    value that it sets is then a default.
    """
    names = list(tree.find_all(jinja2.nodes.Name))
    tests = tree.find_all(jinja2.nodes.Test)
    tested = {
        test.node.name
        for test in tests
        if test.name in ("defined", "undefined") and isinstance(test.node, jinja2.nodes.Name)
    }
    is_set = {name.name for name in names if name.ctx in ("store", "param")}
    return frozenset(jinja2.meta.find_undeclared_variables(tree) - (is_set - tested))


class ChatTemplate:
    """A compiled template.

    Args:
        variables: special tokens that it may use (`bos_token` and others).
        now: returns the date, for templates that print it.
        timer: returns monotonic seconds.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        environment = self._environment = Sandbox(timer, now)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"The chat template does not compile: {error}.") from error
        # Variables that clients may set besides messages and tools.
        self.arguments = _read_by(tree).difference(environment.globals, variables, _OWN)
        self.shows_tools = "tools" in source
        self.shows_documents = "documents" in jinja2.meta.find_undeclared_variables(tree)
        texts = [each.value for each in tree.find_all(jinja2.nodes.Const)]
        # The roles of the two texts in rerankers' templates.
        self.judges_documents = "query" in texts and "document" in texts
        self.source = source
        self._variables = dict(variables)
        self.key = (source, tuple(sorted(self._variables.items())))  # identifies the template

    @functools.cached_property
    def call_shape(self) -> CallShape:
        """How the template expects earlier messages with tool calls.

        Some templates fail on a shape, leave the calls out or write "None" for null, so each shape
        is tried.
        """
        fitting: list[tuple[int, int]] = []
        for index, shape in enumerate(_SHAPES):
            with suppress(InvalidRequest):
                shown = self.render(_calling(shape), tools=[_PROBE_TOOL], limit_s=PROBE_LIMIT_S)
                if all(word in shown for word in (PROBE_NAME, _PROBE_KEY)):
                    fitting.append((shown.count("None"), index))
        return _SHAPES[min(fitting)[1] if fitting else 0]

    @functools.cached_property
    def image_mark(self) -> str | None:
        """What the template writes for an image in a user's message; None if it shows none."""
        text = {"type": "text", "text": PROBE_NAME}
        with suppress(InvalidRequest):
            with_image, without = (
                self.render([{"role": "user", "content": parts}], limit_s=PROBE_LIMIT_S)
                for parts in ([{"type": "image"}, text], [text])
            )
            pairs = zip(with_image, without, strict=False)
            begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            mark = with_image[begin : begin + len(with_image) - len(without)]
            if PROBE_NAME in without and "'type'" not in with_image:
                return mark or None
        return None

    @functools.cached_property
    def needs_parts(self) -> bool:
        """Whether the template shows lists of parts only, and leaves out a content that is text."""
        with suppress(InvalidRequest):
            message = {"role": "user", "content": PROBE_NAME}
            is_lost = PROBE_NAME not in self.render([message], limit_s=PROBE_LIMIT_S)
            return is_lost and self.image_mark is not None
        return False

    @functools.cached_property
    def shown_calls(self) -> tuple[str, ...]:
        """Answers with a call as the template shows them in later turns, without the part that its
        prompts end with; none if it fails on them or leaves calls out."""
        found = []
        for call_id in _PROBE_IDS:
            question, called, _ = _calling(self.call_shape, call_id)
            with suppress(InvalidRequest):
                prompt, shown = (
                    self.render(
                        messages,
                        tools=[_PROBE_TOOL],
                        add_generation_prompt=not messages[1:],
                        limit_s=PROBE_LIMIT_S,
                    )
                    for messages in ([question], [question, called])
                )
                alike = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, shown, strict=False))
                # Different marks may begin alike: <think> and <tool_call>.
                marks = _UP_TO_A_MARK.match(shown[: sum(1 for _ in alike)])
                answer = shown[marks.end() :] if marks else shown
                if _PROBE_KEY in answer:
                    found.append(answer)
        return tuple(found)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, str]] = (),
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        limit_s: float = RENDER_LIMIT_S,
    ) -> str:
        """Render the prompt's text. It may be called by several threads at the same time.

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
                documents=documents or None,
                add_generation_prompt=add_generation_prompt,
            ):
                num_chars += len(piece)
                if num_chars > MAX_NUM_CHARS:
                    raise OverflowError("its output is too long")
                pieces.append(piece)
        # Template expressions raise Python's errors for invalid operands.
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"The model's chat template does not accept these messages: {str(error)[:300]}",
                code="invalid_prompt",
                param="messages",
            ) from None
        except (AttributeError, RuntimeError, MemoryError):  # RecursionError is a RuntimeError
            raise InvalidRequest(
                "The model's chat template fails on these messages.",
                code="invalid_prompt",
                param="messages",
            ) from None
        return "".join(pieces)


class _Generation(jinja2.ext.Extension):
    """Renders the body of `{% generation %}...{% endgeneration %}`, which has no other effect."""

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
    """The filter `tojson`. Unlike Jinja's own filter it does not escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
