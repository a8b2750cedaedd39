"""Drafts of Medusa heads (vLLM's method "medusa"), the likeliest token of each head.

They have no KV: a draft follows from one hidden state of the model, that from which it has named
the sequence's last token (`models.kept_states`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import torch

from disagg.engine.device.runner import ModelRunner
from disagg.engine.sched.sequence import Sequence
from disagg.kernels.uploads import upload
from disagg.models.heads import MedusaHeads
from disagg.time_model import StepFeatures, StepTimeFit

NUM_TIMED = 3  # drafts of each size that are timed at the start


class MedusaDrafts:
    """A `drafting.Proposer` that asks Medusa heads.

    Args:
        whole: runs the model, which keeps states for the heads.
        num_tokens: most tokens of a draft; there are no more than heads.
        stream: on which drafts are made, so that they do not wait for a step of the model; None:
            the current one.
        timer: returns seconds.
    """

    knows_ahead = False

    def __init__(
        self,
        heads: MedusaHeads,
        whole: ModelRunner,
        num_tokens: int,
        stream: torch.cuda.Stream | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert whole.decoder.kept is not None
        self.num_tokens = min(num_tokens, heads.num_heads)
        self.spent_s = 0.0
        self._heads, self._whole, self._kept = heads, whole, whole.decoder.kept
        self._stream = stream
        self._timer = timer
        self._times = StepTimeFit()

    def measure(self, max_num_seqs: int) -> None:
        """Time drafts, from which `token_s` knows what they cost before there are any."""
        for num_seqs in sorted([1, min(8, max_num_seqs), max_num_seqs] * NUM_TIMED):
            began_s = self._timer()
            self._named([0] * num_seqs, self.num_tokens)
            self._learn(num_seqs, self.num_tokens, self._timer() - began_s)

    def token_s(self, num_sequences: int, place: int) -> float:
        return self._times.model.decode_step_s(num_sequences, 0)

    def entry_s(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, limits: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        began_s, kv_slots = self._timer(), self._whole.batching.kv_slots
        # What joined behind its prompt has no state yet.
        asked = [each for each in limits if each.num_computed > each.num_cached_tokens]
        if not asked:
            return
        slots = [kv_slots(each, (each.num_computed - 1,))[0] for each in asked]
        num_tokens = max(limits[each] for each in asked)
        drafts = self._named(slots, num_tokens)
        took_s = self._timer() - began_s
        self.spent_s += took_s
        self._learn(len(asked), num_tokens, took_s)
        for sequence, draft in zip(asked, drafts, strict=True):
            yield sequence, tuple(draft[: limits[sequence]])

    def _learn(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        """Each head of a draft counts as a step of its own, with its share of the host's part."""
        self._times.observe(StepFeatures(0, 0, num_seqs, 0), seconds / num_tokens)

    def _named(self, slots: list[int], num_tokens: int) -> list[list[int]]:
        # The states are those of steps that the host has read, whatever the model does meanwhile.
        with torch.cuda.stream(self._stream):
            index = upload(slots, torch.int64, self._kept.by_slot.device)
            states = self._kept.by_slot.index_select(0, index)
            return self._heads.token_ids(states, num_tokens).tolist()
