"""Running the choices of one request: token deltas in, pieces of text out, one end for each.

Each choice has a task that follows its deltas, so a choice that a stop string ends is closed at
once and a slow client delays nobody. What arrives while the client is busy is handed on together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from disagg.api.detokenizer import Detokenizer
from disagg.api.served_model import ServedModel
from disagg.errors import DeadlineExceeded, EngineFailed
from disagg.messages import FinishReason, GenerateRequest, TokenDelta, TokenLogprobs

Generate: TypeAlias = Callable[[GenerateRequest], AsyncIterator[TokenDelta]]


class ScoredToken(NamedTuple):
    """A token of an answer with its log-probabilities and the offset of its text."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class Piece:
    """What one choice gained."""

    index: int
    text: str = ""
    num_tokens: int = 0
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def extend(self, later: Piece) -> None:
        self.text += later.text
        self.num_tokens += later.num_tokens
        self.scored += later.scored
        self.finish_reason = later.finish_reason


@dataclass(frozen=True)
class Choice:
    """One answer to generate."""

    index: int
    request: GenerateRequest
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Job:
    """A checked request: `num_choices` consecutive choices for each prompt."""

    id: str
    created_unix_s: int
    model: ServedModel
    choices: tuple[Choice, ...]
    num_choices: int
    deadline_unix_s: float
    num_logprobs: int | None = None
    include_usage: bool = False
    echoes: tuple[str, ...] = ()  # the prompts' texts, when they are to be repeated

    @property
    def num_prompt_tokens(self) -> int:
        firsts = self.choices[:: self.num_choices]
        return sum(choice.request.num_prompt_tokens for choice in firsts)


class Answer:
    """The state of one choice while it runs."""

    def __init__(self, choice: Choice, model: ServedModel) -> None:
        self._choice = choice
        self._detokenizer = Detokenizer(
            model.tokenizer,
            stops=choice.stops,
            include_stop=choice.include_stop,
            skip_special_tokens=choice.skip_special_tokens,
            num_unchecked=choice.request.sampling.min_tokens,
        )
        self._num_deltas = 0
        self.num_cached_tokens = 0

    def advance(self, delta: TokenDelta) -> Piece:
        """The text `delta` adds. Raises the error that `delta` carries."""
        if delta.error is not None:
            raise delta.error.to_error()
        if self._num_deltas == 0:
            self.num_cached_tokens = delta.num_cached_tokens
        self._num_deltas += 1
        piece = Piece(self._choice.index)
        scores = delta.logprobs or ()
        num_shown = len(delta.token_ids) - self._ends_unseen(delta)
        for position, token_id in enumerate(delta.token_ids):
            if position < len(scores):
                offset = self._detokenizer.num_chars
                piece.scored.append(ScoredToken(token_id, scores[position], offset))
            piece.num_tokens += 1
            if position < num_shown:
                piece.text += self._detokenizer.push(token_id)
            if self._detokenizer.found is not None:
                break
        else:
            piece.finish_reason = delta.finish_reason
            if delta.finish_reason is not None:
                piece.text += self._detokenizer.finish()
        if self._detokenizer.found is not None:
            piece.finish_reason = "stop"
        return piece

    def _ends_unseen(self, delta: TokenDelta) -> bool:
        """Whether the last token only says that the answer is over."""
        return (
            delta.finish_reason == "stop"
            and not self._choice.include_stop
            and bool(delta.token_ids)
            and delta.token_ids[-1] in self._choice.request.sampling.stop_token_ids
        )


class Run:
    """One job under way. Iterate `batches`; afterwards the counts are final."""

    def __init__(
        self, job: Job, generate: Generate, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.job = job
        self.num_completion_tokens = 0
        self._generate = generate
        self._clock = clock
        self._answers = [Answer(choice, job.model) for choice in job.choices]
        self._inbox: list[Piece | Exception] = []
        self._arrived = asyncio.Event()

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed; further choices of a prompt do not count."""
        return sum(answer.num_cached_tokens for answer in self._answers[:: self.job.num_choices])

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        """Pieces as they come, at most one per choice at a time, each choice ending once.

        Closing the iterator cancels what still runs, and returns when that is done.

        Raises:
            DisaggError: the first failure of any choice; the others are cancelled.
        """
        tasks = [asyncio.create_task(self._follow(choice)) for choice in self.job.choices]
        num_open = len(tasks)
        try:
            while num_open:
                await self._arrived.wait()
                batch = self._take()
                num_open -= sum(piece.finish_reason is not None for piece in batch)
                self.num_completion_tokens += sum(piece.num_tokens for piece in batch)
                yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self) -> list[Piece]:
        """What arrived since the last call, at most one piece per choice.

        Raises the failure that arrived, once all text before it has been taken.
        """
        merged: dict[int, Piece] = {}
        arrived, self._inbox = self._inbox, []
        self._arrived.clear()
        for position, item in enumerate(arrived):
            if isinstance(item, Exception):
                if not merged:
                    raise item
                self._inbox = arrived[position:]
                self._arrived.set()
                break
            if item.index in merged:
                merged[item.index].extend(item)
            else:
                merged[item.index] = item
        return list(merged.values())

    def _put(self, item: Piece | Exception) -> None:
        self._inbox.append(item)
        self._arrived.set()

    async def _follow(self, choice: Choice) -> None:
        """Feed the inbox until this choice ended, one way or another."""
        remaining_s = self.job.deadline_unix_s - self._clock()
        try:
            async with asyncio.timeout(max(0.0, remaining_s)):
                await self._follow_deltas(choice)
        except TimeoutError:
            self._put(
                DeadlineExceeded("The request's time was over before its answer was complete.")
            )
        except Exception as error:  # whatever it is, the client must hear of an end
            self._put(error)

    async def _follow_deltas(self, choice: Choice) -> None:
        answer = self._answers[choice.index]
        deltas = self._generate(choice.request)
        try:
            async for delta in deltas:
                piece = answer.advance(delta)
                if piece.text or piece.scored or piece.num_tokens or piece.finish_reason:
                    self._put(piece)
                if piece.finish_reason is not None:
                    return
        finally:
            close = getattr(deltas, "aclose", None)
            if close is not None:
                await close()
        raise EngineFailed("The answer ended without saying why; try the request again.")
