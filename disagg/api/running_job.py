"""Runs the choices of one request: turns token deltas into pieces of text, up to exactly one end.

A delta becomes a piece where it arrives. A client that reads fast enough gets it written there, too
(`RunningJob.write_now`). Otherwise pieces are merged until the request's own task has time for
them, so a slow client costs less per token instead of more, and delays no other request.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from disagg.api.request_spec import RequestSpec
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError, EngineFailed
from disagg.messages import (
    AnswerEnded,
    FinishReason,
    GenerateRequest,
    PutDelta,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from disagg.router.cascade import CascadeDecision
from disagg.text.answer_delta import AnswerDelta, CallDelta
from disagg.text.answer_reader import AnswerReader, prompt_tail
from disagg.text.detokenizer import Detokenizer

# Passes the answer to a function, up to its end; raises `DisaggError`.
Generate: TypeAlias = Callable[[GenerateRequest, PutDelta], Awaitable[None]]
# Request id -> which tier answers and why; None if the request did not name "auto".
Explain: TypeAlias = Callable[[str], CascadeDecision | None]


class ScoredToken(NamedTuple):
    """A token of an answer with its log-probabilities and the offset of its text."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class ChoiceDelta(msgspec.Struct):
    """New tokens of one choice, parsed into reasoning, text and calls, in this order.

    It is a struct because one is made for each token; a dataclass would take several times as long.
    """

    index: int
    reasoning: str = ""
    text: str = ""
    num_tokens: int = 0
    num_reasoning_tokens: int = 0  # part of `num_tokens`
    scored: list[ScoredToken] = []
    finish_reason: FinishReason | Literal["tool_calls"] | None = None
    calls: list[CallDelta] = []
    stop_string: str | None = None  # the stop string that ended the choice
    token_ids: list[int] = []  # only if the request asks for them
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # in the first delta, if requested
    pooled: bytes | None = None  # see `TokenDelta`

    def extend(self, later: ChoiceDelta) -> None:
        self.reasoning += later.reasoning
        self.text += later.text
        self.calls += later.calls
        self.num_tokens += later.num_tokens
        self.num_reasoning_tokens += later.num_reasoning_tokens
        self.scored += later.scored
        self.token_ids += later.token_ids
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.pooled = later.pooled or self.pooled
        self.finish_reason, self.stop_string = later.finish_reason, later.stop_string


def num_prompt_scores(sampling: SamplingParams, num_prompt_tokens: int) -> int:
    """The number of log-probabilities that are requested for one prompt."""
    if sampling.prompt_logprobs is None:
        return 0
    return num_prompt_tokens * (1 + sampling.prompt_logprobs)


