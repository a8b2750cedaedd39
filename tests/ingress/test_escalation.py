"""Whichever tier answers, the client gets one answer, whole, and nothing keeps running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.config import CascadeConfig, PromptJudge
from disagg.errors import (
    DeadlineExceeded,
    DisaggError,
    EngineFailed,
    Overloaded,
    RequestError,
    Unavailable,
)
from disagg.ingress.escalation import Escalation
from disagg.messages import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from disagg.router.cascade import CascadeDecision
from tests.deltas import answers, push
from tests.router.fakes import make_request

JUDGED, THRESHOLD = 4, -1.0
SURE, UNSURE = -0.1, -3.0


@dataclass
class FakeTier:
    """One model behind a dispatcher: what it says is a function of how far the answer is.

    `error` is raised after so many tokens of a visit (`after`), from visit `fails_from` on. The
    tokens are base, base + 1, ...
    """

    base: int
    logprobs: list[float]
    per_delta: int = 1
    error: DisaggError | None = None
    after: int = 0
    fails_from: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    num_open: int = 0
    num_said: int = 0

    @property
    def tokens(self) -> list[int]:
        return [self.base + i for i in range(len(self.logprobs))]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.num_open += 1
        error = self.error if len(self.requests) > self.fails_from else None
        try:
            begin = len(request.token_ids) - request.num_prompt_tokens
            for start in range(begin, len(self.logprobs), self.per_delta):
                if error is not None and start - begin >= self.after:
                    raise error
                end = min(start + self.per_delta, len(self.logprobs))
                self.num_said += end - start
                reason: FinishReason | None = "stop" if end == len(self.logprobs) else None
                scores = self._scores(request.sampling, range(start, end))
                cached = 5 if start == begin else 0
                yield TokenDelta(0, tuple(self.tokens[start:end]), reason, scores, cached)
                await asyncio.sleep(0)
        finally:
            self.num_open -= 1

    def _scores(self, sampling: SamplingParams, places: range) -> tuple[TokenLogprobs, ...] | None:
        until = sampling.logprobs_until
        if sampling.logprobs is None or (until is not None and places.start >= until):
            return None
        num_top = sampling.logprobs
        return tuple(
            TokenLogprobs(
                self.logprobs[place],
                tuple((token, self.logprobs[place] - token) for token in range(num_top)),
            )
            for place in places
            if until is None or place < until
        )


class Rig:
    """Tiers under an escalation."""

    def __init__(self, *tiers: FakeTier, **config: Any) -> None:
        self.tiers = {f"tier-{number}": tier for number, tier in enumerate(tiers)}
        fields: dict[str, Any] = {
            "num_judged_tokens": JUDGED,
            "thresholds": (THRESHOLD,) * (len(tiers) - 1),
        }
        self.decided: list[CascadeDecision] = []
        self.escalation = Escalation(
            CascadeConfig(**(fields | config)),
            tuple(self.tiers),
            generate=lambda request, put: push(self.tiers[request.model].generate)(request, put),
            rename=lambda request, model: msgspec.structs.replace(request, model=model),
            now=lambda: 1000.0,
            decided=self.decided.append,
        )

    async def ask(self, **sampling: Any) -> list[TokenDelta]:
        request = make_request(
            10, model="auto", priority=-3, sampling=SamplingParams(max_tokens=64, **sampling)
        )
        async with aclosing(answers(self.escalation, request)) as deltas:
            return [delta async for delta in deltas]

    @property
    def reasons(self) -> list[str]:
        assert len(self.decided) == 1
        assert self.escalation.decision("request-0") == self.decided[0]
        return [f"{each.model} {each.reason}" for each in self.decided[0].attempts]


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def small(*logprobs: float, **changes: Any) -> FakeTier:
    return FakeTier(100, list(logprobs), **changes)


def large(num_tokens: int = 6, **changes: Any) -> FakeTier:
    return FakeTier(200, [SURE] * num_tokens, **changes)


def check_ends(rig: Rig, deltas: list[TokenDelta]) -> None:
    assert [delta.finish_reason is not None for delta in deltas].count(True) == 1
    assert deltas[-1].finish_reason is not None
    assert all(tier.num_open == 0 for tier in rig.tiers.values())


@pytest.mark.parametrize("per_delta", [1, 3, 50])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 9])
async def test_a_sure_answer_is_the_small_models(num_tokens: int, per_delta: int) -> None:
    first = small(*[SURE] * num_tokens, per_delta=per_delta)
    rig = Rig(first, large())
    deltas = await rig.ask()
    assert tokens_of(deltas) == first.tokens
    assert rig.reasons == ["tier-0 sure"] and not rig.tiers["tier-1"].requests
    assert all(delta.logprobs is None for delta in deltas), "nobody asked for scores"
    check_ends(rig, deltas)


@pytest.mark.parametrize("place", [0, 2, 3])
async def test_an_unsure_answer_is_cancelled_and_becomes_a_draft(place: int) -> None:
    scores = [SURE] * 9
    scores[place] = UNSURE
    rig = Rig(small(*scores), large())
    deltas = await rig.ask()
    assert tokens_of(deltas) == rig.tiers["tier-1"].tokens
    assert rig.reasons == ["tier-0 unsure", "tier-1 largest"]
    (asked,) = rig.tiers["tier-1"].requests
    assert asked.draft_token_ids == tuple(range(100, 100 + place + 1))
    assert (asked.token_ids, asked.priority) == (make_request(10).token_ids, -3)
    assert asked.sampling == SamplingParams(max_tokens=64), "scores are for the judged only"
    assert rig.tiers["tier-0"].num_said == place + 1, "it went on after it was given up"
    check_ends(rig, deltas)


async def test_what_is_not_judged_may_be_unsure() -> None:
    rig = Rig(small(*[SURE] * JUDGED, UNSURE, SURE), large())
    await rig.ask()
    assert rig.reasons == ["tier-0 sure"]


async def test_nothing_is_held_once_it_is_released() -> None:
    tier = small(*[SURE] * 20)
    rig = Rig(tier, large())
    request = make_request(10, model="auto")
    seen = 0

    def put(delta: TokenDelta) -> None:
        nonlocal seen
        seen += len(delta.token_ids)
        assert tier.num_said == max(seen, JUDGED)

    await rig.escalation.generate(request, put)
    assert seen == 20


async def test_a_client_that_leaves_cancels_either_tier() -> None:
    for scores, num_wanted in (([SURE] * 20, 1), ([UNSURE] * 20, 1), ([SURE] * 20, 6)):
        rig = Rig(small(*scores), large())
        generator = answers(rig.escalation, make_request(10, model="auto"))
        for _ in range(num_wanted):
            await anext(generator)
        assert sum(tier.num_open for tier in rig.tiers.values()) == 1
        await generator.aclose()
        assert sum(tier.num_open for tier in rig.tiers.values()) == 0


@pytest.mark.parametrize("signal", ["minimum", "mean", "margin"])
@pytest.mark.parametrize("wanted", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("scores", [[SURE] * 9, [UNSURE] * 9])
async def test_the_client_gets_the_scores_it_asked_for(
    signal: str, wanted: int | None, scores: list[float]
) -> None:
    """The margin of a fake's token is always 1, so only other signals escalate."""
    rig = Rig(small(*scores), large(), signal=signal)
    deltas = await rig.ask(logprobs=wanted)
    for delta in deltas:
        if wanted is None:
            assert delta.logprobs is None
        else:
            assert delta.logprobs is not None and len(delta.logprobs) == len(delta.token_ids)
            assert all(len(score.top) == wanted for score in delta.logprobs)
    asked = rig.tiers["tier-0"].requests[0].sampling
    assert asked.logprobs_until == (JUDGED if wanted is None else None)


