"""What a load test asks: sessions of random words, of a dataset, or of a trace."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from disagg.errors import RequestError
from disagg.tools.prompt_lines import PromptLine, prompt_lines
from disagg.tools.server import Server, Usage
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest

# Most vocabularies have each of these as one token.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye job word business issue side kind head house service friend father power hour game line"
    " end member law car city community name president team minute idea kid body information back"
    " parent face others level office door health person art war history party result change"
    " morning reason research girl guy moment air teacher force education"
)
WORDS = _TEXT.split()
_FEW_WORDS, _MANY_WORDS = 16, 272  # of the two prompts whose tokens the server counts


class Turn(NamedTuple):
    """One request of a session, `think_s` after the answer before it.

    messages: what it adds to the conversation.
    num_output_tokens: None leaves it to the server.
    """

    messages: tuple[dict[str, Any], ...]
    num_output_tokens: int | None = None
    think_s: float = 0.0


Session = Sequence[Turn]  # a request that belongs to none is a session of one turn


class WordCount(NamedTuple):
    """How many tokens a server counts in a prompt of random words: so many per word, and `more`."""

    per_word: float = 1.0
    more: float = 0.0

    def text(self, num_tokens: float, rng: random.Random) -> str:
        return " ".join(rng.choices(WORDS, k=max(1, round(num_tokens / self.per_word))))


def body_of(
    messages: Sequence[dict[str, Any]], num_output_tokens: int | None, fields: dict[str, Any]
) -> bytes:
    """The JSON of a request; of `/v1/completions` if `fields` have a `prompt` to fill in."""
    body = dict(fields)
    if "prompt" in body:
        body["prompt"] = "\n".join(each["content"] for each in messages)
    else:
        body["messages"] = messages
    if num_output_tokens is not None:
        body["max_tokens"] = num_output_tokens
    return msgspec.json.encode(body)


class _Counted(msgspec.Struct):
    usage: Usage


def count_words(server: Server, path: str, fields: dict[str, Any], seed: int) -> WordCount:
    """Ask a server how many tokens random words are, in two requests.

    Raises:
        DisaggError: it cannot be reached, or refuses them.
    """
    rng = random.Random(seed)
    counted = []
    for num_words in (_FEW_WORDS, _MANY_WORDS):
        message = {"role": "user", "content": WordCount().text(num_words, rng)}
        body = msgspec.json.decode(body_of([message], 1, fields)) | {"stream": False}
        del body["stream_options"]
        try:
            usage = msgspec.json.decode(server.ask(path, body), type=_Counted).usage
        except msgspec.MsgspecError as error:
            raise RequestError(
                f"{server.url} does not say how many tokens a prompt has (no usage: {error}), so"
                " prompts of a given length cannot be made; give --dataset."
            ) from error
        counted.append(usage.prompt_tokens)
    few, many = counted
    per_word = max((many - few) / (_MANY_WORDS - _FEW_WORDS), 0.1)
    return WordCount(per_word, few - _FEW_WORDS * per_word)


class RandomPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of random words. Names follow `vllm bench serve`."""

    input_len: int = 1024
    """tokens of a prompt of random words"""
    prefix_len: int = 0
    """of these, tokens at the beginning that prompts share"""
    num_prefixes: int = 1
    """number of different shared prefixes"""
    output_len: int = 128
    """tokens of an answer"""
    range_ratio: float = 0.0
    """lengths are uniform between 1 minus this share and 1 plus it of what is asked for"""
    turns: int = 1
    """requests of a session, each with --input-len tokens more"""
    think_s: float = 0.0
    """mean pause between turns in seconds, exponentially distributed"""

    def sessions(self, num: int, words: WordCount, seed: int) -> Iterator[Session]:
        """`num` requests as sessions; the last one may be cut short."""
        rng = random.Random(seed)
        prefixes = [words.text(self.prefix_len, rng) for _ in range(self.num_prefixes)]
        for first in range(0, num, self.turns):
            beginning = f"{rng.choice(prefixes)} " if self.prefix_len else ""
            session = []
            for number in range(min(self.turns, num - first)):
                length = self._drawn(self.input_len, rng) - words.more
                length -= self.prefix_len if beginning else 0
                text = beginning + words.text(length, rng)
                think_s = rng.expovariate(1 / self.think_s) if number and self.think_s else 0.0
                message = {"role": "user", "content": text}
                session.append(Turn((message,), self._drawn(self.output_len, rng), think_s))
                beginning = ""
            yield session

    def _drawn(self, length: int, rng: random.Random) -> int:
        share = rng.uniform(1 - self.range_ratio, 1 + self.range_ratio) if self.range_ratio else 1
        return max(1, round(length * share))


class _DatasetLine(PromptLine, kw_only=True):
    output_tokens: int | None = None


def read_dataset(path: Path, num: int, output_len: int | None) -> list[Session]:
    """The first `num` lines of a JSONL file, from its beginning again if it is shorter.

    Raises:
        RequestError: it cannot be read, is empty, or has an invalid line.
    """
    sessions = [
        [Turn(line.conversation, line.output_tokens or output_len)]
        for line in islice(prompt_lines(path, _DatasetLine, "dataset"), num)
    ]
    return [sessions[i % len(sessions)] for i in range(num)]


def trace_sessions(
    requests: Sequence[TraceRequest], words: WordCount, seed: int
) -> Iterator[Session]:
    """Prompts as long as those of a trace, which share what its prompts share."""

    @functools.lru_cache(maxsize=4096)
    def block(name: int) -> str:
        return words.text(TRACE_BLOCK_TOKENS, random.Random(f"{seed} {name}"))

    rng = random.Random(seed)
    for request in requests:
        num_left = request.num_prompt_tokens - words.more
        pieces = []
        for name in request.block_names[: int(num_left // TRACE_BLOCK_TOKENS)]:
            pieces.append(block(name))
            num_left -= TRACE_BLOCK_TOKENS
        if num_left > 0:
            pieces.append(words.text(num_left, rng))
        yield [Turn(({"role": "user", "content": " ".join(pieces)},), request.num_output_tokens)]
