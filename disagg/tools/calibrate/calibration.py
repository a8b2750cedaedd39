"""Calibrates a cascade: accuracy and cost of every threshold, from labelled prompts.

Two models answered the same prompts. It is known which answers are right, and the log-probabilities
of the small model's tokens are known. The measures are RouteLLM's (Ong et al., 2024): the gap is
the large model's accuracy minus the small model's, and "recovered" is the part of the gap that the
cascade keeps.

Two more figures make the judge quicker. `certify_lead` bounds how often an early release loses a
right answer, by risk-controlling prediction sets (Bates et al., 2021, arXiv:2101.02703). The loss
can only fall as the lead grows. So it takes the smallest lead from which on the confidence bound of
the loss stays within the risk; for new prompts of the same kind the risk then holds with that
confidence. `make_judge` finds the prompts that should start on the large model.

A model's cost for an answer is its parameters times the tokens that went through it: the whole
prompt, as if none of it were cached, and every token of the answer except the last, which is not
read again. A discarded answer of the small model counts up to the token at which it was judged.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from disagg.config import CascadeConfig, PromptJudge, Signal
from disagg.errors import RequestError
from disagg.messages import TokenLogprobs
from disagg.router.cascade import features, is_poor, lead, lead_to_release, log_odds, measure

MAX_NUM_THRESHOLDS = 400
CONFIDENCE = 0.9  # that the risk of early releases holds
NUM_FOLDS = 5
# Of prompts that are less likely to be unsure, most would have had a good answer from the small
# model. Chosen of 0.3 and 1/3 on the bundled models: with 1/3, the first token of one task comes
# later than the goal allows (docs/cascade.md).
MIN_CHANCE_TO_START = 0.3

MIN_NUM_PROMPTS = 3  # with a token, for a weight of its own in a prompt judge
PENALTY = 1.0  # of squared weights, as if of a normal prior with variance 1
NUM_SWEEPS = 40


class Compared(msgspec.Struct, frozen=True):
    """One prompt that both models answered."""

    num_prompt_tokens: int
    scores: tuple[TokenLogprobs, ...]  # of the small answer's tokens
    num_large_tokens: int  # of the large answer
    small_is_right: bool
    large_is_right: bool
    prompt_token_ids: tuple[int, ...] = ()  # for the prompt judge


class Point(msgspec.Struct, frozen=True):
    """Accuracy and cost of one threshold, over all prompts."""

    threshold: float
    escalated: float  # share of the prompts
    accuracy: float
    recovered: float  # of the gap between the models
    cost: float  # as a fraction of the large model's alone


class ModelSizes(NamedTuple):
    """Numbers of parameters of the two models, which are what a token of each costs."""

    small: int
    large: int


class Curve:
    """All thresholds of one signal, the lowest (nothing escalates) first.

    Raises:
        RequestError: there is nothing to gain.
    """

    def __init__(
        self,
        answers: Sequence[Compared],
        signal: Signal,
        num_judged_tokens: int,
        parameters: ModelSizes,
    ) -> None:
        self.signal = signal
        self.num_judged_tokens = num_judged_tokens
        num_answers = len(answers)
        self.small_accuracy = sum(each.small_is_right for each in answers) / max(1, num_answers)
        self.large_accuracy = sum(each.large_is_right for each in answers) / max(1, num_answers)
        if self.large_accuracy <= self.small_accuracy:
            raise RequestError(
                f"There is no gap to recover: of {num_answers} prompts the small model answers"
                f" {self.small_accuracy:.1%} right and the large one {self.large_accuracy:.1%}."
                " Take harder prompts, or serve the small model alone."
            )
        self._judged = [_Judged(each, signal, num_judged_tokens) for each in answers]
        self._parameters = parameters
        thresholds = _thresholds([each.values[-1] for each in self._judged])
        self.points = tuple(map(self.at, thresholds))

    def at(self, threshold: float) -> Point:
        """The point of any threshold."""
        outcome = _replay(self._judged, threshold, self._parameters)
        gap = self.large_accuracy - self.small_accuracy
        recovered = (outcome.accuracy - self.small_accuracy) / gap
        return Point(threshold, outcome.escalated, outcome.accuracy, recovered, outcome.cost)

    def cheapest(self, quality: float) -> Point:
        """The threshold of least cost that keeps this share of the large model's accuracy."""
        wanted = quality * self.large_accuracy
        good = [point for point in self.points if point.accuracy >= wanted]
        return min(good, key=lambda point: (point.cost, point.escalated))

    def at_recovered(self, share: float) -> Point:
        """The fewest escalations that recover `share` of the gap: RouteLLM's CPT."""
        good = [point for point in self.points if point.recovered >= share]
        return min(good, key=lambda point: (point.escalated, point.cost))

    @property
    def area(self) -> float:
        """The area under recovered gap over escalated share (RouteLLM's APGR); 0.5 by chance."""
        return math.fsum(
            (after.escalated - before.escalated) * (after.recovered + before.recovered) / 2
            for before, after in pairwise(self.points)
        )