@pytest.mark.parametrize("error", [Unavailable("away"), Overloaded("full")])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_small_tier_that_fails_is_passed_over(error: DisaggError, after: int) -> None:
    rig = Rig(small(*[SURE] * 9, error=error, after=after), large())
    deltas = await rig.ask()
    assert tokens_of(deltas) == rig.tiers["tier-1"].tokens
    assert rig.reasons == [f"tier-0 {error.code}", "tier-1 largest"]
    check_ends(rig, deltas)


@pytest.mark.parametrize(
    "error", [RequestError("wrong"), DeadlineExceeded("late"), EngineFailed("broken")]
)
async def test_an_error_that_another_tier_cannot_mend_is_the_answer(error: DisaggError) -> None:
    rig = Rig(small(SURE, error=error), large())
    with pytest.raises(type(error)):
        await rig.ask()
    assert not rig.tiers["tier-1"].requests


async def test_an_error_after_the_release_is_the_answer() -> None:
    rig = Rig(small(*[SURE] * 9, error=Unavailable("gone"), after=JUDGED + 1), large())
    with pytest.raises(Unavailable):
        await rig.ask()
    assert not rig.tiers["tier-1"].requests and rig.reasons == ["tier-0 sure"]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("error", [Unavailable("away"), Overloaded("full")])
