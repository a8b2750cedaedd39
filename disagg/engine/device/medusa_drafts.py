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
        timer: returns seconds.
    """

    knows_ahead = False

    def __init__(
        self,
        heads: MedusaHeads,
        whole: ModelRunner,
        num_tokens: int,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert whole.decoder.kept is not None
        self.num_tokens = min(num_tokens, heads.num_heads)
        self.spent_s = 0.0
        self._heads, self._whole, self._kept = heads, whole, whole.decoder.kept
        self._timer = timer
        self._times = StepTimeFit()

    def measure(self, max_num_seqs: int) -> None:
        """Time drafts, from which `token_s` knows what they cost."""
        for num_seqs in sorted([1, min(8, max_num_seqs), max_num_seqs] * NUM_TIMED):
            began_s = self._timer()
            self._named([0] * num_seqs, 1)
            self._times.observe(StepFeatures(0, 0, num_seqs, 0), self._timer() - began_s)

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
        drafts = self._named(slots, max(limits.values()))
        self.spent_s += self._timer() - began_s
        for sequence, draft in zip(asked, drafts, strict=True):
            yield sequence, tuple(draft[: limits[sequence]])

    def _named(self, slots: list[int], num_tokens: int) -> list[list[int]]:
        index = upload(slots, torch.int64, self._kept.by_slot.device)
        states = self._kept.by_slot.index_select(0, index)
        return self._heads.token_ids(states, num_tokens).tolist()
