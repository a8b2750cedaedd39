"""Finds the end of a JSON value that arrives in pieces, by its brackets and strings only."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, TypeAlias

Search: TypeAlias = Callable[[str], re.Match[str] | None]

_STRING_END = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_JSON = re.compile(r'["{}\[\]]')
_JSON_SCALAR_END = re.compile(r"[\s,;\]})<]")
_PYTHON = re.compile(r"""["'(){}\[\],]""")


class ValueEnd(Protocol):
    """Finds the end of one value that arrives in pieces."""

    def find(self, text: str, start: int) -> int | None:
        """The end of the value in `text`, which continues it at `start`; None if it goes on."""

    def next_mark(self) -> Search | None:
        """A search for characters that matter to the next `find`; None if `find` needs all text."""


class _Strings:
    """Tracks whether the text is inside a string, and skips strings."""

    def __init__(self) -> None:
        self._quote = ""
        self._is_escaped = False

    def skip(self, text: str, at: int) -> int:
        """The place after the string that `at` is in, or `at` if it is in none."""
        while self._quote and at < len(text):
            if self._is_escaped:
                at, self._is_escaped = at + 1, False
                continue
            found = _STRING_END[self._quote].search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            if text[at - 1] == "\\":
                self._is_escaped = True
            else:
                self._quote = ""
        return at

    def begin(self, quote: str) -> None:
        self._quote = quote

    @property
    def is_inside(self) -> bool:
        return bool(self._quote)

    def next_mark(self, outside: Search) -> Search | None:
        """See `ValueEnd`. `outside` finds the characters that matter outside of strings."""
        if not self._quote:
            return outside
        return None if self._is_escaped else _STRING_END[self._quote].search


class JsonEnd:
    """Finds the end of a JSON value."""

    def __init__(self) -> None:
        self._strings = _Strings()
        self._depth = 0
        self._is_scalar: bool | None = None

    def find(self, text: str, start: int) -> int | None:
        if self._is_scalar is None:
            self._is_scalar = text[start] not in '"{['
        if self._is_scalar:
            ends = _JSON_SCALAR_END.search(text, start)
            return ends.start() if ends else None
        at = self._strings.skip(text, start)
        if at > start and not self._depth and not self._strings.is_inside:
            return at
        while found := _JSON.search(text, at):
            at, char = found.end(), found.group()
            if char == '"':
                self._strings.begin(char)
                at = self._strings.skip(text, at)
            else:
                self._depth += 1 if char in "{[" else -1
            if not self._depth and not self._strings.is_inside:
                return at
            if self._strings.is_inside:
                return None
        return None

    def next_mark(self) -> Search | None:
        return None if self._is_scalar else self._strings.next_mark(_JSON.search)


class PythonEnd:
    """Finds the end of a Python literal that is an argument: a comma or closing bracket follows."""

    def __init__(self) -> None:
        self._strings = _Strings()
        self._depth = 0

    def find(self, text: str, start: int) -> int | None:
        at = self._strings.skip(text, start)
        while not self._strings.is_inside and (found := _PYTHON.search(text, at)):
            at, char = found.end(), found.group()
            if char in "\"'":
                self._strings.begin(char)
                at = self._strings.skip(text, at)
            elif char in "([{":
                self._depth += 1
            elif self._depth == 0:
                return found.start()
            elif char != ",":
                self._depth -= 1
        return None

    def next_mark(self) -> Search | None:
        return self._strings.next_mark(_PYTHON.search)