async def test_without_the_large_model_the_small_answer_goes_on(
    error: DisaggError, num_tokens: int
) -> None:
    scores = [SURE] * num_tokens
    scores[min(1, num_tokens - 1)] = UNSURE
    rig = Rig(small(*scores), large(error=error))
    deltas = await rig.ask()
    first = rig.tiers["tier-0"]
    assert tokens_of(deltas) == first.tokens and first.num_said == num_tokens
    assert rig.reasons == ["tier-0 unsure", f"tier-1 {error.code}", "tier-0 kept"]
    assert deltas[0].num_cached_tokens == 5, "of the visit that computed the prompt"
    assert all(delta.logprobs is None for delta in deltas)
    check_ends(rig, deltas)


async def test_a_large_model_that_fails_midway_is_not_glued_to_a_small_one() -> None:
    rig = Rig(small(UNSURE, SURE), large(error=Unavailable("gone"), after=2))
    with pytest.raises(Unavailable):
        await rig.ask()
    assert len(rig.tiers["tier-0"].requests) == 1


async def test_where_nobody_answers_the_error_is_plain() -> None:
    rig = Rig(small(SURE, error=Unavailable("small away")), large(error=Overloaded("large full")))
    with pytest.raises(Overloaded):
        await rig.ask()
    assert not rig.decided


async def test_a_small_answer_that_cannot_go_on_shows_nothing_of_itself() -> None:
    tier = small(*[UNSURE] * 9, error=Unavailable("away"), fails_from=1)
    rig = Rig(tier, large(error=Overloaded("full")))
    generator = answers(rig.escalation, make_request(10, model="auto"))
    with pytest.raises(Unavailable):
        await anext(generator)
    assert len(tier.requests) == 2 and tier.num_open == 0


async def test_three_tiers_are_climbed_one_by_one() -> None:
    middle = FakeTier(150, [SURE, UNSURE, SURE])
    rig = Rig(small(UNSURE), middle, large())
    deltas = await rig.ask()
    assert tokens_of(deltas) == rig.tiers["tier-2"].tokens
    assert rig.reasons == ["tier-0 unsure", "tier-1 unsure", "tier-2 largest"]
    assert middle.requests[0].draft_token_ids == (100,)
    assert rig.tiers["tier-2"].requests[0].draft_token_ids == (150, 151)
    rig = Rig(small(UNSURE), FakeTier(150, [SURE] * 3), large())
    assert tokens_of(await rig.ask()) == [150, 151, 152]
    assert rig.decided[0].model == "tier-1"


@pytest.mark.parametrize(("needed_lead", "num_held"), [(0.0, 1), (2.7, 1), (2.8, 2), (9.0, 4)])
async def test_a_lead_releases_an_answer_before_all_judged_tokens(
    needed_lead: float, num_held: int
) -> None:
    """SURE leads THRESHOLD by 2.79 nats of log-odds."""
    tier = small(*[SURE] * 20)
    rig = Rig(tier, large(), leads=(needed_lead,), thresholds=(-1.0,))
    said: list[int] = []  # at each delta that is released
    request = make_request(10, model="auto")
    await rig.escalation.generate(request, lambda delta: said.append(tier.num_said))
    assert said == [max(num_held, number) for number in range(1, 21)]
    (attempt,) = rig.decided[0].attempts
    assert attempt.verdict is not None and attempt.verdict.num_tokens == num_held


@pytest.mark.parametrize("per_delta", [1, 2, 50])
async def test_what_is_released_stays_though_a_later_token_is_unsure(per_delta: int) -> None:
    """Also if both come at once: the decision is the same at any load."""
    tier = small(SURE, UNSURE, SURE, per_delta=per_delta)
    rig = Rig(tier, large(), leads=(0.0,))
    assert tokens_of(await rig.ask()) == tier.tokens
    assert rig.reasons == ["tier-0 sure"]


POOR = PromptJudge(3.0, start_above=1.0)  # whatever the prompt
FAIR = PromptJudge(-3.0, start_above=1.0)