class CascadeOutcome(msgspec.Struct, frozen=True):
    """The outcome of a whole cascade for the prompts.

    Attributes:
        escalated: share of the prompts of which the small model was unsure.
        started: share of the prompts that started on the large model.
        cost: cost as a fraction of that of the large model alone.
        num_held: mean number of tokens of the small answer until it was judged.
    """

    accuracy: float
    escalated: float
    started: float
    cost: float
    num_held: float


def replay(
    answers: Sequence[Compared], config: CascadeConfig, parameters: ModelSizes
) -> CascadeOutcome:
    """The outcome of `config` for the answers. Only its first tier counts."""
    judged = [_Judged(each, config.signal, config.num_judged_tokens) for each in answers]
    started = [False] * len(answers)
    for its in config.prompt_judges[:1]:
        weights = dict(its.weights)
        started = [is_poor(its, weights, each.prompt_token_ids) for each in answers]
    return _replay(judged, config.thresholds[0], parameters, lead_to_release(config, 0), started)


def certify_lead(answers: Sequence[Compared], config: CascadeConfig, risk: float) -> float:
    """The least lead with which early releases lose at most `risk` of all prompts.

    A prompt is lost if all judged tokens would have sent it to the large model, the large model was
    right and the small one was wrong. Infinite if there are too few answers to tell.
    """
    threshold = config.thresholds[0]
    judged = [_Judged(each, config.signal, config.num_judged_tokens) for each in answers]
    lost = [each.reach(threshold) for each in judged if each.is_lost(threshold)]
    reaches = sorted(reach for reach in lost if reach >= 0.0)
    num_allowed = -1
    while num_allowed < len(reaches) and upper_bound(num_allowed + 1, len(answers)) <= risk:
        num_allowed += 1
    if num_allowed < 0:
        return math.inf
    if num_allowed >= len(reaches):
        return 0.0
    least = reaches[-1 - num_allowed]
    return least if least == math.inf else (math.floor(1000 * least) + 1) / 1000


def min_num_prompts(risk: float) -> int:
    """The number of prompts that certify a risk if early releases lose none of them."""
    return math.ceil(math.log(1.0 - CONFIDENCE) / math.log1p(-risk))


def upper_bound(num_lost: int, num_prompts: int) -> float:
    """The upper bound of the share of lost prompts with `CONFIDENCE` (Clopper, Pearson 1934).

    With this share, `num_lost` or fewer would be seen with a probability of 1 - `CONFIDENCE`.
    """
    if num_lost >= num_prompts:
        return 1.0
    low, high = num_lost / num_prompts, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if _at_most(num_lost, num_prompts, middle) > 1.0 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _at_most(number: int, of: int, share: float) -> float:
    """The probability that a binomial variable is at most `number`."""
    logs = (
        math.lgamma(of + 1)
        - math.lgamma(each + 1)
        - math.lgamma(of - each + 1)
        + each * math.log(share)
        + (of - each) * math.log1p(-share)
        for each in range(number + 1)
    )
    return math.fsum(map(math.exp, logs))