class Answer:
    """The state of one choice while it runs."""

    def __init__(
        self, index: int, request: GenerateRequest, spec: RequestSpec, explain: Explain
    ) -> None:
        self.index = index
        self.request = request
        self._spec = spec
        self._explain = explain
        tokenizer, syntax = spec.model.tokenizer, spec.syntax
        self._detokenizer = Detokenizer(
            tokenizer,
            stops=spec.stops,
            include_stop=spec.include_stop,
            skip_special_tokens=spec.skip_special_tokens,
            kept=tokenizer.control_ids_in(syntax.marks) if syntax else (),
            num_unchecked=request.sampling.min_tokens,
        )
        self._reader = None
        self._marks = syntax.marks if syntax is not None else ()
        if syntax is not None:
            tail = prompt_tail(tokenizer, request.token_ids)
            self._reader = AnswerReader(syntax, request.request_id, tail)
        self._has_begun = False
        self._has_called = False
        # Whether a token is shown as its text and nothing else, unless it is the first or the last.
        parses = syntax is not None or bool(spec.stops)
        self._is_plain = not (parses or spec.only_prompt or spec.return_token_ids)
        self.num_cached_tokens = 0
        self.num_prompt_tokens = request.num_prompt_tokens  # those of images when it has begun
        self.decision: CascadeDecision | None = None
        self._last: ChoiceDelta | None = None

    @property
    def finish_reason(self) -> str | None:
        return None if self._last is None else self._last.finish_reason

    def advance(self, delta: TokenDelta) -> ChoiceDelta:
        """The piece that `delta` adds."""
        if not self._has_begun:
            self._has_begun = True
            self.num_cached_tokens = delta.num_cached_tokens
            self.num_prompt_tokens += delta.num_image_tokens
            self.decision = self._explain(self.request.request_id)
        elif (
            self._is_plain
            and len(delta.token_ids) == 1
            and delta.logprobs is None
            and delta.finish_reason is None
        ):
            return ChoiceDelta(self.index, "", self._detokenizer.push(delta.token_ids[0]), 1)
        piece = ChoiceDelta(self.index, prompt_logprobs=delta.prompt_logprobs, pooled=delta.pooled)
        if self._spec.only_prompt:
            piece.finish_reason = "length"
            self._last = piece
            return piece
        detokenizer, reader = self._detokenizer, self._reader
        scores = delta.logprobs or ()
        num_shown = len(delta.token_ids)
        if delta.finish_reason is not None:
            num_shown -= self._ends_unseen(delta)
        for position, token_id in enumerate(delta.token_ids):
            if position < len(scores):
                offset = detokenizer.num_chars
                piece.scored.append(ScoredToken(token_id, scores[position], offset))
            piece.num_tokens += 1
            if position < num_shown:
                if reader is None:
                    piece.text += detokenizer.push(token_id)
                else:
                    self._read(piece, reader, detokenizer.decode(token_id))
            if detokenizer.found is not None or (reader is not None and reader.is_done):
                piece.finish_reason = "stop"
                break
        else:
            piece.finish_reason = delta.finish_reason
        if self._spec.return_token_ids:
            piece.token_ids = list(delta.token_ids[: piece.num_tokens])
        if piece.finish_reason is not None:
            self._end(piece, delta)
        return piece

    def _read(self, piece: ChoiceDelta, reader: AnswerReader, text: str) -> None:
        """Parse the text of one token."""
        was_reasoning = reader.is_reasoning
        read = reader.push(text)
        if was_reasoning and reader.is_reasoning:  # the mark that ends reasoning does not count
            piece.num_reasoning_tokens += 1
        self._add(piece, read)

    def _add(self, piece: ChoiceDelta, read: AnswerDelta) -> None:
        """Add what was read. Stop strings apply to its text, not to reasoning and calls."""
        if read.reasoning and self._spec.include_reasoning:
            piece.reasoning += read.reasoning
        if read.text:
            piece.text += self._detokenizer.until_stop(read.text)
        if read.calls and self._detokenizer.found is None:
            self._has_called = True
            piece.calls += read.calls

    def _end(self, piece: ChoiceDelta, delta: TokenDelta) -> None:
        """Add the text that was still held back to the last piece.

        A call that a stop token of the request cuts is not complete, unless the token is the mark
        at its end.
        """
        self._last = piece
        detokenizer, reader = self._detokenizer, self._reader
        if detokenizer.found is None and reader is None:
            piece.text += detokenizer.finish()
        elif detokenizer.found is None and reader is not None:
            rest = "" if reader.is_done else detokenizer.decode(None)
            stop = self._own_stop(delta)
            if stop in self._marks and reader.is_calling and not self._spec.include_stop:
                rest += stop
            is_cut = bool(stop) or piece.finish_reason != "stop"
            self._add(piece, reader.push(rest, is_end=True, is_cut=is_cut))
            piece.text += detokenizer.held()
        if detokenizer.found is not None:
            piece.finish_reason, piece.stop_string = "stop", detokenizer.found
        is_calling = reader is not None and reader.is_calling
        if self._has_called and piece.finish_reason == "stop" and not is_calling:
            piece.finish_reason = "tool_calls"

    def _own_stop(self, delta: TokenDelta) -> str:
        """The text of the stop token that ended the answer; "" for the model's own end token."""
        if delta.finish_reason != "stop" or not delta.token_ids:
            return ""
        token_id = delta.token_ids[-1]
        stops = set(self.request.sampling.stop_token_ids).difference(self._spec.model.eos_token_ids)
        return self._spec.model.tokenizer.token_text(token_id) if token_id in stops else ""

    def _ends_unseen(self, delta: TokenDelta) -> bool:
        """Whether the last token is an end token, which has no text."""
        return (
            delta.finish_reason == "stop"
            and not self._spec.include_stop
            and bool(delta.token_ids)
            and delta.token_ids[-1] in self.request.sampling.stop_token_ids
        )