async def test_a_prompt_that_the_small_model_is_poor_at_starts_on_the_large_one() -> None:
    rig = Rig(small(*[SURE] * 9), large(), prompt_judges=(POOR,))
    deltas = await rig.ask()
    assert tokens_of(deltas) == rig.tiers["tier-1"].tokens
    assert rig.reasons == ["tier-0 poor", "tier-1 largest"]
    assert rig.decided[0].in_words() == "tier-0 poor, tier-1 largest"
    assert not rig.tiers["tier-0"].requests
    (asked,) = rig.tiers["tier-1"].requests
    assert asked.draft_token_ids == () and asked.sampling == SamplingParams(max_tokens=64)
    check_ends(rig, deltas)


async def test_the_tokens_of_the_prompt_decide_where_it_starts() -> None:
    (token, *_) = make_request(10).token_ids
    for weight, expected in ((5.0, "tier-1"), (0.0, "tier-0")):
        judge = PromptJudge(-1.0, ((token, weight),), start_above=1.0)
        rig = Rig(small(*[SURE] * 9), large(), prompt_judges=(judge,))
        await rig.ask()
        assert rig.decided[0].model == expected


@pytest.mark.parametrize("judge", [FAIR, PromptJudge(3.0)])
async def test_other_prompts_start_on_the_small_one(judge: PromptJudge) -> None:
    rig = Rig(small(*[SURE] * 9), large(), prompt_judges=(judge,))
    await rig.ask()
    assert rig.reasons == ["tier-0 sure"]


@pytest.mark.parametrize("error", [Unavailable("away"), Overloaded("full")])
async def test_a_model_that_was_passed_over_answers_where_no_other_can(error: DisaggError) -> None:
    first = small(UNSURE, *[SURE] * 8)
    rig = Rig(first, large(error=error), prompt_judges=(POOR,))
    deltas = await rig.ask(logprobs=1)
    assert tokens_of(deltas) == first.tokens
    assert rig.reasons == ["tier-0 poor", f"tier-1 {error.code}", "tier-0 kept"]
    assert all(delta.logprobs is not None for delta in deltas)
    check_ends(rig, deltas)


async def test_a_passed_over_model_does_not_go_on_with_an_answer_of_the_large_one() -> None:
    rig = Rig(small(SURE, SURE), large(error=Unavailable("gone"), after=2), prompt_judges=(POOR,))
    with pytest.raises(Unavailable):
        await rig.ask()
    assert not rig.tiers["tier-0"].requests


async def test_each_tier_is_passed_over_by_a_judge_of_its_own() -> None:
    middle = FakeTier(150, [UNSURE])
    rig = Rig(small(SURE), middle, large(), prompt_judges=(POOR, FAIR))
    await rig.ask()
    assert rig.reasons == ["tier-0 poor", "tier-1 unsure", "tier-2 largest"]
    rig = Rig(
        small(UNSURE, SURE),
        FakeTier(150, [SURE]),
        large(error=Overloaded("full")),
        prompt_judges=(FAIR, POOR),
    )
    assert tokens_of(await rig.ask()) == [100, 101]
    assert rig.reasons == ["tier-0 unsure", "tier-1 poor", "tier-2 overloaded", "tier-0 kept"]


@given(
    st.lists(st.sampled_from((SURE, UNSURE)), min_size=1, max_size=10),
    st.integers(1, 4),
    st.sampled_from((None, Unavailable("away"), Overloaded("full"))),
    st.integers(0, 5),
    st.sampled_from((None, Unavailable("away"), EngineFailed("broken"))),
    st.sampled_from(((), (0.0,), (6.0,))),
    st.sampled_from(((), (POOR,), (FAIR,))),
)
async def test_one_whole_answer_or_one_error(
    scores: list[float],
    per_delta: int,
    small_error: DisaggError | None,
    after: int,
    large_error: DisaggError | None,
    leads: tuple[float, ...],
    judges: tuple[PromptJudge, ...],
) -> None:
    first = small(*scores, per_delta=per_delta, error=small_error, after=after)
    rig = Rig(first, large(error=large_error), leads=leads, prompt_judges=judges)
    try:
        deltas = await rig.ask()
    except DisaggError:
        assert small_error is not None or large_error is not None
        assert all(tier.num_open == 0 for tier in rig.tiers.values())
        return
    assert tokens_of(deltas) in (first.tokens, rig.tiers["tier-1"].tokens)
    assert tokens_of(deltas) == rig.tiers[rig.decided[0].model].tokens
    check_ends(rig, deltas)
