"""A step plan as tensors, most of which are on the device already.

The block tables of running sequences and the tokens that were sampled last stay there, in a row for
each slot. A step uploads what it changes of them, and where each of its tokens goes, in one copy:
worked out on the host, where a sum costs less than a launch. Must not know what a model does with
it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import StepPlan
from disagg.models.batch import Batch

Ints: TypeAlias = SequenceOf[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a device is told of a step, on the host.

    numbers: int64, parts of these lengths. Of each sequence its slot, of each token its position
        and where its KV goes, of each sequence where its context ends; token ids, but for those
        that are read on the device; cells of the block tables, and the blocks to write there.
        Unless all sequences decode, also where the tokens of each begin and how many there are,
        rows whose logits are wanted, and the slots that these belong to.
    num_unread: tokens that are read on the device, those of the first sequences.
    ends: where each sequence's context ends once the step is done.
    """

    numbers: Tensor
    lengths: list[int]
    num_unread: int
    num_decodes: int
    query_lens: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def are_decodes(self) -> bool:
        return self.num_decodes == len(self.ends)


class _Decodes:
    """Sequences that decode, of one step after another as long as they are the same.

    slots, ends: of each.
    places: int64 [4, num_seqs], of each its slot, its token's position, where that one's KV goes,
        and its end.
    """

    def __init__(self, slots: list[int], starts: SequenceOf[int], kv_slots: list[int]) -> None:
        self.slots = slots
        self.ends = [start + 1 for start in starts]
        self.places = np.array((slots, starts, kv_slots, self.ends), np.int64)
        self._begin: deque[list[int]] | None = None  # rows, by the steps until they begin a block

    def advance(self, block_size: int) -> list[int]:
        """Each goes on by a token. Returns the rows of which it is the first in its block."""
        if self._begin is None:
            self._begin = deque([] for _ in range(block_size))
            for row, end in enumerate(self.ends):
                self._begin[-end % block_size].append(row)
        further = self.places[1:]
        further += 1
        self.ends = further[2].tolist()
        self._begin.rotate(-1)
        return self._begin[-1]


