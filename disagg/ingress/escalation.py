"""Answers `model: "auto"`: starts on the smallest tier and escalates while the answer is unsure.

It wraps `Dispatcher.generate` and has the same signature. The dispatcher handles rerouting, worker
deaths and deadlines; the API handles choices, stop strings and usage. On each tier except the
largest, the first tokens are held back until they are judged (`router/cascade.py`):

- sure: the held tokens are released and the stream continues;
- unsure: the answer is cancelled, and its tokens go to the next tier as a draft;
- the tier refuses or loses the request before anything was released: like unsure;
- unsure, but no larger tier accepts the request: the small answer continues.

A tier that would probably be unsure is skipped (`router/cascade.py`). If no larger tier
accepts the request, the skipped tier answers after all and is not judged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from disagg import telemetry
from disagg.config import CascadeConfig
from disagg.errors import DisaggError
from disagg.ingress.decisions import RecentRequests
from disagg.messages import GenerateRequest, PutDelta, TokenDelta, TokenLogprobs
from disagg.router.cascade import (
    NUM_TOP,
    Attempt,
    CascadeDecision,
    first_verdict,
    is_poor,
    lead_to_release,
)

MAX_NUM_DECISIONS = 4096


@dataclass
class _EscalationState:
    """One request: its attempts so far, and the deltas that are held back."""

    request: GenerateRequest
    put: PutDelta
    began_unix_s: float
    attempts: list[Attempt] = field(default_factory=list)
    held: list[TokenDelta] = field(default_factory=list)  # deltas of the last judged answer
    judged: Attempt | None = None  # the verdict on that answer
    passed_over: str | None = None  # the largest model that was skipped
    is_released: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token_id for delta in self.held for token_id in delta.token_ids)


class _Unsure(Exception):
    """Ends a judged answer, which is not sure enough."""


class Escalation:
    """Answers requests with the smallest tier that is sure of its first tokens.

    Args:
        models: from the smallest to the largest.
        generate: runs a request on the tier that its `model` names.
        rename: returns the request for another tier, with that tier's block hashes.
        now: returns Unix time in seconds.
        decided: called with every decision.
    """

    def __init__(
        self,
        config: CascadeConfig,
        models: Sequence[str],
        *,
        generate: Callable[[GenerateRequest, PutDelta], Awaitable[None]],
        rename: Callable[[GenerateRequest, str], GenerateRequest],
        now: Callable[[], float],
        decided: Callable[[CascadeDecision], None] = lambda decision: None,
    ) -> None:
        self._config = config
        self._models = tuple(models)
        self._weights = tuple(dict(each.weights) for each in config.prompt_judges)
        self._generate = generate
        self._rename = rename
        self._now = now
        self._decided = decided
        self._decisions: RecentRequests[CascadeDecision] = RecentRequests(MAX_NUM_DECISIONS)

    def decision(self, request_id: str) -> CascadeDecision | None:
        """The decision on a recent request. It is known when the first delta arrives."""
        return self._decisions.get(request_id)

    async def generate(self, request: GenerateRequest, put: PutDelta) -> None:
        """Pass the answer to `put`, as `Dispatcher.generate` does.

        Raises the error of the last tier that was tried.
        """
        state = _EscalationState(request, put, self._now())
        for number, model in enumerate(self._models[:-1]):
            if self._is_poor(state, number):
                state.attempts.append(Attempt(model, "poor"))
                state.passed_over = model
            elif await self._try(state, number):
                return

        def take(delta: TokenDelta) -> None:
            if not state.is_released:
                state.attempts.append(Attempt(self._models[-1], "largest"))
                self._decide(state)
            put(delta)

        try:
            await self._generate(self._request_for(state, self._models[-1]), take)
        except DisaggError as error:
            can_keep = state.judged is not None or state.passed_over is not None
            if state.is_released or not can_keep or not error.retryable:
                raise
            state.attempts.append(Attempt(self._models[-1], error.code))
            await self._keep(state)

    def _is_poor(self, state: _EscalationState, number: int) -> bool:
        """Whether tier `number` would probably be unsure."""
        if not self._config.prompt_judges:
            return False
        judge, weights = self._config.prompt_judges[number], self._weights[number]
        return is_poor(judge, weights, state.request.token_ids)

    async def _try(self, state: _EscalationState, number: int) -> bool:
        """Run the request on tier `number`. Returns whether that tier has answered it.

        Its first deltas are held back until they can be judged.
        """
        threshold = self._config.thresholds[number]
        needed_lead = lead_to_release(self._config, number)
        held: list[TokenDelta] = []
        scores: list[TokenLogprobs] = []

        def take(delta: TokenDelta) -> None:
            if state.is_released:
                state.put(self._hide_scores(state, delta))
                return
            held.append(delta)
            num_seen = len(scores)
            scores.extend(delta.logprobs or ())
            is_end = delta.finish_reason is not None
            verdict = first_verdict(self._config, threshold, scores, num_seen, is_end, needed_lead)
            if verdict is None:
                return
            reason = "sure" if verdict.is_sure else "unsure"
            state.judged = Attempt(self._models[number], reason, verdict, threshold)
            state.attempts.append(state.judged)
            state.held = held
            if not verdict.is_sure:
                raise _Unsure
            self._release(state)

        try:
            await self._generate(self._judged_request(state, number), take)
        except _Unsure:
            return False
        except DisaggError as error:
            # Not retryable: the request may have broken an engine; spare the next one.
            if state.is_released or not error.retryable:
                raise
            state.attempts.append(Attempt(self._models[number], error.code))
            return False
        return True

    async def _keep(self, state: _EscalationState) -> None:
        """Continue the small answer where it was cancelled, or start the answer of a skipped tier.

        Nothing is released before the tier has accepted the request, so that a refusal still gets
        its HTTP status.
        """
        judged = state.judged
        if judged is None:
            assert state.passed_over is not None
            judged = Attempt(state.passed_over, "poor")
        state.attempts.append(replace(judged, reason="kept"))
        if state.held and state.held[-1].finish_reason is not None:
            self._release(state)
            return

        def take(delta: TokenDelta) -> None:
            if not state.is_released:
                self._release(state)
            state.put(delta)

        request = state.request
        resumed = replace(request, token_ids=(*request.token_ids, *state.tokens))
        await self._generate(self._rename(resumed, judged.model), take)

    # Requests

    def _request_for(self, state: _EscalationState, model: str) -> GenerateRequest:
        """The request for a tier, with the tokens of the tier below as a draft."""
        return replace(self._rename(state.request, model), draft_token_ids=state.tokens)

    def _judged_request(self, state: _EscalationState, number: int) -> GenerateRequest:
        """The request for tier `number`, with the log-probabilities that the judge needs."""
        request = self._request_for(state, self._models[number])
        requested, needed = request.sampling.logprobs, NUM_TOP[self._config.signal]
        sampling = replace(
            request.sampling,
            logprobs=max(requested or 0, needed),
            logprobs_until=self._config.num_judged_tokens if requested is None else None,
        )
        return replace(request, sampling=sampling)

    # Answers

    def _release(self, state: _EscalationState) -> None:
        """Pass the held deltas on. From now on nothing can be taken back."""
        self._decide(state)
        for delta in state.held:
            if state.request.sampling.logprobs is None:
                delta = replace(delta, logprobs=None)
            state.put(self._hide_scores(state, delta))

    def _hide_scores(self, state: _EscalationState, delta: TokenDelta) -> TokenDelta:
        """The delta without log-probabilities that only the judge needs."""
        num_top = state.request.sampling.logprobs
        if num_top is None or num_top >= NUM_TOP[self._config.signal] or delta.logprobs is None:
            return delta
        scores = tuple(replace(score, top=score.top[:num_top]) for score in delta.logprobs)
        return replace(delta, logprobs=scores)

    def _decide(self, state: _EscalationState) -> None:
        state.is_released = True
        decision = CascadeDecision(self._config.signal, tuple(state.attempts))
        self._decisions.put(state.request.request_id, decision)
        self._decided(decision)
        if telemetry.enabled():
            attributes = {
                "disagg.cascade.model": decision.model,
                "disagg.cascade.why": decision.in_words(),
            }
            telemetry.record_span(
                "cascade",
                state.request.traceparent,
                state.began_unix_s,
                self._now(),
                attributes,
            )
