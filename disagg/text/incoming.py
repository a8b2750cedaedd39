"""The text of an answer that is still being generated, read as if all of it were there.

Readers are generators: a reader stops at `yield` if it needs text that has not arrived, and
continues when there is more, or when the answer has ended. So a format is parsed from left to
right as if the answer were complete, and the result cannot depend on how the answer was cut into
deltas. The unread text is never more than a piece and the beginning of a mark, so the time is
linear in the length of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

import msgspec

from disagg.text.value_end import JsonEnd, Search, ValueEnd

Result = TypeVar("Result")
Reading: TypeAlias = Generator[None, None, Result]
Take: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"\s*")


def ignore(text: str) -> None:
    """Takes what nobody wants."""


class Marks:
    """Texts that are looked for. None may stand inside another one, except at its end."""

    def __init__(self, *marks: str) -> None:
        ordered = sorted(marks, key=len, reverse=True)
        firsts = "".join({mark[0] for mark in marks})
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self.first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")
        self._starts = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        self._longest = max(map(len, marks), default=0)

    def begins_at(self, text: str, start: int) -> int:
        """Where the end of `text`, which has no mark from `start` on, may begin one."""
        place = max(start, len(text) - max(0, self._longest - 1))
        while found := self.first.search(text, place):
            if text[found.start() :] in self._starts:
                return found.start()
            place = found.start() + 1
        return len(text)


class Incoming:
    """What has come of an answer and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_over = False
        self._record: list[str] | None = None
        self._take: Take = ignore  # gets what passes
        self._search: Search | None = None  # finds the first character of a mark; None: use `push`

    def passes(self, text: str) -> bool:
        """Hands `text` on at once if nothing in it can be a mark that the reader waits for; returns
        whether it did.

        The result is that of `push` and a step of the reader, at half the cost. Most tokens pass.
        """
        search = self._search
        if search is None or search(text):
            return False
        if self._record is not None:
            self._record.append(text)
        self._take(text)
        return True

    def push(self, text: str, *, is_end: bool) -> None:
        """More of the answer; `is_end`: nothing follows."""
        self._text = text if self._at == len(self._text) else self._text[self._at :] + text
        self._at = 0
        self._is_over = is_end

    def record(self) -> None:
        """From here on, remember what is read."""
        self._record = []

    def recorded(self) -> str:
        """What was read since `record`."""
        read = "".join(self._record or ())
        self._record = None
        return read

    def give_back(self, text: str) -> None:
        """`text` was read too early: it is unread again."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def more(self) -> Reading[bool]:
        """Whether there is unread text. Waits for it; False: the answer is over."""
        while self._at == len(self._text):
            if self._is_over:
                return False
            yield
        return True

    def next(self) -> Reading[str]:
        """The next character, which stays unread; "" at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def spaces(self) -> Reading[str]:
        """Reads white space; returns the character behind it, as `next` does."""
        while (yield from self.more()):
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._read(found.end())
            if self._at < len(self._text):
                return self._text[self._at]
        return ""

    def skip(self, mark: str) -> Reading[bool]:
        """Reads `mark` if it comes next; returns whether it did."""
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

    def until(self, marks: Marks, take: Take) -> Reading[str]:
        """Hands on what comes before the first of `marks`, and reads that.

        Returns the mark; "": the answer was over before one came.
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
        """As `until`: what came before the mark, and the mark."""
        pieces: list[str] = []
        mark = yield from self.until(marks, pieces.append)
        return "".join(pieces), mark

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads as many characters as match `pattern`, which is of one character."""
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
        """Reads a JSON string, at its first quote; None: it is none, or does not end."""
        if (yield from self.next()) != '"':
            return None
        pieces: list[str] = []
        is_whole = yield from self.json_value(pieces.append)
        return _decoded("".join(pieces)) if is_whole else None

    def json_value(self, take: Take) -> Reading[bool]:
        """Hands on one JSON value as it comes, from its first character; returns whether it ended.

        Looks at brackets and strings only: what else is wrong with it, its reader will see.
        """
        return (yield from self.value(JsonEnd(), take))

    def value(self, value_end: ValueEnd, take: Take) -> Reading[bool]:
        """As `json_value`, for what `value_end` finds the end of."""
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


def _decoded(literal: str) -> str | None:
    try:
        return msgspec.json.decode(literal, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None
