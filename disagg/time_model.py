"""The time model: predicts seconds of engine steps and KV transfers; fitted while serving.

A step's seconds are a non-negative linear combination of features whose shape comes from the
roofline: per step (launches, reading the weights), per new token (matrix products), per new token
and token that it attends to (prefill attention), per decoding sequence, per token of decode context
(reading KV), and per step with prompt tokens (decode steps are compiled or captured as a graph, and
steps with prompts are not). Router, admission, autoscaler and simulator all compare choices with
these models, in seconds.

Fitting is non-negative least squares on the *relative* error (a 1 ms decode step counts as much
as a 1 s prefill step, and a stall of 100 steps' length counts for little), over normal equations
that forget exponentially, solved by one sweep of coordinate descent per observation from where
the last one ended (Franc, Hlaváč and Navara, 2005). Coefficients are kept in units of the prior,
which makes them comparable. A weak pull to the prior decides features that were never observed.
Short prompts say little about long ones: in a step with three tokens, a little noise is as much as
the tokens take. So until a long prompt was observed, the prior stands for some, and short prompts
do not make the fit forget long ones.

If a machine becomes faster or slower as a whole (another process, a throttled clock), a few steps
in a row, and not only for some milliseconds, all take longer, or all less, than predicted. Then all
coefficients are scaled together, so that the predictions for a worker that was slow for a while are
soon right again.

Pure arithmetic: no clock and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import mul
from typing import NamedTuple

import msgspec

from disagg.least_squares import PULL_TO_PRIOR, Evidence, RecentErrors, Solver
from disagg.messages import StepCosts, TransferFigure

NUM_STEP_FEATURES = 6
# Weights that an observation of a step, and of a pull, keeps when the next one of its kind arrives.
STEP_FORGETTING, PULL_FORGETTING = 0.99, 0.98
LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 16, 1 << 30  # beside sequences that have a TPOT SLO
TPOT_SHARE = 0.98  # of the SLO that a step with prompt tokens may take: the rest is for error
CHUNK_TOKENS = 1024  # of a prompt in one step, where a caller does not know better
MAX_BYTES_PER_S = 1e13
PRIOR_SOURCE = "prior"  # stands for every source in figures that were measured before serving

# Decode steps come fast and are all alike: once so many are known, one in a few is learned from,
# and those that took longer or shorter than predicted. That takes 4 us a step on average, and
# learning from each took 17 (docs/notebook/engine.md).
NUM_DECODES_ALL_LEARNED = 64
DECODES_PER_LEARNED = 8
SURPRISE = 0.15

# Prompt tokens in a step from which on it shows what long prompts take. Below, a GPU mostly reads
# the weights.
LONG_PROMPT_TOKENS = CHUNK_TOKENS // 4
# So many steps with a chunk take what the prior says, until the first long prompt: the first chunks
# of prompts, and their eighth ones, which attend to more.
NUM_ASSUMED, ASSUMED_CHUNKS = 16, (0, 7)

# So many steps one after the other, which take at least so long together and were each off by this
# factor, in one direction, mean that the machine has another speed. Other processes on a CPU slow
# some steps of 1 ms in a row.
NUM_STEPS_OF_CHANGE, CHANGE_S = 3, 0.05
CHANGE, MOST_CHANGE = 1.5, 16.0
NUM_BEFORE_CHANGE = 50  # steps: until then everything is learned fast


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """What one engine step did.

    Args:
        num_new_tokens: prompt tokens computed in the step.
        num_attended: for these, the sum of the positions each attends to.
        num_decoding: sequences that gained one token, and tokens of their drafts.
        num_decode_context: the sum of the lengths of these sequences.
    """

    num_new_tokens: int = 0
    num_attended: float = 0.0
    num_decoding: int = 0
    num_decode_context: int = 0

    def row(self) -> tuple[float, ...]:
        return (
            1.0,
            self.num_new_tokens,
            self.num_attended,
            self.num_decoding,
            self.num_decode_context,
            1.0 if self.num_new_tokens else 0.0,
        )


def attended(num_new_tokens: float, num_context_tokens: float) -> float:
    """Positions that `num_new_tokens` attend to after `num_context_tokens`, each itself too."""
    return num_new_tokens * (num_context_tokens + 0.5 * (num_new_tokens + 1))


class StepTimeModel(msgspec.Struct, frozen=True, gc=False):
    """Predicts seconds. Fields are seconds per unit of each feature of `StepFeatures`.

    The defaults are of a mid-size CPU core with a small model; `disagg plan` prints those of a
    model on a GPU.
    """

    per_step_s: float = 2e-3
    per_token_s: float = 1e-4  # of a prompt
    per_attended_s: float = 1e-8  # by a prompt token, for each token that it attends to
    per_sequence_s: float = 5e-4  # that decodes
    per_context_s: float = 1e-7  # for each token in the context of a sequence that decodes
    per_prompt_step_s: float = 0.0  # what a step with prompt tokens takes beside per_step_s

    def __post_init__(self) -> None:
        found = self.coefficients
        if not (min(found) >= 0.0 and sum(found) < math.inf):  # NaN is neither
            raise ValueError(f"A step time model needs finite coefficients >= 0, got {found}")

    @classmethod
    def of(cls, coefficients: Iterable[float]) -> StepTimeModel:
        """The model with these coefficients, in the order of the fields.

        Raises:
            ValueError: there are more or fewer, or one is negative or not finite.
        """
        found = tuple(coefficients)
        if len(found) != NUM_STEP_FEATURES:
            raise ValueError(
                f"A step time model needs {NUM_STEP_FEATURES} finite coefficients >= 0, got {found}"
            )
        return cls(*found)

    @classmethod
    def from_costs(cls, costs: StepCosts | None) -> StepTimeModel:
        """The model that a worker reports, or the default until it does."""
        return cls.of(costs.coefficients) if costs is not None else cls()

    @property
    def coefficients(self) -> tuple[float, ...]:
        """All fields in their order, for the fit and for messages."""
        return msgspec.structs.astuple(self)

    @property
    def prompt_step_s(self) -> float:
        """A step with prompt tokens, without the seconds of each of these tokens."""
        return self.per_step_s + self.per_prompt_step_s

    def step_s(self, features: StepFeatures) -> float:
        seconds: float = sum(map(mul, self.coefficients, features.row()))
        return seconds

    def prefill_s(
        self,
        num_new_tokens: float,
        num_context_tokens: float = 0,
        num_sequences: float = 1,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> float:
        """Computing `num_new_tokens` in all of `num_sequences` equal prompts, one after another.

        Each prompt comes after `num_context_tokens` that are there already.
        """
        if num_new_tokens <= 0:
            return 0.0
        num_steps = num_new_tokens / chunk_tokens if num_new_tokens > chunk_tokens else 1.0
        prompts_s = self.prompts_s(num_new_tokens, num_context_tokens, num_sequences)
        return num_steps * self.prompt_step_s + prompts_s

    def prompts_s(
        self, num_new_tokens: float, num_context_tokens: float = 0, num_sequences: float = 1
    ) -> float:
        """What the tokens of such prompts add to the steps that compute them."""
        each = num_new_tokens / num_sequences if num_sequences > 1 else num_new_tokens
        reach = num_context_tokens + 0.5 * (each + 1)
        return num_new_tokens * (self.per_token_s + self.per_attended_s * reach)

    def decode_step_s(self, num_sequences: float, num_context_tokens: float) -> float:
        """One step that gives each of `num_sequences` a token; their lengths add up to the rest."""
        if num_sequences <= 0:
            return 0.0
        sequences_s = self.per_sequence_s * num_sequences
        return self.per_step_s + sequences_s + self.per_context_s * num_context_tokens


def prompt_tokens_within(
    times: StepTimeModel,
    step_slo_s: float,
    num_decoding: float,
    num_context_tokens: float,
    num_before: float = 0,
) -> int:
    """Prompt tokens of a step that gives so many sequences a token each within `step_slo_s`.

    A few at least, since prompts must end where sequences are late without them too.

    Args:
        num_context_tokens: of the sequences that decode, in all.
        num_before: tokens that come before these in their prompt.
    """
    if step_slo_s == math.inf:
        return MOST_CHUNK_TOKENS
    room_s = step_slo_s - times.decode_step_s(num_decoding, num_context_tokens)
    return prompt_tokens_in(times, room_s, num_before)


def prompt_tokens_in(times: StepTimeModel, room_s: float, num_before: float = 0) -> int:
    """The same, with the seconds that the step has left for prompts."""
    room_s -= times.per_prompt_step_s
    token_s = times.per_token_s + times.per_attended_s * num_before
    if room_s <= LEAST_CHUNK_TOKENS * token_s:
        return LEAST_CHUNK_TOKENS
    return min(MOST_CHUNK_TOKENS, int(room_s / token_s)) if token_s else MOST_CHUNK_TOKENS


def step_solver(prior: StepTimeModel, pull: float = PULL_TO_PRIOR) -> Solver:
    """Finds coefficients from steps; all of the prior's but the last one must be > 0.

    The constant cost of steps with prompts may be anything from nothing to several decode steps.
    """
    *others, per_prompt_step = prior.coefficients
    return Solver(prior.coefficients, (*others, max(per_prompt_step, others[0])), pull)


class StepTimeFit:
    """Learns a `StepTimeModel` from an engine's steps.

    Decode steps, and steps with few and with many prompt tokens, are forgotten separately: an hour
    of decoding or of short prompts must not erase what is known about long prompts.

    Args:
        prior: what to believe before the first step; as `step_solver` needs it.
    """

    def __init__(self, prior: StepTimeModel | None = None) -> None:
        prior = prior or StepTimeModel()
        self._kinds = tuple(Evidence(NUM_STEP_FEATURES, STEP_FORGETTING) for _ in range(3))
        self._decode, self._short, self._long = self._kinds
        self._solver = step_solver(prior)
        chunks = [
            StepFeatures(CHUNK_TOKENS, attended(CHUNK_TOKENS, num_before * CHUNK_TOKENS))
            for num_before in ASSUMED_CHUNKS
        ]
        rows = [self._solver.relative(each.row(), prior.step_s(each)) for each in chunks]
        self._long.assume(rows, NUM_ASSUMED)
        self._errors = RecentErrors()
        self._pending: list[_Surprise] = []  # perhaps the first steps at another speed
        self._pending_s = 0.0
        self._num_observed = 0
        self._num_prompts = 0
        self._num_decodes = 0
        self._costs: StepCosts | None = None  # until the next step that is learned from

    @property
    def model(self) -> StepTimeModel:
        return StepTimeModel.of(self._solver.coefficients())

    @property
    def median_error(self) -> float:
        """Of recent predictions, each made before its step was learned from, as a fraction."""
        return self._errors.median()

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learn from one step, or from what it stands for. Steps of no length are ignored."""
        if seconds <= 0.0:
            return
        row = self._solver.relative(features.row(), seconds)
        predicted = self._solver.predict(row)
        error = abs(predicted - 1.0)
        kind = self._decode
        if features.num_new_tokens:
            self._num_prompts += 1
            kind = self._long if features.num_new_tokens >= LONG_PROMPT_TOKENS else self._short
        else:
            self._num_decodes += 1
            is_known = self._num_decodes > NUM_DECODES_ALL_LEARNED and error < SURPRISE
            if is_known and self._num_decodes % DECODES_PER_LEARNED:
                self._learn_pending()  # it had the usual speed
                return
        self._num_observed += 1
        self._costs = None
        self._errors.add(error)
        if self._waits_for_more(kind, row, predicted, seconds):
            return
        kind.add(row)
        self._solver.sweep(*self._kinds)

    def _waits_for_more(
        self, kind: Evidence, row: Sequence[float], predicted: float, seconds: float
    ) -> bool:
        """Whether a step is left until the next ones show if the machine has another speed.

        Args:
            predicted: the predicted seconds as a share of the measured ones.
        """
        pending = self._pending
        is_faster = predicted > 1.0
        is_off = not 1.0 / CHANGE < predicted < CHANGE and self._num_observed > NUM_BEFORE_CHANGE
        is_off = is_off and kind.num_added > 0  # the first of a kind tells nothing of a change
        if not is_off or (pending and is_faster != (pending[0].predicted > 1.0)):
            self._learn_pending()
        if not is_off:
            return False
        pending.append(_Surprise(kind, row, predicted))
        self._pending_s += seconds
        if len(pending) >= NUM_STEPS_OF_CHANGE and self._pending_s >= CHANGE_S:
            factor = sorted(each.predicted for each in pending)[len(pending) // 2]
            factor = min(max(factor, 1.0 / MOST_CHANGE), MOST_CHANGE)
            self._solver.rescale(1.0 / factor)
            for each in self._kinds:
                each.rescale(factor)
            self._learn_pending()
        return True

    def _learn_pending(self) -> None:
        for each in self._pending:
            each.kind.add(each.row)
        if self._pending:
            self._solver.sweep(*self._kinds)
            self._costs = None
            self._pending.clear()
            self._pending_s = 0.0

    def to_costs(self) -> StepCosts:
        """For `WorkerStatus`."""
        if self._costs is None:
            self._costs = StepCosts(
                self._solver.coefficients(),
                self._num_observed,
                self.median_error,
                self._num_prompts,
            )
        return self._costs


MAX_FIGURES = 64  # of a worker's sources in a report; ingresses keep those of all workers


class TransferTimeModel:
    """Learns, per source, the latency and bandwidth of pulling KV from it.

    Args:
        latency_s, bytes_per_s: what to believe of a source before its first pull.
        is_measured: these were measured before serving, and are reported until the first pull.
    """

    def __init__(
        self,
        latency_s: float = 1e-3,
        bytes_per_s: float = 1e9,
        is_measured: bool = False,
    ) -> None:
        self._prior = (latency_s, 1.0 / bytes_per_s)
        self._sources: dict[str, tuple[Evidence, Solver]] = {}
        self._before_any = (PRIOR_SOURCE,) if is_measured else ()
        self._lanes: dict[str, str] = {}  # by source; of the last pull that had one
        self._figures: tuple[TransferFigure, ...] | None = None  # until the next pull

    def observe(self, source_id: str, nbytes: int, seconds: float, lane: str = "") -> None:
        if seconds <= 0.0:
            return
        if source_id not in self._sources:
            self._sources[source_id] = (Evidence(2, PULL_FORGETTING), Solver(self._prior))
        self._figures = None
        if lane:
            self._lanes[source_id] = lane
        evidence, solver = self._sources[source_id] = self._sources.pop(source_id)  # as the latest
        evidence.add(solver.relative((1.0, nbytes), seconds))
        solver.sweep(evidence)

    def transfer_s(self, source_id: str, nbytes: int) -> float:
        latency_s, s_per_byte = self._coefficients(source_id)
        return latency_s + s_per_byte * nbytes

    def forget(self, source_id: str) -> None:
        """The source is gone; a new one of that name starts from the prior."""
        self._sources.pop(source_id, None)
        self._lanes.pop(source_id, None)
        self._figures = None

    def figures(self) -> tuple[TransferFigure, ...]:
        """For `WorkerStatus`: of the sources that were pulled from last.

        Routers take others to be like these.
        """
        if self._figures is None:
            latest = islice(reversed(self._sources), MAX_FIGURES)
            self._figures = tuple(map(self._figure, [*latest][::-1] or self._before_any))
        return self._figures

    def _figure(self, source_id: str) -> TransferFigure:
        latency_s, s_per_byte = self._coefficients(source_id)
        bytes_per_s = 1.0 / max(s_per_byte, 1.0 / MAX_BYTES_PER_S)
        return TransferFigure(source_id, latency_s, bytes_per_s, self._lanes.get(source_id, ""))

    def _coefficients(self, source_id: str) -> tuple[float, ...]:
        known = self._sources.get(source_id)
        return known[1].coefficients() if known else self._prior


class _Surprise(NamedTuple):
    """A step that was far off: its evidence, and what was predicted as a share of what it took."""

    kind: Evidence
    row: Sequence[float]
    predicted: float
