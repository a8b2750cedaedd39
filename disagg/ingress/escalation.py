"""Carries a request for `model: "auto"` from the smallest tier to the one that answers it.

A layer around `Dispatcher.generate` with the same signature: moves, deaths and deadlines happen
below it; choices, stop strings and usage above. On each tier but the last the first tokens are
held back until they are judged (`router/cascade.py`). A sure answer is released and flows on, no
token of it held any more. An unsure one is cancelled, and its tokens go to the next tier as a
draft. A tier that refuses the request or loses it counts as unsure while nothing was released.
And where no larger tier can take it, the small answer goes on from where it was judged: whoever
must have the large model names it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from disagg import telemetry
from disagg.config import CascadeConfig
from disagg.errors import DisaggError, WorkerLost
from disagg.messages import GenerateRequest, TokenDelta, TokenLogprobs
from disagg.router.cascade import (
    NUM_TOP,
    Attempt,
    CascadeDecision,
    judge,
    moved_threshold,
    waits_as_fractions,
)
from disagg.router.fleet import FleetView

Deltas: TypeAlias = AsyncGenerator[TokenDelta, None]

MAX_NUM_DECISIONS = 4096


@dataclass
class _Climb:
    """How far a request has come."""

    request: GenerateRequest
    began_unix_s: float
    attempts: list[Attempt] = field(default_factory=list)
    held: list[TokenDelta] = field(default_factory=list)  # of the last answer that was judged
    judged: Attempt | None = None  # and what was found
    is_released: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token_id for delta in self.held for token_id in delta.token_ids)


class Escalation:
    """Answers requests with the smallest tier that is sure.

    Args:
        ttft_slo_s: by model, from the smallest to the largest.
        generate: runs a request on the tier that its `model` names.
        rename: the request as another tier knows it: there its blocks have other names.
        fleet: what load is read from.
        now: Unix time in seconds.
        decided: told every decision.
    """

    def __init__(
        self,
        config: CascadeConfig,
        ttft_slo_s: Mapping[str, float],
        *,
        generate: Callable[[GenerateRequest], Deltas],
        rename: Callable[[GenerateRequest, str], GenerateRequest],
        fleet: Callable[[], FleetView],
        now: Callable[[], float],
        decided: Callable[[CascadeDecision], None] = lambda decision: None,
    ) -> None:
        self._config = config
        self._ttft_slo_s = ttft_slo_s
        self._models = tuple(ttft_slo_s)
        self._generate = generate
        self._rename = rename
        self._fleet = fleet
        self._now = now
        self._decided = decided
        self._decisions: OrderedDict[str, CascadeDecision] = OrderedDict()

    def decision(self, request_id: str) -> CascadeDecision | None:
        """Of a recent request; it is there when the first delta is."""
        return self._decisions.get(request_id)

    async def generate(self, request: GenerateRequest) -> Deltas:
        """The answer, as `Dispatcher.generate` gives it; closing the iterator cancels it.

        Raises what that raises, by the last tier that was tried.
        """
        climb = _Climb(request, self._now())
        for number in range(len(self._models) - 1):
            async with aclosing(self._generate(self._judged_request(climb, number))) as deltas:
                if await self._is_sure(climb, number, deltas):
                    for delta in self._release(climb):
                        yield delta
                    async for delta in deltas:
                        yield self._shown(climb, delta)
                    return
        try:
            async with aclosing(self._generate(self._asked(climb, self._models[-1]))) as deltas:
                async for delta in deltas:
                    if not climb.is_released:
                        climb.attempts.append(Attempt(self._models[-1], "largest"))
                        self._decide(climb)
                    yield delta
                return
        except DisaggError as error:
            if climb.is_released or climb.judged is None or not error.retryable:
                raise
            climb.attempts.append(Attempt(self._models[-1], error.code))
        async with aclosing(self._keep(climb, climb.judged)) as deltas:
            async for delta in deltas:
                yield delta

    async def _is_sure(self, climb: _Climb, number: int, deltas: Deltas) -> bool:
        """Hold back what tier `number` says until it can be judged; note what comes of it."""
        model, threshold = self._models[number], None
        held: list[TokenDelta] = []
        scores: list[TokenLogprobs] = []
        try:
            async for delta in deltas:
                held.append(delta)
                scores += delta.logprobs or ()
                if threshold is None:
                    threshold = self._threshold(number)
                verdict = judge(self._config, threshold, scores, delta.finish_reason is not None)
                if verdict is not None:
                    reason = "sure" if verdict.is_sure else "unsure"
                    climb.judged = Attempt(model, reason, verdict, threshold)
                    climb.attempts.append(climb.judged)
                    climb.held = held
                    return verdict.is_sure
            raise WorkerLost("An answer ended without saying why.")
        except DisaggError as error:
            if not error.retryable:  # as one that may have broken an engine: not another one's too
                raise
            climb.attempts.append(Attempt(model, error.code))
            return False

    async def _keep(self, climb: _Climb, judged: Attempt) -> Deltas:
        """The small answer after all, from where it was cancelled.

        Nothing is released before it is known to go on, so that a refusal is still a plain one.
        """
        climb.attempts.append(replace(judged, reason="kept"))
        if climb.held[-1].finish_reason is not None:
            for delta in self._release(climb):
                yield delta
            return
        asked = climb.request
        resumed = replace(asked, token_ids=(*asked.token_ids, *climb.tokens))
        async with aclosing(self._generate(self._rename(resumed, judged.model))) as deltas:
            async for delta in deltas:
                if not climb.is_released:
                    for earlier in self._release(climb):
                        yield earlier
                yield delta

    def _threshold(self, number: int) -> float:
        threshold = self._config.thresholds[number]
        if not self._config.max_shift:
            return threshold
        waits = waits_as_fractions(self._fleet(), self._ttft_slo_s)
        here, above = (waits[self._models[number + step]] for step in (0, 1))
        return moved_threshold(threshold, self._config.max_shift, here, above)

    # Requests

    def _asked(self, climb: _Climb, model: str) -> GenerateRequest:
        """The request for a tier, with what the tier below said as a draft."""
        return replace(self._rename(climb.request, model), draft_token_ids=climb.tokens)

    def _judged_request(self, climb: _Climb, number: int) -> GenerateRequest:
        """The same, with the scores that the judge needs beside those that the client wants."""
        request = self._asked(climb, self._models[number])
        wanted, needed = request.sampling.logprobs, NUM_TOP[self._config.signal]
        sampling = replace(
            request.sampling,
            logprobs=max(wanted or 0, needed),
            logprobs_until=self._config.num_judged_tokens if wanted is None else None,
        )
        return replace(request, sampling=sampling)

    # Answers

    def _release(self, climb: _Climb) -> Sequence[TokenDelta]:
        """The held deltas as the client wants them."""
        self._decide(climb)
        if climb.request.sampling.logprobs is None:
            return [replace(delta, logprobs=None) for delta in climb.held]
        return [self._shown(climb, delta) for delta in climb.held]

    def _shown(self, climb: _Climb, delta: TokenDelta) -> TokenDelta:
        """Without scores that only the judge wanted."""
        wanted = climb.request.sampling.logprobs
        if wanted is None or wanted >= NUM_TOP[self._config.signal] or delta.logprobs is None:
            return delta
        scores = tuple(replace(score, top=score.top[:wanted]) for score in delta.logprobs)
        return replace(delta, logprobs=scores)

    def _decide(self, climb: _Climb) -> None:
        climb.is_released = True
        decision = CascadeDecision(self._config.signal, tuple(climb.attempts))
        self._decisions[climb.request.request_id] = decision
        while len(self._decisions) > MAX_NUM_DECISIONS:
            self._decisions.popitem(last=False)
        self._decided(decision)
        if telemetry.enabled():
            attributes = {
                "disagg.cascade.model": decision.model,
                "disagg.cascade.why": decision.in_words(),
            }
            telemetry.record_span(
                "cascade",
                climb.request.traceparent,
                climb.began_unix_s,
                self._now(),
                attributes,
            )
