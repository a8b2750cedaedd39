"""The text of an answer that is still being generated, for readers that parse it as a whole.

Readers are generators: a reader stops at `yield` if it needs text that has not arrived, and
continues when there is more, or when the answer has ended. So a reader parses a format from left to
right as if the answer were complete, and the result does not depend on how the answer was cut into
deltas. The unread text is never more than a piece and the beginning of a mark, so the time is
linear in the length of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

import msgspec

Search: TypeAlias = Callable[[str], re.Match[str] | None]

_STRING_END = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_JSON = re.compile(r'["{}\[\]]')
_JSON_SCALAR_END = re.compile(r"[\s,;\]})<]")
_PYTHON = re.compile(r"""["'(){}\[\],]""")


class ValueEnd:
    """Finds the end of one value that arrives in pieces.

    It is after the last character of a JSON string, object or list, and otherwise before the
    character that ends the value: for a Python argument, a comma or a closing bracket.
    """

    def __init__(self, *, is_json: bool) -> None:
        self._marks = None if is_json else _PYTHON  # None: its first character decides
        self._ends_itself = False
        self._depth = 0
        self._quote = ""  # of the string that the text is inside
        self._is_escaped = False

    def find(self, text: str, start: int) -> int | None:
        """The end of the value in `text`, which continues it at `start`; None if it goes on."""
        if self._marks is None:
            self._ends_itself = text[start] in '"{['
            self._marks = _JSON if self._ends_itself else _JSON_SCALAR_END
        at = start
        while True:
            if self._quote:
                at = self._after_string(text, at)
                if self._quote:
                    return None
                if self._ends_itself and not self._depth:
                    return at
            found = self._marks.search(text, at)
            if found is None:
                return None
            at, char = found.end(), found.group()
            if char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif not self._depth:
                return found.start()
            elif char != ",":
                self._depth -= 1
                if self._ends_itself and not self._depth:
                    return at

    def _after_string(self, text: str, at: int) -> int:
        """The index after the string that `at` is in, or the end of `text`."""
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

    def next_mark(self) -> Search | None:
        """A search for characters that matter to the next `find`; None if it needs all text."""
        if self._quote:
            return None if self._is_escaped else _STRING_END[self._quote].search
        return None if self._marks is None else self._marks.search


Result = TypeVar("Result")
Reading: TypeAlias = Generator[None, None, Result]
Take: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"\s*")


def ignore(text: str) -> None:
    """Discard text."""


class Marks:
    """Texts to search for. None may be inside another one, except at its end."""

    def __init__(self, *marks: str) -> None:
        ordered = sorted(marks, key=len, reverse=True)
        firsts = "".join({mark[0] for mark in marks})
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self.first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")
        self._starts = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        self._longest = max(map(len, marks), default=0)

    def begins_at(self, text: str, start: int) -> int:
        """The index at which a mark may begin that the end of `text` cuts off.

        `text` has no complete mark from `start` on. Returns the length of `text` if there is none.
        """
        at = max(start, len(text) - max(0, self._longest - 1))
        while found := self.first.search(text, at):
            if text[found.start() :] in self._starts:
                return found.start()
            at = found.start() + 1
        return len(text)


