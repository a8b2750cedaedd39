"""The sandbox in which chat templates run: Jinja's own, with a time limit.

Jinja's sandbox forbids attributes and mutation. Templates come from model files, never from
requests, so a few checks are enough besides: the time in every iteration and at every call, and the
numbers with which a short expression makes a text of gigabytes at once.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from disagg.errors import InvalidRequest

MAX_NUM_CHARS = 32 << 20  # longest prompt
_MAX_PRODUCT = 1 << 20  # longest repeated text or list
_MAX_WIDTH = 1 << 16  # largest number given to a method or filter that makes texts or lists
_WIDE = re.compile(r"[%:.][^a-zA-Z%{}]*(\d{5}|\*)")  # such a number in a format
_WIDENING = ("batch", "center", "indent", "round", "slice", "tojson")


class TemplateTooSlow(InvalidRequest):
    """Rendering took longer than allowed."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment with limits.

    Args:
        timer: returns monotonic seconds.
        filters: filters besides Jinja's.
    """

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(
        self,
        timer: Callable[[], float],
        filters: Mapping[str, Callable[..., Any]],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._timer = timer
        self._limits = threading.local()
        del self.globals["lipsum"]
        for name, filter_ in {**self.filters, **filters}.items():
            self.filters[name] = self._watched(name, filter_)

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

    def _watched(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
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
