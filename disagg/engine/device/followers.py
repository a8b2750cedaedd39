"""The interface through which the first rank of a worker controls the other ranks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import Protocol

from disagg.adapters import Adapter
from disagg.engine.device.batching import StepInputs
from disagg.engine.device.prompt_scores import ScoredRows, scored_ranges
from disagg.models.communicator import Communicator
from disagg.rank_messages import RankStep, RankWork


class Followers(Protocol):
    """The other ranks of a worker.

    If a rank is gone, each method raises `StartupError` during the start, and any error later.
    """

    def meet(self, device_type: str) -> Communicator:
        """Wait until all ranks have started, and connect them. device_type: "cpu" or "cuda"."""
        ...

    def least_room_nbytes(self, own_nbytes: int | None) -> int | None:
        """Wait until all ranks have loaded. Returns the smallest memory for KV of any rank."""
        ...

    def raise_lost(self) -> None:
        """Raise the error of a rank that could not load, if one arrives within seconds."""
        ...

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        """Wait until all ranks have so many KV blocks and can compute steps.

        Args:
            max_num_seqs: most sequences of a step.
        """
        ...

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        """Have all other ranks read a LoRA adapter into host memory; the result is when all have.

        It is reported while the worker polls its tasks. The error is `Unavailable`.
        """
        ...

    def forget_adapter(self, digest: str) -> None:
        """Have them free their host memory of an adapter."""
        ...

    def follow(self, work: RankWork) -> None:
        """Have all other ranks do the work that this rank does now, after all earlier work."""
        ...


def rank_step(
    step: StepInputs,
    num_slots: int,
    scored: SequenceOf[ScoredRows] = (),
    *,
    shares_tokens: bool = False,
) -> RankStep:
    """The message that describes a step to the other ranks; see `RankStep`."""
    return RankStep(
        numbers=step.numbers.written(sum(step.lengths)),
        lengths=step.lengths,
        num_unread=step.num_unread,
        num_decodes=step.num_decodes,
        query_lens=step.query_lens,
        ends=list(step.ends),
        longest=step.longest,
        num_slots=num_slots,
        scored=scored_ranges(scored),
        shares_tokens=shares_tokens,
        has_adapters=step.has_adapters,
    )