class Incoming:
    """The part of an answer that has arrived and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_over = False
        self._record: list[str] | None = None
        self._take: Take = ignore  # gets the text that passes
        self._search: Search | None = None  # finds the first character of a mark; None: use `push`

    def passes(self, text: str) -> bool:
        """Pass `text` on at once if it cannot be part of a mark that the reader waits for.

        Returns whether it did. The result is that of `push` and a step of the reader, at half the
        cost. Most tokens pass.
        """
        search = self._search
        if search is None or search(text):
            return False
        if self._record is not None:
            self._record.append(text)
        self._take(text)
        return True

    def push(self, text: str, *, is_end: bool) -> None:
        """Add more of the answer. `is_end` tells that nothing follows."""
        self._text = text if self._at == len(self._text) else self._text[self._at :] + text
        self._at = 0
        self._is_over = is_end

    def record(self, before: str = "") -> None:
        """Start to record the text that is read, after `before`."""
        self._record = [before]

    def take_record(self) -> str:
        """The text that was read since `record`."""
        read = "".join(self._record or ())
        self._record = None
        return read

    def give_back(self, text: str) -> None:
        """Make `text` unread again."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def more(self) -> Reading[bool]:
        """Wait for unread text. Returns False if the answer is over."""
        while self._at == len(self._text):
            if self._is_over:
                return False
            yield
        return True

    def next(self) -> Reading[str]:
        """The next character, which stays unread; "" at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def spaces(self) -> Reading[str]:
        """Read white space; returns the character after it, like `next`."""
        while (yield from self.more()):
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._read(found.end())
            if self._at < len(self._text):
                return self._text[self._at]
        return ""

    def skip(self, mark: str) -> Reading[bool]:
        """Read `mark` if it comes next; returns whether it did."""
        while True:
            unread = len(self._text) - self._at
            if unread >= len(mark):
                is_next = self._text.startswith(mark, self._at)
                break
            if self._is_over or not mark.startswith(self._text[self._at :]):
                return False
            yield
        if is_next:
            self._read(self._at + len(mark))
        return is_next

    def skip_spaced(self, mark: str) -> Reading[bool]:
        """Read white space, and then `mark` if it comes next; returns whether it did."""
        yield from self.spaces()
        return (yield from self.skip(mark))

    def skip_one(self, marks: Iterable[str]) -> Reading[str]:
        """Read the first of `marks` that comes next; returns it, "" if none does."""
        for mark in marks:
            if (yield from self.skip(mark)):
                return mark
        return ""

    def until(self, marks: Marks, take: Take) -> Reading[str]:
        """Pass text to `take` up to the first of `marks`, and read the mark.

        Returns the mark; "" if the answer ended before one came.
        """
        while True:
            text, found = self._text, None
            end = len(text)
            if begins := marks.first.search(text, self._at):
                if found := marks.pattern.search(text, begins.start()):
                    end = found.start()
                elif not self._is_over:
                    end = marks.begins_at(text, begins.start())
            if end > self._at:
                take(self._read(end))
            if found:
                self._read(found.end())
                return found.group()
            if self._is_over:
                return ""
            if self._at == len(text):
                self._take, self._search = take, marks.first.search
            yield
            self._search = None

    def collect(self, marks: Marks) -> Reading[tuple[str, str]]:
        """Like `until`, but returns the text before the mark, and the mark."""
        pieces: list[str] = []
        mark = yield from self.until(marks, pieces.append)
        return "".join(pieces), mark

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read characters as long as they match `pattern`, a pattern for one character."""
        pieces: list[str] = []
        while (yield from self.more()):
            end = self._at
            while end < len(self._text) and pattern.match(self._text, end):
                end += 1
            pieces.append(self._read(end))
            if end < len(self._text):
                break
        return "".join(pieces)

    def json_string(self) -> Reading[str | None]:
        """Read a JSON string; None if the next character is not a quote or it does not end."""
        if (yield from self.next()) != '"':
            return None
        pieces: list[str] = []
        is_whole = yield from self.json_value(pieces.append)
        return _decode("".join(pieces)) if is_whole else None

    def json_value(self, take: Take) -> Reading[bool]:
        """Pass one JSON value to `take` while it arrives; returns whether it ended.

        Only brackets and strings are checked; whoever parses the value sees other errors.
        """
        return (yield from self.value(take, is_json=True))

    def value(self, take: Take, *, is_json: bool) -> Reading[bool]:
        """Like `json_value`, also for an argument in Python."""
        value_end = ValueEnd(is_json=is_json)
        while (yield from self.more()):
            self._search = None
            end = value_end.find(self._text, self._at)
            stop = len(self._text) if end is None else end
            if stop > self._at:
                take(self._read(stop))
            if end is not None:
                return True
            self._take, self._search = take, value_end.next_mark()
        self._search = None
        return False

    def _read(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        return text


def _decode(literal: str) -> str | None:
    try:
        return msgspec.json.decode(literal, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None
