"""Drafts of a head, from hidden states of the model (vLLM's methods "eagle3" and "mtp").

A head is a draft model of one layer (`draft_model`), with states as further inputs. So its KV, too,
is computed before a draft as far as it is missing, from the states that the model has kept
(`models.kept_states`). There are none of tokens whose KV was cached or came from another worker:
the head sees the sequence from the first token that this worker has computed, and drafts behind the
first step here. So nothing of a head moves between workers either.

While its drafts do not pay, the model keeps no states, so that a head that rests costs nothing.
When it is asked again, it sees each sequence from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from disagg.engine.device.draft_model import DraftModel
from disagg.engine.device.prompt_scores import ScoredRows
from disagg.engine.device.runner import ModelRunner
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued
from disagg.engine.sched.step import Sampled, StepPlan
from disagg.kernels.uploads import upload
from disagg.models.batch import Batch
from disagg.models.heads import HeadDecoder

# When it was asked for no draft so many times in a row, the model keeps no states. A sequence that
# had begun before it kept them again has a draft when there are states of so many tokens.
TIMES_TO_REST, NUM_STATES = 2, 16


class HeadRunner(ModelRunner):
    """Runs a head for sequences that begin in the middle of others.

    shifts: int64 [num_logits], by how much the position of a row's token is larger in the other
        sequence, whose noise is drawn.
    """

    shifts: Tensor | None = None

    def _forward(
        self, batch: Batch, rows: SequenceOf[Continued], scored: SequenceOf[ScoredRows] | None
    ) -> tuple[Tensor, Tensor]:
        logits, positions = super()._forward(batch, rows, scored)
        return logits, positions if self.shifts is None else positions + self.shifts


class HeadDrafts(DraftModel):
    """A `drafting.Proposer` that runs a head.

    Args:
        runner: of a `HeadDecoder`.
        whole: runs the model, which keeps states for the head.
    """

    def __init__(self, runner: HeadRunner, *args: Any, whole: ModelRunner) -> None:
        super().__init__(runner, *args)
        kept = whole.decoder.kept
        assert isinstance(runner.decoder, HeadDecoder) and kept is not None
        self._head, self._of_head = runner.decoder, runner
        self._kept, self._whole = kept, whole
        self._rows: dict[Sequence, int] = {}  # of the last step: the last row of each twin
        self._num_idle = 0  # times that no draft was asked for, in a row
        # Where those begin that had KV when the model began to keep states again.
        self._begins = WeakKeyDictionary[Sequence, int]()

    def propose(self, limits: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        self._num_idle = 0 if limits else self._num_idle + 1
        if limits and self._whole.decoder.kept is None:
            self._wake()
        # What a captured graph does is fixed.
        elif self._num_idle >= TIMES_TO_REST and self._whole.graphs is None:
            self._whole.decoder.kept = None
        if not limits:
            return
        limits = {each: limit for each, limit in limits.items() if self._has_states(each)}
        for sequence, draft in super().propose(limits):
            # Its KV is computed again from the states of the model.
            twin = self._twins[ref(sequence)]
            twin.num_computed = min(twin.num_computed, len(twin.tokens) - len(draft))
            yield sequence, draft
        self._rows, self._of_head.shifts, self._head.given = {}, None, None

    def _wake(self) -> None:
        """Let the model keep states again, and forget what was computed of earlier ones."""
        self._whole.decoder.kept = self._kept
        running = self._whole.slots.owners()
        self._begins = WeakKeyDictionary({each: each.num_computed for each in running})
        self._let_go([*self._twins])

    def _begin(self, sequence: Sequence) -> int:
        return self._begins.get(sequence, sequence.num_cached_tokens) + 1

    def _has_states(self, sequence: Sequence) -> bool:
        begin = self._begins.get(sequence)
        return begin is None or sequence.num_computed - begin >= NUM_STATES

    @torch.inference_mode()
    def _run(self, plan: StepPlan, owners: Mapping[Sequence, Sequence]) -> list[Sampled]:
        head, device = self._head, self._head.device
        slots, own, shifts, rows = list[int](), list[int](), list[int](), dict[Sequence, int]()
        for twin, size in zip(plan.sequences, plan.query_lens, strict=True):
            sequence, begin = owners[twin], self._begin(owners[twin])
            first = twin.num_computed + begin - 1
            if first < sequence.num_computed:
                slots += self._whole.batching.kv_slots(sequence, range(first, first + size))
            else:  # it goes on with what it has made itself
                own.append(self._rows[twin])
            shifts += [begin] * max(0, twin.num_computed + size - len(twin.tokens) + 1)
            rows[twin] = len(shifts) - 1
        source, picked = (self._kept.by_slot, slots) if slots else (head.made, own)
        assert source is not None
        # A block that left a window has no slot.
        index = upload(picked, torch.int64, device).remainder(len(source))
        head.given = source.index_select(0, index)
        self._rows, self._of_head.shifts = rows, upload(shifts, torch.int64, device)
        return self._runner.run(plan)