def make_judge(
    answers: Sequence[Compared], config: CascadeConfig, parameters: ModelSizes
) -> PromptJudge | None:
    """A judge that starts a prompt on the large model if the small one is probably unsure.

    It starts as many prompts there as early releases pay for: the cost is at most that of judging
    all tokens of all answers. Chances come from cross-validation, from judges that have not seen
    the prompt. None if no prompt would start on the large model.
    """
    judged = [_Judged(each, config.signal, config.num_judged_tokens) for each in answers]
    threshold, needed_lead = config.thresholds[0], lead_to_release(config, 0)
    prompts = [each.prompt_token_ids for each in answers]
    unsure = [not each.at(threshold, needed_lead)[1] for each in judged]
    odds = _odds_unseen(prompts, unsure)
    costs = [each.cost(*each.at(threshold, needed_lead), parameters) for each in judged]
    budget = sum(each.cost(*each.at(threshold), parameters) for each in judged) - sum(costs)
    start_above, least = None, math.log(MIN_CHANCE_TO_START / (1.0 - MIN_CHANCE_TO_START))
    order = sorted(range(len(answers)), key=lambda number: -odds[number])
    for number, following in pairwise([*order, None]):
        assert number is not None
        if odds[number] <= least:
            break
        budget += costs[number] - parameters.large * judged[number].num_large_positions
        if budget >= 0:
            after = least if following is None else max(least, odds[following])
            start_above = (odds[number] + after) / 2
    if start_above is None:
        return None
    return replace(fit_judge(prompts, unsure), start_above=start_above)


def _odds_unseen(prompts: Sequence[Sequence[int]], unsure: Sequence[bool]) -> list[float]:
    """Log-odds of each prompt by a judge that was fitted on other prompts."""
    odds = [0.0] * len(prompts)
    for fold in range(NUM_FOLDS):
        seen = [number for number in range(len(prompts)) if number % NUM_FOLDS != fold]
        its = fit_judge([prompts[each] for each in seen], [unsure[each] for each in seen])
        weights = dict(its.weights)
        for number in range(fold, len(prompts), NUM_FOLDS):
            odds[number] = log_odds(its.bias, weights, prompts[number])
    return odds


def fit_judge(prompts: Sequence[Sequence[int]], unsure: Sequence[bool]) -> PromptJudge:
    """The judge with the least penalised loss. Its threshold does not start any prompt on the
    larger model yet.

    Coordinate descent: each weight in turn takes a Newton step with the largest curvature that the
    logistic loss can have, so the loss falls at every step.

    Args:
        prompts: token ids; `unsure`: for each, whether the small model was unsure.
    """
    found = [features(prompt) for prompt in prompts]
    column: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row, values in enumerate(found):
        for token, value in values.items():
            column[token].append((row, value))
    columns = {token: its for token, its in column.items() if len(its) >= MIN_NUM_PROMPTS}
    weights = dict.fromkeys(columns, 0.0)
    curvature = {
        token: PENALTY + sum(value * value for _, value in its) / 4
        for token, its in columns.items()
    }
    share = (sum(unsure) + 1) / (len(unsure) + 2)
    bias = math.log(share / (1.0 - share))
    odds = [bias] * len(prompts)
    for _ in range(NUM_SWEEPS):
        step = 4 * sum(map(_error, odds, unsure)) / max(1, len(odds))
        bias -= step
        odds = [each - step for each in odds]
        for token, its in columns.items():
            slope = PENALTY * weights[token]
            slope += sum(value * _error(odds[row], unsure[row]) for row, value in its)
            step = slope / curvature[token]
            weights[token] -= step
            for row, value in its:
                odds[row] -= step * value
    return PromptJudge(bias, tuple(sorted(weights.items())))


