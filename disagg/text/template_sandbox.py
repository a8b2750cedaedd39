"""The sandbox in which chat templates run: limits their time and the size of their texts.

Jinja's own sandbox forbids attributes and mutation. In addition, the time is checked in every
iteration of every loop, and at every filter, test and call. If a short expression can produce a
long text (widths, replacements, concatenations, products, lists written as text), the length is
computed before the text is created. An object that is in a list twice counts twice, because it
would be written twice.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2.filters
import jinja2.nodes
import jinja2.visitor
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from disagg.errors import InvalidRequest

MAX_NUM_CHARS = 32 << 20  # longest prompt, and longest text that a template makes
_MAX_PRODUCT = 1 << 20  # longest repeated text or list
_MAX_ITEMS = 1 << 21  # most values that are written as text; checking them takes about a second
_MAX_WIDTH = 1 << 16  # largest width to which a text is padded
_MAX_PRECISION = 300  # most decimal digits; a float has fewer

# Find widths in formats with more than four digits or given as an argument, in linear time.
_WIDE = {
    "%": re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)"),
    "{": re.compile(r"\{[^{}]*\d{5}|\{[^{}:]*+:[^{}]*+\{"),
}
# Filters that prompts do not need and that are unlimited or slow on long texts.
_LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap")


class TemplateTooSlow(InvalidRequest):
    """Rendering took longer than allowed."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment with limits.

    Args:
        timer: returns monotonic seconds.
    """

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, timer: Callable[[], float], **options: Any) -> None:
        super().__init__(finalize=_writable, **options)
        self._timer = timer
        self._limits = threading.local()
        del self.globals["lipsum"]
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters["join"] = _join
        for name, filter_ in self.filters.items():
            self.filters[name] = self.watched(filter_, _RULES.get(name))

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

    def watched(
        self, filter_: Callable[..., Any], rule: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        """Wrap a filter to check the time, and its arguments with `rule`, first."""
        num_own = int(hasattr(filter_, "jinja_pass_arg"))  # Jinja's own argument before the value

        @functools.wraps(filter_)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if rule is not None:
                rule(*args[num_own:], **kwargs)
            return filter_(*args, **kwargs)

        return checked

    def call_test(self, *args: Any, **kwargs: Any) -> bool:
        """Called for each item by `select` and similar filters."""
        self.tick()
        return bool(super().call_test(*args, **kwargs))

    @staticmethod
    def join_texts(*values: Any) -> str:
        """Concatenate values. Raises `SecurityError` if the result is too long."""
        _check_size(values)
        return "".join(map(str, values))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Called by Jinja to join the pieces of macros and of `{% set %}` blocks."""
        return Sandbox.join_texts(*pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: list[jinja2.nodes.For | jinja2.nodes.Macro] = []
        loops += tree.find_all(jinja2.nodes.For)
        loops += tree.find_all(jinja2.nodes.Macro)
        for loop in loops:
            call = _call_of("tick", [], loop.lineno)
            look = jinja2.nodes.ExprStmt(call, lineno=loop.lineno)
            loop.body.insert(0, look.set_environment(self))
        bounded: jinja2.nodes.Template = _BoundedConcatenation().visit(tree)
        bounded.set_environment(self)
        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"{operator} is not allowed in a chat template")
        if operator == "*" and abs(_size(left) * _size(right)) > _MAX_PRODUCT:
            raise SecurityError("a product is too large")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check(len(left) + len(right))
        elif (
            operator == "+"
            and isinstance(left, list | tuple | bytes)
            and (_size(left) + _size(right) > _MAX_PRODUCT)
        ):
            raise SecurityError("a list is too long")
        return super().call_binop(context, operator, left, right)

    def call(  # the parameter names are Jinja's; they cannot collide with keyword arguments
        __self,
        __context: Any,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        __self.tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes | int) and name in _METHODS:
            if name == "join":
                args = tuple(map(list, args))  # it may be an iterator
            _METHODS[name](owner, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form: str = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_form(form, "{", args, kwargs)
            return wrapped(*args, **kwargs)

        return functools.update_wrapper(checked, wrapped)


class _BoundedConcatenation(jinja2.visitor.NodeTransformer):
    """Replaces `a ~ b` by a call that checks the lengths first."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call_of("join_texts", node.nodes, node.lineno)


def _call_of(name: str, arguments: list[jinja2.nodes.Expr], lineno: int) -> jinja2.nodes.Call:
    function = jinja2.nodes.EnvironmentAttribute(name, lineno=lineno)
    return jinja2.nodes.Call(function, arguments, [], None, None, lineno=lineno)


def check_json(
    value: Any, indent: int | str | None, separators: Sequence[str] | None = None
) -> None:
    """Raises `SecurityError` if `value` as JSON with this `indent` per level is too long."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    between = sum(map(len, separators or ", "))
    _check_width(width)
    _check_width(between)
    _check_size(value, width, between)


def check_form(form: str) -> str:
    """Check a date format. Raises `SecurityError` if it is too long."""
    _check_width(len(form))
    return form


def _check(num_chars: float) -> None:
    if num_chars > MAX_NUM_CHARS:
        raise SecurityError(f"a text would be longer than {MAX_NUM_CHARS} characters")


def _check_width(width: int) -> None:
    if width > _MAX_WIDTH:
        raise SecurityError(f"a width is above {_MAX_WIDTH}")


def _check_size(value: Any, indent: int = 0, between: int = 2) -> int:
    """The approximate length of `value` as text.

    Raises `SecurityError` as soon as it is too long or has too many values.
    """
    num_chars, num_items, rest = 0, 0, [(value, 0)]
    while rest:
        item, depth = rest.pop()
        num_items += 1
        if num_items > _MAX_ITEMS:
            raise SecurityError(f"a value has more than {_MAX_ITEMS} items to write as text")
        if isinstance(item, str | bytes):
            num_chars += len(item)
        elif isinstance(item, Mapping | list | tuple):
            items = [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            rest += [(each, depth + 1) for each in items]
            num_chars += (between + indent * (depth + 1)) * len(items)
        elif isinstance(item, int):
            num_chars += 1 + item.bit_length() // 3
        _check(num_chars)
    return num_chars


def _check_form(form: str, mark: str, args: Any, kwargs: Any) -> None:
    if _WIDE[mark].search(form.replace(mark * 2, "")):
        raise SecurityError("a width in a format must be a number of at most four digits")
    _check(len(form) + form.count(mark) * (9999 + _check_size((args, kwargs))))


def _size(operand: Any) -> float:
    if isinstance(operand, Sequence):
        return len(operand)
    return operand if isinstance(operand, int | float) else 1


def _writable(value: Any) -> Any:
    """Called for every expression that is written as text."""
    if isinstance(value, Mapping | list | tuple):
        _check_size(value)
    return value


# Rules take the arguments of the filter or method, and raise `SecurityError`.


def _padded(text: Any, width: int = 80, fillchar: Any = None) -> None:
    _check_size(text)
    _check_width(width)


def _expanded(text: Any, tabsize: int = 8) -> None:
    _check_width(tabsize)
    _check(len(text) + tabsize * text.count("\t" if isinstance(text, str) else b"\t"))


def _replaced(text: Any, old: Any, new: Any, count: int | None = None) -> None:
    _check_size(text)
    if not isinstance(text, bytes):
        text, old, new = str(text), str(old), str(new)
    _check(len(text) + text.count(old) * len(new))


def _joined(between: Any, items: Sequence[Any]) -> None:
    _check(_check_size(items) + len(between) * len(items))


def _translated(text: Any, *_: Any) -> None:
    raise SecurityError("translate is not allowed in a chat template")


def _as_bytes(number: int, length: int = 1, *_: Any, **__: Any) -> None:
    _check_width(length)


def _indented(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
    _check_size(text)
    each = len(width) if isinstance(width, str) else width
    _check(len(str(text)) + each * (1 + len(str(text).splitlines())))


def _formatted(form: Any, *args: Any, **kwargs: Any) -> None:
    _check_form(str(form), "%", args, kwargs)


def _rounded(value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > _MAX_PRECISION:
        raise SecurityError(f"a precision is above {_MAX_PRECISION}")


def _filled(items: Any, number: int, fill_with: Any = None) -> None:
    _check_width(number)


def _summed(items: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise SecurityError("sum adds up numbers only")


def _written_out(value: Any, *_: Any, **__: Any) -> None:
    _check_size(value)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None
) -> str:
    items = list(value)
    if attribute is not None:
        items = list(map(jinja2.filters.make_attrgetter(environment, attribute), items))
    _joined(str(d), items)
    return str(d).join(map(str, items))


_METHODS: dict[str, Callable[..., None]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _expanded,
    "replace": _replaced,
    "join": _joined,
    "translate": _translated,
    "to_bytes": _as_bytes,
}
_WRITTEN_OUT = (
    "capitalize", "e", "escape", "forceescape", "lower", "string", "title", "trim", "truncate",
    "upper", "urlencode", "wordcount", "xmlattr",
)  # fmt: skip
_COMPARED = ("dictsort", "groupby", "max", "min", "sort", "unique")
_RULES: dict[str, Callable[..., None]] = {
    **dict.fromkeys((*_WRITTEN_OUT, *_COMPARED), _written_out),
    "center": _padded,
    "indent": _indented,
    "format": _formatted,
    "replace": _replaced,
    "round": _rounded,
    "batch": _filled,
    "slice": _filled,
    "sum": _summed,
}
