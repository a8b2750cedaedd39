"""Streaming detokenizer: converts token ids to text, up to a stop string.

It works token by token, so the result does not depend on how the ids were split into deltas. It
holds back incomplete code points, and text that may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers.decoders import DecodeStream

from disagg.text.tokenizer import Tokenizer

# A code point has at most four bytes, so ids that wait for longer are bytes that are not text. The
# limit keeps the time per token constant for such output.
_MAX_NUM_PENDING = 256


class TextStream:
    """Converts a growing list of token ids to text.

    Args:
        kept: control tokens that are kept as text although others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: Collection[int] = ()
        if skip_special_tokens and kept:
            skip_special_tokens = False
            self._skipped = tokenizer.special_ids.difference(kept)
        self._skip = skip_special_tokens
        self._whole_texts = tokenizer.whole_texts
        # The library's stream; None: it has not seen `_settled`, which needed no stream.
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._settled: list[int] = []  # ids of the last text, the context of pending ids
        self._pending: list[int] = []  # ids whose text was not returned yet

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a code point is incomplete."""
        if not self._pending and (whole := self._whole_texts[token_id]):
            self._settled, self._stream = [token_id], None
            return whole
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        if self._stream is None:
            self._stream = DecodeStream(self._settled, self._skip)
        try:
            text = self._stream.step(self._tokenizer.core, token_id)
        except Exception:  # the library raises it if a token changes text that was returned
            return self.flush()
        if text:
            self._settled, self._pending = self._pending, []
            return str(text)
        return self.flush() if len(self._pending) >= _MAX_NUM_PENDING else ""

    def flush(self) -> str:
        """The text of all pending ids, including incomplete code points."""
        if not self._pending:
            return ""
        before = self._decode(self._settled)
        text = self._decode(self._settled + self._pending)[len(before) :]
        self._settled, self._pending = self._pending, []
        self._stream = DecodeStream(self._settled, self._skip)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class Detokenizer:
    """The text of one answer, up to a stop string.

    If several stop strings end at the same character, the longest one counts.

    Args:
        kept: control tokens that are kept as text although others are skipped.
        num_unchecked: number of first tokens whose text cannot stop the answer (`min_tokens`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        kept: Collection[int] = (),
        num_unchecked: int = 0,
    ) -> None:
        self._text = TextStream(tokenizer, skip_special_tokens=skip_special_tokens, kept=kept)
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._include_stop = include_stop
        self._num_unchecked = num_unchecked
        self._held = ""  # text that may be the beginning of a stop string
        self.num_tokens = 0
        self.num_chars = 0  # length of the text so far, including text that is held back
        self.found: str | None = None  # the stop string that ended the text

    def push(self, token_id: int) -> str:
        """The text that can be shown after one more token."""
        return self.until_stop(self.decode(token_id))

    def finish(self) -> str:
        """The rest of the text at the end of the answer. It may still find a stop string."""
        return self.until_stop(self.decode(None)) + self.held()

    def decode(self, token_id: int | None) -> str:
        """The text that one more token adds, or the end of the answer, also if it has a stop
        string."""
        self.num_tokens += token_id is not None
        text = self._text.flush() if token_id is None else self._text.push(token_id)
        self.num_chars += len(text)
        return text

    def until_stop(self, text: str) -> str:
        """The part of the next text that can be shown. After a match, `found` is set and no text
        follows."""
        if not self._stops or self.num_tokens <= self._num_unchecked:
            return text
        return self._cut(self._held + text)

    def _cut(self, text: str) -> str:
        """The part of `text` that can be shown. Keeps the rest if a stop string may begin there."""
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            end, start, self.found = min(matches)
            self._held = ""
            return text[: end if self._include_stop else start]
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        return text[:num_shown]

    def held(self) -> str:
        """The text that was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
