"""Text to token ids and back, over a model's `tokenizer.json`. No code from a model directory runs.

In a prompt that the client wrote itself (`/v1/completions`), special tokens are parsed. Text inside
chat messages never becomes a control token, because the writer of a message must not be able to end
it and start one of another role. `shield` breaks such text before the template sees it, and
`encode_chat` removes the breaks while it encodes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import chain, groupby, pairwise

import tokenizers

from disagg.errors import ModelError

BREAK = "\ufdd0"  # a Unicode noncharacter, reserved for use inside a program

# The library keeps how it cut words of up to 256 bytes, 10,000 of them, at up to 8 KB each; where a
# tokenizer knows no words, a whole prompt is one. Measured: as fast with none kept (decision 38).
NUM_WORDS_KEPT = 1000

# Of a text that is counted in pieces, and what the cuts between them are taken to add at most.
PIECE_NUM_CHARS = 1 << 16
CUT_SHARE = 16
CUT_NUM_TOKENS = 64

SHIELDED_NUM_CHARS = 1 << 18  # at a time
FEW_IDS = 4096  # are decoded in less than a millisecond

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    def __init__(self, core: tokenizers.Tokenizer) -> None:
        core.no_truncation()
        core.no_padding()
        if hasattr(core.model, "_resize_cache"):  # there is no other way, short of the model's file
            core.model._resize_cache(NUM_WORDS_KEPT)
        self.core = core
        vocab = core.get_vocab(with_added_tokens=True)
        added = core.get_added_tokens_decoder()
        self.num_ids = max(vocab.values(), default=-1) + 1
        self.longest_num_chars = max(map(len, vocab), default=1)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._byte_level = "ByteLevel" in str(core.decoder)
        controls = [token.content for token in added.values() if token.special]
        self._control_start = re.compile(_starts_of(controls))
        self._longest_control = max(map(len, controls), default=1)
        self.control_ids_in = functools.lru_cache(maxsize=16)(self._control_ids_in)

    @classmethod
    def from_json(cls, text: str, model: str) -> Tokenizer:
        """
        Args:
            text: what `tokenizer.json` holds.
            model: whose, for the message.

        Raises:
            ModelError: it is broken.
        """
        try:
            tokenizer = cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(
                f"The tokenizer.json of {model} cannot be read as a tokenizer: {error}."
            ) from error
        if not tokenizer.num_ids:
            raise ModelError(f"The tokenizer.json of {model} has no tokens; download it again.")
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in it are taken as such."""
        # As a batch of one: only then does the library let other threads run meanwhile. The fast
        # kind leaves out each token's place in the text: a half to a quarter of the time.
        (encoded,) = self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def has_more_tokens(self, text: str, num_tokens: int) -> bool:
        """Whether `text` certainly has more than `num_tokens` tokens.

        Costs about what it takes to encode so many, however long `text` is: pieces of it are
        encoded until they have more. A cut changes a few tokens beside it, so pieces must have
        clearly more.
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
        """`text` with every control token in it broken after its first character.

        A break that was there before vanishes like ours, and nothing forms across it.
        """
        if len(text) <= SHIELDED_NUM_CHARS:
            return self._control_start.sub(rf"\g<0>{BREAK}", text)
        # In parts, between which other threads run: a text may be millions of control tokens.
        size, more = SHIELDED_NUM_CHARS, self._longest_control - 1
        places = [
            match.end()
            for start in range(0, len(text), size)
            for match in self._control_start.finditer(text, start, start + size + more)
            if match.start() < start + size
        ]
        return BREAK.join(text[start:end] for start, end in pairwise([0, *places, len(text)]))

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered template, whose own control tokens count as such.

        Pieces between breaks are encoded one by one, so no token spans a break.
        """
        pieces = [piece for piece in rendered.split(BREAK) if piece]
        encoded = self.core.encode_batch_fast(pieces, add_special_tokens=False)
        return list(chain.from_iterable(each.ids for each in encoded))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)
        if len(ids) <= FEW_IDS:
            return self.core.decode(ids, skip_special_tokens=skip_special_tokens)
        # As a batch of one: other threads run meanwhile.
        (text,) = self.core.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def _control_ids_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The control tokens that stand in one of `texts`."""
        tokens = {number: self.core.id_to_token(number) or "" for number in self.special_ids}
        return frozenset(
            number
            for number, token in tokens.items()
            if token and any(token in text for text in texts)
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; a code point may be spread over several tokens."""
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
        """One token for reading; bytes that are no text are written as `bytes:\\x..`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _starts_of(texts: Sequence[str]) -> str:
    """A pattern of the first character of any of `texts`, where the whole of one stands.

    It begins with a character, not with a lookahead, so that `re` skips to the next one that can
    be right: ten times as fast, and no other thread runs while it searches.
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
    """A pattern that matches where any of `texts` begins, perhaps the shortest only.

    Beginnings that texts share are tried once, so a search takes time linear in its text however
    many control tokens there are.
    """
    low, high = min(texts), max(texts)  # what these two share, all share
    pairs = enumerate(zip(low, high, strict=False))
    prefix = low[: next((index for index, (a, b) in pairs if a != b), len(low))]
    rests = sorted({text[len(prefix) :] for text in texts})
    if not rests[0]:
        return re.escape(prefix)
    branches = (_any_of(list(group)) for _, group in groupby(rests, key=lambda rest: rest[0]))
    return f"{re.escape(prefix)}(?:{'|'.join(branches)})"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet of one printable character per byte, as byte-level BPE files use it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
