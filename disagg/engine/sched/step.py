"""The values of one engine step: what was planned, what the device sampled, who gained what."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol, TypeAlias, TypeGuard

import msgspec

from disagg.engine.sched.sequence import Sequence
from disagg.errors import DisaggError
from disagg.messages import FinishReason, TokenLogprobs
from disagg.time_model import StepFeatures


class Work(msgspec.Struct, frozen=True, gc=False):
    """Compute the next `num_tokens` tokens of a sequence, from `sequence.num_computed` on.

    Where that is more than it has, the rest are the first tokens of its draft.
    """

    sequence: Sequence
    num_tokens: int


class StepPlan(msgspec.Struct, frozen=True):
    """One step's decisions: `sequences[i]` computes its next `query_lens[i]` tokens.

    Two lists and not one of `Work`, which would be an object for each sequence in each step.

    num_decodes: the first so many sequences compute one token, and sample the one after it.
    features: what the step will cost, in the terms of the time model.
    num_ahead: tokens of drafts among the new ones.
    continues: the step before this one has yet to be applied, and has the same sequences: this very
        object. All decode, each with the token that the step before samples.
    starts: not empty if the step before has yet to be applied, but does not have the same. Then
        sequence i goes on at position `starts[i]`, where it will be by then.
    num_unread: so many of the first sequences go on with the token that the step before samples.
    """

    sequences: SequenceOf[Sequence]
    query_lens: SequenceOf[int]
    num_decodes: int
    num_new_tokens: int  # the sum of `query_lens`
    features: StepFeatures
    num_ahead: int = 0
    starts: SequenceOf[int] = ()
    num_unread: int = 0
    continues: bool = False

    @property
    def is_ahead(self) -> bool:
        """The step before this one has yet to be applied."""
        return self.continues or bool(self.starts)

    def first_positions(self) -> SequenceOf[int]:
        """Where each sequence goes on, as long as the step before is not applied."""
        return self.starts or [each.num_computed + self.continues for each in self.sequences]

    @property
    def work(self) -> list[Work]:
        """The same, item by item."""
        return list(map(Work, self.sequences, self.query_lens))


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprobs: TokenLogprobs | None = None


# What a step chose for an item of its plan: a token's id, or with its log-probabilities if they
# were asked for; none where the chunk ends before the sequence's tokens do; several where a draft
# was computed along, each as if what is before it were right. An error ends that sequence alone.
Sampled: TypeAlias = int | SampledToken | tuple[SampledToken, ...] | DisaggError | None


def are_plain(sampled: SequenceOf[Sampled]) -> TypeGuard[SequenceOf[int]]:
    """Whether each is a token's id and nothing else."""
    return set(map(type, sampled)) <= {int}


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """What a sequence gained in a step, or how it ended.

    The last event of a sequence has a finish reason, an error, or `left`: it was asked to hand
    over, and its blocks are now the receiver's to release.
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


class Runner(Protocol):
    """Whatever computes a plan: a model on a device, a fake in tests, a clock in a simulator."""

    def run(self, plan: StepPlan) -> SequenceOf[Sampled]:
        """One result for each item."""
        ...


Results: TypeAlias = Callable[[], SequenceOf[Sampled]]


class AsyncRunner(Protocol):
    """A runner whose device computes while the host does something else."""

    def launch(self, plan: StepPlan) -> Results:
        """Begin a step behind those that were launched. The result waits for its end.

        Results are asked for in the order of launching, and at most one step late.
        """
        ...

    def can_follow(self, plan: StepPlan) -> bool:
        """Whether, once `plan` is launched, steps of its sequences can be launched behind it."""
        ...

    def needs_host(self, sequence: Sequence) -> bool:
        """Whether a token of this sequence is not found by the device alone."""
        ...