class Batching:
    """Makes the batches of one runner's plans.

    Args:
        slots: the runner's.
        max_num_blocks: of one sequence.
    """

    def __init__(
        self, slots: Slots, block_size: int, max_num_blocks: int, device: torch.device
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._max_num_blocks = max_num_blocks
        self._device = device
        self._tables = torch.zeros(0, max_num_blocks, dtype=torch.int32, device=device)
        self._cells = self._tables.view(-1)
        self._chosen = torch.zeros(0, dtype=torch.int64, device=device)
        self._counted = self._chosen, self._chosen.int()
        self._decodes = _Decodes([], [], [])  # of the step before, or of none

    # On the host.

    def inputs(self, plan: StepPlan, entered: SequenceOf[Sequence]) -> StepInputs:
        """What the device has to be told of a plan that has work.

        Args:
            entered: sequences of the plan that have just been given their slots.
        """
        for sequence in entered:
            sequence.num_listed = 0
        slots = [sequence.slot for sequence in plan.sequences]
        starts = plan.starts or [sequence.num_computed for sequence in plan.sequences]
        token_ids, logits_rows = _tokens(plan, starts)
        if plan.num_decodes == len(slots):
            changes = self._decode(plan.sequences, slots, starts, are_new=bool(entered))
            ends = self._decodes.ends
            parts: tuple[Ints, ...] = (*self._decodes.places, token_ids, *changes)
        else:
            self._decodes = _Decodes([], [], [])
            ends = [*map(add, starts, plan.query_lens)]
            spans = [*map(range, starts, ends)]
            kv_slots = chain.from_iterable(map(self._kv_slots, plan.sequences, spans))
            positions = [*chain.from_iterable(spans)]
            begins = [0, *accumulate(plan.query_lens)]
            wanted = [slots[bisect_right(begins, row) - 1] for row in logits_rows]
            changes = self._changes(plan.sequences)
            places = slots, positions, [*kv_slots], ends
            parts = (*places, token_ids, *changes, begins, logits_rows, wanted)
        # Unsafe for NumPy, which takes an empty list for one of floats.
        packed = np.concatenate(parts, dtype=np.int64, casting="unsafe")
        numbers = torch.from_numpy(packed)
        if self._device.type != "cpu":
            numbers = numbers.pin_memory()
        return StepInputs(
            numbers,
            [*map(len, parts)],
            plan.num_unread,
            plan.num_decodes,
            tuple(plan.query_lens),
            tuple(ends),
        )

    def _decode(
        self,
        sequences: SequenceOf[Sequence],
        slots: list[int],
        starts: SequenceOf[int],
        *,
        are_new: bool,
    ) -> tuple[list[int], list[int]]:
        """Bring `_decodes` to a step. Returns what that changes of the tables.

        Where all are a token further than in the step before, a table can have changed only where
        a block begins: whoever lost blocks meanwhile would be computed anew.
        """
        decodes = self._decodes
        if are_new or slots != decodes.slots or starts != decodes.ends:
            at = map(self._kv_slots, sequences, ((start,) for start in starts))
            self._decodes = _Decodes(slots, starts, [*chain.from_iterable(at)])
            return self._changes(sequences)
        begun = decodes.advance(self._block_size)
        for row in begun:
            (decodes.places[2, row],) = self._kv_slots(sequences[row], (starts[row],))
        return self._changes([sequences[row] for row in begun])

    def _changes(self, sequences: SequenceOf[Sequence]) -> tuple[list[int], list[int]]:
        """Cells of the tables that are not as these sequences' blocks are, and those blocks."""
        cells: list[int] = []
        block_ids: list[int] = []
        changed = [each for each in sequences if each.num_listed != len(each.block_ids)]
        for sequence in changed:
            num_listed, num_blocks = sequence.num_listed, len(sequence.block_ids)
            if num_blocks > self._max_num_blocks:
                raise ValueError(f"{sequence} does not fit into {self._max_num_blocks} columns")
            first = sequence.slot * self._max_num_blocks
            cells.extend(range(first + num_listed, first + num_blocks))
            block_ids += sequence.block_ids[num_listed:]
            sequence.num_listed = num_blocks
        return cells, block_ids

    def _kv_slots(self, sequence: Sequence, positions: Iterable[int]) -> list[int]:
        """Where the KV of these positions goes."""
        block_ids, block_size = sequence.block_ids, self._block_size
        return [block_ids[p // block_size] * block_size + p % block_size for p in positions]

    # On the device, in the order of steps.

    @torch.inference_mode()
    def batch(self, step: StepInputs) -> tuple[Batch, Tensor]:
        """The batch, whose shapes and order `models.batch.Batch` says, and int64 [num_logits]: the
        slots whose next tokens the logits are for."""
        if self._slots.num_slots > self._chosen.shape[0]:
            self._make_room()
        numbers = step.numbers.to(self._device, non_blocking=True)
        parts = numbers.split_with_sizes(step.lengths)
        slots, positions, kv_slots, ends, token_ids, cells, block_ids = parts[:7]
        num_seqs = len(step.ends)
        if step.lengths[5]:
            self._cells.index_copy_(0, cells, block_ids.int())
        if step.are_decodes:
            logits_rows, query_start = self._count(num_seqs)
            slots_of_logits, max_query_len = slots, 1
        else:
            begins, logits_rows, slots_of_logits = parts[7:]
            query_start, max_query_len = begins.int(), max(step.query_lens)
        if step.num_unread:
            unread_slots = slots if step.num_unread == num_seqs else slots[: step.num_unread]
            unread = self._chosen.index_select(0, unread_slots)
            token_ids = torch.cat((unread, token_ids)) if step.lengths[4] else unread
        longest = max(step.ends)
        num_columns = -(-longest // self._block_size)
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            slots=kv_slots,
            query_start=query_start,
            context_lens=ends.int(),
            block_tables=self._tables[:, :num_columns].index_select(0, slots),
            logits_rows=logits_rows,
            num_decodes=step.num_decodes,
            max_query_len=max_query_len,
            max_context_len=longest,
            query_lens=step.query_lens,
            context_lens_host=step.ends,
        )
        return batch, slots_of_logits

    @torch.inference_mode()
    def remember(self, slots: Tensor, token_ids: Tensor) -> None:
        """What was sampled for the sequences in these slots, for the next step to go on with."""
        self._chosen.index_copy_(0, slots, token_ids)

    def _count(self, number: int) -> tuple[Tensor, Tensor]:
        """0, 1, ...: int64 [number] and int32 [number + 1]."""
        if self._counted[0].shape[0] != number:
            counted = torch.arange(number + 1, device=self._device)
            self._counted = counted[:-1], counted.int()
        return self._counted

    def _make_room(self) -> None:
        missing = self._slots.num_slots - self._chosen.shape[0]
        rows = self._tables.new_zeros(missing, self._max_num_blocks)
        self._tables = torch.cat((self._tables, rows))
        self._cells = self._tables.view(-1)
        self._chosen = torch.cat((self._chosen, self._chosen.new_zeros(missing)))


def _tokens(plan: StepPlan, starts: SequenceOf[int]) -> tuple[list[int], list[int]]:
    """The tokens of a step that the host knows, packed; and unless all sequences decode, of all its
    tokens those whose successor is wanted: a sequence's last, and those of its draft."""
    n, num_unread = plan.num_decodes, plan.num_unread
    token_ids = [sequence.tokens[-1] for sequence in plan.sequences[num_unread:n]]
    logits_rows = [] if n == len(plan.sequences) else [*range(n)]
    for i in range(n, len(plan.sequences)):
        sequence, end = plan.sequences[i], starts[i] + plan.query_lens[i]
        token_ids += sequence.tokens[starts[i] : end]
        num_ahead = end - len(sequence.tokens)
        if num_ahead >= 0:
            token_ids += sequence.draft[:num_ahead]
            num_packed = num_unread + len(token_ids)
            logits_rows += range(num_packed - 1 - num_ahead, num_packed)
    return token_ids, logits_rows
