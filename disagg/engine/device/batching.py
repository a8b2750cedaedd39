"""A step plan as tensors, most of which are on the device already.

The block tables of running sequences and the tokens that were sampled last stay there, in a row for
each slot. A step uploads what it changes of them and where each sequence goes on, in one copy; the
rest of a `Batch` follows from that on the device. Must not know what a model does with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from operator import add

import torch
from torch import Tensor

from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import StepPlan
from disagg.models.batch import Batch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a device is told of a step, on the host.

    numbers: int64, parts of these lengths: token ids, but for those that are read on the device;
        for each sequence its start, its slot and its query length; rows whose logits are wanted;
        cells of the block tables, and the blocks to write there. Slots are left out if they are
        those of the step before; lengths and rows are if all sequences decode.
    num_unread: tokens that are read on the device, those of the first sequences.
    ends: where each sequence's context ends once the step is done.
    """

    numbers: Tensor
    lengths: list[int]
    num_unread: int
    num_tokens: int
    num_decodes: int
    query_lens: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def are_decodes(self) -> bool:
        return self.num_decodes == len(self.ends)


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
        self._chosen = torch.zeros(0, dtype=torch.int64, device=device)
        self._counted = torch.zeros(0, dtype=torch.int64, device=device)  # 0, 1, 2, ...
        self._sent_slots: list[int] = []  # by the step whose inputs were made last
        self._last_slots = self._chosen  # of the step whose batch was made last

    # On the host.

    def inputs(self, plan: StepPlan, entered: SequenceOf[Sequence]) -> StepInputs:
        """What the device has to be told of a plan that has work.

        Args:
            entered: sequences of the plan that have just been given their slots.
        """
        for sequence in entered:
            sequence.num_listed = 0
        sequences, query_lens = plan.sequences, tuple(plan.query_lens)
        starts = plan.starts or [sequence.num_computed for sequence in sequences]
        token_ids, logits_rows = _tokens(plan, starts)
        cells, block_ids = self._changes(sequences)
        slots = [sequence.slot for sequence in sequences]
        new_slots = [] if slots == self._sent_slots else slots
        self._sent_slots = slots
        new_lens = () if plan.num_decodes == len(slots) else query_lens
        parts = (token_ids, starts, new_slots, new_lens, logits_rows, cells, block_ids)
        numbers = torch.frombuffer(array("q", [*chain.from_iterable(parts)]), dtype=torch.int64)
        if self._device.type != "cpu":
            numbers = numbers.pin_memory()
        return StepInputs(
            numbers,
            [*map(len, parts)],
            plan.num_unread,
            plan.num_new_tokens,
            plan.num_decodes,
            query_lens,
            tuple(map(add, starts, query_lens)),
        )

    def _changes(self, sequences: SequenceOf[Sequence]) -> tuple[list[int], list[int]]:
        """Cells of the tables that are not as these sequences' blocks are, and those blocks."""
        cells: list[int] = []
        block_ids: list[int] = []
        for sequence in sequences:
            num_listed, num_blocks = sequence.num_listed, len(sequence.block_ids)
            if num_listed != num_blocks:
                if num_blocks > self._max_num_blocks:
                    raise ValueError(f"{sequence} does not fit into {self._max_num_blocks} columns")
                first = sequence.slot * self._max_num_blocks
                cells.extend(range(first + num_listed, first + num_blocks))
                block_ids += sequence.block_ids[num_listed:]
                sequence.num_listed = num_blocks
        return cells, block_ids

    # On the device, in the order of steps.

    @torch.inference_mode()
    def batch(self, step: StepInputs) -> tuple[Batch, Tensor]:
        """The batch, whose shapes and order `models.batch.Batch` says, and int64 [num_logits]: the
        slots whose next tokens the logits are for."""
        if self._slots.num_slots > self._chosen.shape[0]:
            self._make_room()
        numbers = step.numbers.to(self._device, non_blocking=True)
        parts = torch.split(numbers, step.lengths)
        known, starts, slots, query_lens, logits_rows, cells, block_ids = parts
        if step.lengths[5]:
            self._tables.view(-1).index_copy_(0, cells, block_ids.int())
        if step.lengths[2]:
            self._last_slots = slots
        slots = self._last_slots
        num_tokens, num_seqs = step.num_tokens, len(step.ends)
        if step.are_decodes:
            rows, positions, logits_rows = slots, starts, self._count(num_seqs)
            query_start, context_lens = self._count(num_seqs + 1).int(), (starts + 1).int()
        else:
            rows = slots.repeat_interleave(query_lens, output_size=num_tokens)
            # Of a sequence's first token the place among all and the position; others follow.
            first = query_lens.cumsum(0) - query_lens
            shifts = (starts - first).repeat_interleave(query_lens, output_size=num_tokens)
            positions = shifts + self._count(num_tokens)
            query_start = torch.cat((first, first[-1:] + query_lens[-1:])).int()
            context_lens = (starts + query_lens).int()
        token_ids = known
        if step.num_unread:
            token_ids = self._chosen.index_select(0, slots[: step.num_unread])
            token_ids = torch.cat((token_ids, known)) if step.lengths[0] else token_ids
        longest = max(step.ends)
        num_columns = -(-longest // self._block_size)
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            slots=self._kv_slots(rows, positions),
            query_start=query_start,
            context_lens=context_lens,
            block_tables=self._tables[:, :num_columns].index_select(0, slots),
            logits_rows=logits_rows,
            num_decodes=step.num_decodes,
            max_query_len=1 if step.are_decodes else max(step.query_lens),
            max_context_len=longest,
            query_lens=step.query_lens,
            context_lens_host=step.ends,
        )
        is_all = logits_rows.shape[0] == num_tokens
        return batch, rows if is_all else rows.index_select(0, logits_rows)

    @torch.inference_mode()
    def remember(self, slots: Tensor, token_ids: Tensor) -> None:
        """What was sampled for the sequences in these slots, for the next step to go on with."""
        self._chosen.index_copy_(0, slots, token_ids)

    def _kv_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where the KV of tokens goes, of sequences with these rows of the tables."""
        columns = positions.div(self._block_size, rounding_mode="floor")
        cells = columns.add(rows, alpha=self._max_num_blocks)
        blocks = self._tables.view(-1).index_select(0, cells)
        # block * block_size + offset, and offset = position - column * block_size
        return positions.add(blocks - columns, alpha=self._block_size)

    def _count(self, number: int) -> Tensor:
        if self._counted.shape[0] < number:
            self._counted = torch.arange(2 * number, device=self._device)
        return self._counted[:number]

    def _make_room(self) -> None:
        missing = self._slots.num_slots - self._chosen.shape[0]
        rows = self._tables.new_zeros(missing, self._max_num_blocks)
        self._tables = torch.cat((self._tables, rows))
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