def _error(odds: float, is_unsure: bool) -> float:
    """Predicted chance minus the truth: the slope of the logistic loss."""
    chance = 1.0 / (1.0 + math.exp(-odds)) if odds > -700.0 else 0.0
    return chance - is_unsure


class _Judged:
    """A small answer with its signal after each token that is judged."""

    def __init__(self, answer: Compared, signal: Signal, num_judged_tokens: int) -> None:
        scores = answer.scores[:num_judged_tokens]
        self.answer = answer
        self.values = [measure(signal, scores[: end + 1]) for end in range(len(scores))]
        self.values = self.values or [-math.inf]
        self._signal = signal
        self._may_rise = signal == "mean"
        self.num_large_positions = answer.num_prompt_tokens + answer.num_large_tokens - 1

    def at(self, threshold: float, needed_lead: float = math.inf) -> tuple[int, bool]:
        """After how many tokens it is judged, and whether it is kept."""
        if needed_lead != math.inf:
            for number, value in enumerate(self.values[:-1], 1):
                if value < threshold:
                    if not self._may_rise:
                        break
                elif number * lead(self._signal, value, threshold) >= needed_lead:
                    return number, True
        if self.values[-1] >= threshold:
            return len(self.values), True
        if self._may_rise:
            return len(self.values), False
        # They fall: the first below the threshold ends it.
        return bisect_right(self.values, -threshold, key=lambda value: -value) + 1, False

    def cost(self, num_judged: int, is_sure: bool, parameters: ModelSizes) -> int:
        """The cost, in parameters x tokens, of an answer that was judged after so many tokens."""
        num_small = len(self.answer.scores) if is_sure else num_judged
        cost = parameters.small * (self.answer.num_prompt_tokens + num_small - 1)
        return cost if is_sure else cost + parameters.large * self.num_large_positions

    def is_lost(self, threshold: float) -> bool:
        """Whether a release loses a right answer that all judged tokens would have led to."""
        is_worse = self.answer.large_is_right and not self.answer.small_is_right
        return is_worse and self.values[-1] < threshold

    def reach(self, threshold: float) -> float:
        """The greatest needed lead at which it is released early; -inf: none."""
        most = -math.inf
        for number, value in enumerate(self.values[:-1], 1):
            if value >= threshold:
                most = max(most, number * lead(self._signal, value, threshold))
            elif not self._may_rise:
                break
        return most


def _replay(
    judged: Sequence[_Judged],
    threshold: float,
    parameters: ModelSizes,
    needed_lead: float = math.inf,
    started: Sequence[bool] = (),
) -> CascadeOutcome:
    num_right = num_escalated = num_held = cost = 0
    for each, starts in zip(judged, started or [False] * len(judged), strict=True):
        if starts:
            num_right += each.answer.large_is_right
            cost += parameters.large * each.num_large_positions
            continue
        num_judged, is_sure = each.at(threshold, needed_lead)
        num_right += each.answer.small_is_right if is_sure else each.answer.large_is_right
        num_escalated += not is_sure
        num_held += num_judged
        cost += each.cost(num_judged, is_sure, parameters)
    num_started = sum(started)
    alone = parameters.large * sum(each.num_large_positions for each in judged)
    return CascadeOutcome(
        num_right / len(judged),
        num_escalated / len(judged),
        num_started / len(judged),
        cost / alone,
        num_held / max(1, len(judged) - num_started),
    )


def _thresholds(values: Sequence[float]) -> list[float]:
    """One threshold between any two signals, one below all and one above all. If there are very
    many, an evenly spaced part of them."""
    ordered = sorted({value for value in values if math.isfinite(value)}) or [0.0]
    between = [(low + high) / 2 for low, high in pairwise(ordered)]
    step = max(1, len(between) // MAX_NUM_THRESHOLDS)
    return [ordered[0] - 1.0, *between[::step], ordered[-1] + 1.0]
