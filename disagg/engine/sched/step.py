"""The types of one engine step: the plan, the sampled tokens, and the events of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from operator import attrgetter
from typing import Protocol, TypeAlias

import msgspec

from disagg.engine.sched.sequence import Sequence
from disagg.errors import DisaggError
from disagg.messages import FinishReason, TokenLogprobs
from disagg.time_model import StepFeatures

_POOLING = attrgetter("pooling")


class StepPlan(msgspec.Struct, frozen=True):
    """One step's decisions: `sequences[i]` computes its next `query_lens[i]` tokens.

    Tokens beyond the sequence's last one are the first tokens of its draft.

    num_decodes: the first `num_decodes` sequences compute one token, and sample the next one.
    features: the step's features for the time model.
    num_ahead: number of draft tokens among the new tokens.
    continues: whether the step before is not applied yet and has the same sequences, in the same
        list object. All of them then decode the token that the step before samples.
    starts: not empty if the step before is not applied yet and has other sequences. Sequence i
        then continues at position `starts[i]`.
    num_unread: the first `num_unread` sequences continue with the token that the step before
        samples.
    """

    sequences: SequenceOf[Sequence]
    query_lens: SequenceOf[int]
    num_decodes: int
    features: StepFeatures
    num_ahead: int = 0
    starts: SequenceOf[int] = ()
    num_unread: int = 0
    continues: bool = False

    @property
    def reads_prompts(self) -> bool:
        """Whether the host reads more of the step than tokens, so that no step can follow at once:
        log-probabilities of prompts, or what a request has instead of an answer."""
        if self.continues:  # all of these have sampled before
            return False
        prompts = self.sequences[self.num_decodes :]
        # Of a prompt whose prefix is cached a single token may be left, as of a decode.
        is_pooled = any(map(_POOLING, self.sequences))
        return is_pooled or any(each.prompt_logprobs is not None for each in prompts)

    @property
    def num_new_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def is_ahead(self) -> bool:
        """Whether the step before this one is not applied yet."""
        return self.continues or bool(self.starts)

    def first_positions(self) -> SequenceOf[int]:
        """The position at which each sequence continues, while the step before is not applied."""
        return self.starts or [each.num_computed + self.continues for each in self.sequences]


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprobs: TokenLogprobs | None = None


# The result of a step for one sequence: a token id; a token with its log-probabilities if they were
# requested; None if the chunk ends before the sequence's last token; several tokens if a draft was
# verified, each as if the draft before it were right. An error ends only that sequence, without the
# token that the step should have given it.
Sampled: TypeAlias = int | SampledToken | tuple[SampledToken, ...] | DisaggError | None


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a sequence gained in a step, or how it ended.

    The last event of a sequence has a finish reason, an error, or `left`. The last means that the
    sequence was handed over, and the receiver of the event must release its blocks.
    """

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: DisaggError | None = None
    left: bool = False

    @property
    def is_last(self) -> bool:
        return self.left or self.finish_reason is not None or self.error is not None


class SequencesFailed(Exception):
    """A step failed because of some of its sequences; without them it can be planned again.

    errors: what each of them raised.
    """

    def __init__(self, errors: Mapping[Sequence, Exception]) -> None:
        super().__init__(f"a step failed because of {', '.join(map(repr, errors))}")
        self.errors = errors


class Runner(Protocol):
    """Computes plans. It is a model on a device, a fake in tests, or a clock in the simulator."""

    def run(self, plan: StepPlan) -> SequenceOf[Sampled]:
        """Compute the plan. Returns one result for each of its sequences."""
        ...


Results: TypeAlias = Callable[[], SequenceOf[Sampled]]
Choose: TypeAlias = Callable[[], Results]


class AsyncRunner(Protocol):
    """A runner whose device computes while the host does something else."""

    def launch(self, plan: StepPlan) -> Choose:
        """Launch a step after those already launched: first its forward pass.

        The result launches the choice of the step's tokens. Call it when the step before has been
        applied, and before the next launch: only then the host knows the tokens on which masks and
        bad words depend. It returns the step's results, and reading them waits for its end.

        Results are read in the order of launching, and at most one step late.
        """
        ...