class RunningJob:
    """A checked request that runs. Iterate over `batches`; afterwards the counts are final.

    Args:
        spec: the request without its prompts.
        requests: for each prompt, the requests of its `spec.num_choices` choices.
        echoes: texts of the prompts, if they are repeated before the answers.
        generate: runs a request and enforces its deadline.
        explain: called when the first tokens of a choice arrive.

    Attributes:
        write_now: if set, gets each piece that arrives while the reader of `batches` waits for one,
            except for the last one of a choice. `batches` yields those for which it returns False.
        kept: the whole answer of each choice so far, after a call of `keep`.
    """

    def __init__(
        self,
        id: str,
        created_unix_s: int,
        spec: RequestSpec,
        requests: tuple[GenerateRequest, ...],
        generate: Generate,
        explain: Explain = lambda request_id: None,
        echoes: tuple[str, ...] = (),
    ) -> None:
        self.id = id
        self.created_unix_s = created_unix_s
        self.spec = spec
        self.requests = requests
        self.echoes = echoes
        self.num_completion_tokens = 0
        self.num_reasoning_tokens = 0  # part of `num_completion_tokens`
        self.write_now: Callable[[ChoiceDelta], bool] | None = None
        self.kept: list[ChoiceDelta] = []
        self._generate = generate
        self.answers = [
            Answer(index, request, spec, explain) for index, request in enumerate(requests)
        ]

    def keep(self) -> None:
        """Keep whole answers, as a reply needs them that is not a stream."""
        self.kept = [ChoiceDelta(index) for index in range(len(self.answers))]

    @property
    def model(self) -> ServedModel:
        """The model that was requested."""
        return self.spec.model

    @property
    def num_prompt_numbers(self) -> int:
        """The number of prompt log-probabilities, or of numbers of embeddings, in the response."""
        requests = self.requests
        num_scores = (num_prompt_scores(e.sampling, e.num_prompt_tokens) for e in requests)
        return sum(num_scores) + sum(len(each.pooled or b"") for each in self.kept) // 4

    @property
    def num_prompt_tokens(self) -> int:
        firsts = self.answers[:: self.spec.num_choices]
        return sum(answer.num_prompt_tokens for answer in firsts)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was cached; only the first choice of each prompt counts."""
        firsts = self.answers[:: self.spec.num_choices]
        return sum(answer.num_cached_tokens for answer in firsts)

    @property
    def decisions(self) -> list[CascadeDecision | None]:
        """The cascade's decision for each choice; None before its start or without a cascade."""
        return [answer.decision for answer in self.answers]

    @property
    def finish_reasons(self) -> list[str | None]:
        """Why each choice ended; None for those that have not."""
        return [answer.finish_reason for answer in self.answers]

    @property
    def model_name(self) -> str:
        """The model that answers; the model in the request if several answer, or none yet."""
        requested = self.model.name
        names = {requested if each is None else each.model for each in self.decisions}
        return names.pop() if len(names) == 1 else requested

    async def batches(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Yields pieces as they arrive, at most one per choice in a batch. Each choice ends once.

        The first batch comes when every choice has begun. So if one choice is refused, the whole
        request is refused before any part of its answer is sent.

        Closing the iterator cancels the choices that still run, and waits for their end.

        Raises:
            DisaggError: the first failure of any choice, after the pieces before it; the others are
                cancelled.
        """
        waiting: dict[int, ChoiceDelta] = {}  # the pieces since the last batch, merged
        silent = {answer.index for answer in self.answers}  # choices that have not begun
        failures: list[Exception] = []
        has_some = asyncio.Event()
        is_idle = False  # whether the reader has written all pieces before and waits for the next

        async def follow(answer: Answer) -> None:
            def take(delta: TokenDelta) -> None:
                piece = answer.advance(delta)
                self._count(piece)
                has_ended = piece.finish_reason is not None
                may_write = is_idle and not (waiting or has_ended)
                if may_write and self.write_now is not None and self.write_now(piece):
                    return
                if piece.index in waiting:
                    waiting[piece.index].extend(piece)
                elif piece.text or piece.scored or piece.num_tokens or has_ended:
                    waiting[piece.index] = piece
                    silent.discard(piece.index)
                if not silent:
                    has_some.set()
                if has_ended and not delta.is_last:
                    raise AnswerEnded

            try:
                with suppress(AnswerEnded):
                    await self._generate(answer.request, take)
                if answer.finish_reason is None:
                    raise EngineFailed(
                        "The answer ended without a finish reason; try the request again."
                    )
            except Exception as error:  # the client must get an end after any error
                failures.append(error)
                has_some.set()

        tasks = [asyncio.create_task(follow(answer)) for answer in self.answers]
        num_open = len(tasks)
        try:
            while num_open:
                is_idle = True
                await has_some.wait()
                is_idle = False
                has_some.clear()
                batch, has_failed = list(waiting.values()), bool(failures)
                waiting.clear()
                num_open -= sum(piece.finish_reason is not None for piece in batch)
                if batch and not (has_failed and silent):
                    yield batch
                if has_failed and num_open:  # also if other choices go on
                    raise failures[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _count(self, piece: ChoiceDelta) -> None:
        self.num_completion_tokens += piece.num_tokens
        self.num_reasoning_tokens += piece.num_reasoning_tokens
        if self.kept:
            self.kept[piece.index].extend(piece)


class Frames(ABC):
    """The events of one streamed answer, in the format of an API."""

    def __init__(self, run: RunningJob) -> None:
        self._run = run
        self._model_name = run.model.name

    def name_models(self) -> bool:
        """Name the models that the cascade chose so far. Returns whether it chose for all."""
        self._model_name = self._run.model_name
        return all(self._run.decisions)

    @abstractmethod
    def opening(self) -> bytes:
        """The events before the first token of each choice."""

    @abstractmethod
    def piece(self, piece: ChoiceDelta) -> bytes:
        """The events for new tokens of a choice."""

    @abstractmethod
    def closing(self) -> bytes:
        """The events after the last token."""

    @abstractmethod
    def error(self, error: DisaggError) -> bytes:
        """The last event of a stream that fails."""


class BlockFrames(Frames):
    """Events of one answer in blocks, each complete before the next one: reasoning, text or a call.

    Attributes:
        _kind: the kind of the open block; "" if none has begun.
        _call: the call that began last, without its arguments.
        _last: the last piece of the answer.
    """

    def __init__(self, run: RunningJob) -> None:
        super().__init__(run)
        self._kind: Literal["", "reasoning", "text", "call"] = ""
        self._call = CallDelta(-1)
        self._last = ChoiceDelta(0)

    def piece(self, piece: ChoiceDelta) -> bytes:
        """The events for new tokens.

        Arguments of the open call come first, because a complete block cannot grow.
        """
        self._last = piece
        events, num_grown = [], 0
        for call in piece.calls:
            if self._kind != "call" or call.number != self._call.number:
                break
            events.append(self._grow(call.arguments))
            num_grown += 1
        if piece.reasoning:
            if self._kind != "reasoning":
                events.append(self._begin("reasoning"))
            events.append(self._grow(piece.reasoning))
        if piece.text:
            if self._kind != "text":
                events.append(self._begin("text"))
            events.append(self._grow(piece.text))
        for call in piece.calls[num_grown:]:
            if call.number != self._call.number:
                events.append(self._begin("call", call))
            events.append(self._grow(call.arguments))
        return b"".join(events)

    def _begin(
        self, kind: Literal["reasoning", "text", "call"], call: CallDelta | None = None
    ) -> bytes:
        """End the open block, and begin one of this kind."""
        ended = self._end()
        self._kind = kind
        if call is not None:
            self._call = msgspec.structs.replace(call, arguments="")
        return ended + self._begin_block()

    @abstractmethod
    def _begin_block(self) -> bytes:
        """The events at the beginning of a block."""

    @abstractmethod
    def _grow(self, text: str) -> bytes:
        """The events for more text, or arguments, of the open block."""

    @abstractmethod
    def _end(self) -> bytes:
        """The events at the end of the open block, if there is one."""


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event whose data name its kind too."""
    data = msgspec.json.encode({"type": kind} | fields)
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
