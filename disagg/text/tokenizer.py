"""Converts text to token ids and back with a model's `tokenizer.json`. Runs no code of the model.

In a prompt that the client wrote itself (`/v1/completions`), special tokens are parsed. Text in
chat messages never becomes a control token, because the author of a message must not be able to end
it and start a message of another role. `shield` breaks such text before the template sees it, and
`encode_chat` removes the breaks while it encodes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from itertools import chain, groupby, pairwise

import tokenizers

from disagg.errors import ModelError

BREAK = "\ufdd0"  # a Unicode noncharacter, reserved for use inside a program

# By default the library caches the tokens of 10,000 words of up to 256 bytes, at up to 8 KB each. A
# tokenizer without words treats a whole prompt as one. A smaller cache is as fast.
NUM_WORDS_KEPT = 1000

# Size of the pieces in which a text is counted, and how many tokens the cuts between them may add.
PIECE_NUM_CHARS = 1 << 16
CUT_SHARE = 16
CUT_NUM_TOKENS = 64

SHIELDED_NUM_CHARS = 1 << 18  # longest text that is shielded without letting other threads run
FEW_IDS = 4096  # so few ids are decoded in less than a millisecond

REPLACEMENT = "\ufffd"  # stands for bytes that are not text

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class WholeTexts(dict[int, str]):
    """Token id -> its text, if that does not depend on the tokens around it; else "".

    It is filled as tokens are used. Only byte-level tokenizers have such tokens: their decoder only
    joins bytes, so a token of whole code points always has the same text.
    """

    def __init__(self, core: tokenizers.Tokenizer, added_ids: Collection[int]) -> None:
        super().__init__()
        self._core = core
        self._added_ids = added_ids
        self._joins_bytes = isinstance(core.decoder, tokenizers.decoders.ByteLevel)

    def __missing__(self, token_id: int) -> str:
        text = ""
        if self._joins_bytes and token_id not in self._added_ids:
            text = self._core.decode([token_id], skip_special_tokens=False)
        self[token_id] = text = "" if REPLACEMENT in text else text
        return text


class Tokenizer:
    """
    Attributes:
        whole_texts: shared by all streams of text.
    """

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        core.no_truncation()
        core.no_padding()
        if hasattr(core.model, "_resize_cache"):  # the library has no public method for this
            core.model._resize_cache(NUM_WORDS_KEPT)
        self.core = core
        vocab = core.get_vocab(with_added_tokens=True)
        added = core.get_added_tokens_decoder()
        self.num_ids = max(vocab.values(), default=-1) + 1
        self.longest_num_chars = max(map(len, vocab), default=1)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self.whole_texts = WholeTexts(core, self._added_ids)
        self._byte_level = "ByteLevel" in str(core.decoder)
        controls = [token.content for token in added.values() if token.special]
        self._control_start = re.compile(_starts_of(controls))
        self._longest_control = max(map(len, controls), default=1)
        self.control_ids_in = functools.lru_cache(maxsize=16)(self._control_ids_in)

    @classmethod
    def from_json(cls, text: str, model: str) -> Tokenizer:
        """Make a tokenizer from the text of a `tokenizer.json`.

        Args:
            text: content of the file.
            model: name of the model, for error messages.

        Raises:
            ModelError: the file is invalid.
        """
        try:
            tokenizer = cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises plain exceptions
            raise ModelError(f"The tokenizer.json of {model} is invalid: {error}.") from error
        if not tokenizer.num_ids:
            raise ModelError(f"The tokenizer.json of {model} has no tokens; download it again.")
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens written in it become special tokens."""
        # Only batch methods let other threads run meanwhile. The fast one leaves out the offsets of
        # tokens and takes a half to a quarter of the time.
        (encoded,) = self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def has_more_tokens(self, text: str, num_tokens: int) -> bool:
        """Whether `text` certainly has more than `num_tokens` tokens.

        It takes about as long as encoding that many tokens, however long `text` is: pieces of the
        text are encoded until they have more. A cut changes a few tokens next to it, so the pieces
        must have clearly more.
        """
        enough = num_tokens + num_tokens // CUT_SHARE + CUT_NUM_TOKENS
        counted = 0
        for start in range(0, len(text), PIECE_NUM_CHARS):
            piece = text[start : start + PIECE_NUM_CHARS]
            (encoded,) = self.core.encode_batch_fast([piece], add_special_tokens=False)
            counted += len(encoded)
            if counted > enough:
                return True
        return False

    def shield(self, text: str) -> str:
        """Break every control token in `text` after its first character.

        `encode_chat` removes all breaks, also those that were in the text before, and no control
        token can form across a break.
        """
        if len(text) <= SHIELDED_NUM_CHARS:
            return self._control_start.sub(rf"\g<0>{BREAK}", text)
        # Long texts are processed in parts, so that other threads run in between.
        size, more = SHIELDED_NUM_CHARS, self._longest_control - 1
        ends = [
            match.end()
            for start in range(0, len(text), size)
            for match in self._control_start.finditer(text, start, start + size + more)
            if match.start() < start + size
        ]
        return BREAK.join(text[start:end] for start, end in pairwise([0, *ends, len(text)]))

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered template. Its own control tokens become control tokens.

        Pieces between breaks are encoded separately, so no token spans a break.
        """
        pieces = [piece for piece in rendered.split(BREAK) if piece]
        encoded = self.core.encode_batch_fast(pieces, add_special_tokens=False)
        return list(chain.from_iterable(each.ids for each in encoded))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)
        if len(ids) <= FEW_IDS:
            return self.core.decode(ids, skip_special_tokens=skip_special_tokens)
        # Only batch methods let other threads run meanwhile.
        (text,) = self.core.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def _control_ids_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The control tokens that one of `texts` contains."""
        tokens = {number: self.core.id_to_token(number) or "" for number in self.special_ids}
        return frozenset(
            number
            for number, token in tokens.items()
            if token and any(token in text for text in texts)
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token. A code point may consist of several tokens."""
        piece = self.core.id_to_token(token_id)
        if piece is None or token_id in self._added_ids:
            return (piece or "").encode()
        if self._byte_level:
            if all(char in _BYTE_OF_CHAR for char in piece):
                return bytes(_BYTE_OF_CHAR[char] for char in piece)
            return piece.encode()
        byte = _BYTE_FALLBACK.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token. Bytes that are not text are written as `bytes:\\x..`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _starts_of(texts: Sequence[str]) -> str:
    """A pattern that matches the first character of each occurrence of any of `texts`.

    It begins with a character instead of a lookahead, so that `re` can skip to the next candidate,
    which is ten times as fast; no other thread runs while it searches.
    """
    by_first = groupby(sorted(text for text in texts if text), key=lambda text: text[0])
    return (
        "|".join(
            f"{re.escape(first)}(?={_any_of([text[1:] for text in group])})"
            for first, group in by_first
        )
        or "(?!)"
    )


def _any_of(texts: Sequence[str]) -> str:
    """A pattern that matches any of `texts`, or a prefix of one that is also in `texts`.

    Common prefixes are tried once, so a search takes time linear in its text, however many control
    tokens there are.
    """
    low, high = min(texts), max(texts)  # a prefix of these two is a prefix of all
    pairs = enumerate(zip(low, high, strict=False))
    prefix = low[: next((index for index, (a, b) in pairs if a != b), len(low))]
    rests = sorted({text[len(prefix) :] for text in texts})
    if not rests[0]:
        return re.escape(prefix)
    branches = (_any_of(list(group)) for _, group in groupby(rests, key=lambda rest: rest[0]))
    return f"{re.escape(prefix)}(?:{'|'.join(branches)})"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, which has one printable character per byte; byte-level BPE files use it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
