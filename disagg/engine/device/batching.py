"""Turns a step plan into tensors, most of which are already on the device.

The block tables of running sequences and their last sampled tokens stay on the device, in one row
per slot. A step uploads the changes of the block tables, and the position and KV slot of each of
its tokens, in one copy. The host computes positions and slots, since there a sum costs less than a
kernel launch on the device. Must not know what a model does with the tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import MAX_AHEAD
from disagg.engine.sched.step import StepPlan
from disagg.models.batch import Batch

if TYPE_CHECKING:  # imports Triton, which a machine without a GPU may lack
    from disagg.kernels.gpu.step_arrays import StepArrays

Ints: TypeAlias = SequenceOf[int] | NDArray[np.int64]


# With more tokens than that of prompts the device needs longer to compute than the host to launch.
# Not yet measured.
MAX_PROMPT_TOKENS = 256
NUM_FIRST = 5  # parts that have the same length in the next step if the same sequences decode


class StepBuffer:
    """Integers of a step, written on the host and read on the device.

    A runner has two buffers, one for the running step and one for the step after it. So on a GPU
    the host never overwrites a buffer before it is copied: the host has read the results of all
    steps but the last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserve(0)

    def _reserve(self, num: int) -> None:
        is_cpu = self._device.type == "cpu"
        self._on_host = torch.empty(2 * num, dtype=torch.int64, pin_memory=not is_cpu)
        self._on_device = self._on_host if is_cpu else self._on_host.to(self._device)
        self._array = self._on_host.numpy()
        self._first_lengths: list[int] = []
        self._first: tuple[Tensor, ...] = ()

    def write(self, parts: SequenceOf[Ints], num: int) -> None:
        """Write the parts one after the other; together they have `num` numbers."""
        if num > self._array.shape[0]:
            self._reserve(num)
        # "unsafe" since NumPy takes an empty list for an array of floats.
        np.concatenate(parts, out=self._array[:num], casting="unsafe")

    def written(self, num: int) -> bytes:
        """A copy of the first `num` numbers."""
        return self._array[:num].tobytes()

    def write_bytes(self, numbers: bytes) -> None:
        """Write the result of another buffer's `written`."""
        found = np.frombuffer(numbers, np.int64)
        self.write((found,), found.shape[0])

    def send(self, num: int) -> Tensor:
        """Copy the written numbers to the device. The first `num` of the result are theirs."""
        if self._on_device is not self._on_host:
            self._on_device[:num].copy_(self._on_host[:num], non_blocking=True)
        return self._on_device

    def send_parts(self, lengths: list[int]) -> list[Tensor]:
        """Copy the written numbers to the device. Returns them as parts of these lengths."""
        self.send(sum(lengths))
        # The first parts keep their lengths for many steps, so their views are kept too.
        if lengths[:NUM_FIRST] != self._first_lengths:
            self._first_lengths = lengths[:NUM_FIRST]
            first = self._on_device[: sum(self._first_lengths)]
            self._first = first.split_with_sizes(self._first_lengths)
        parts, end = [*self._first], sum(self._first_lengths)
        for length in lengths[NUM_FIRST:]:
            parts.append(self._on_device[end : end + length])
            end += length
        return parts


@dataclass(slots=True)
class StepInputs:
    """The numbers of a step that are uploaded to the device.

    numbers, lengths: int64 numbers, in parts of these lengths: the slot of each sequence; the
        position and KV slot of each token; the context length of each sequence; the token ids that
        are not on the device yet; cells of the block tables, and the blocks to write there. Unless
        all sequences decode, also the first token and the number of tokens of each sequence, the
        rows whose logits are needed, and the slots of these rows.
    num_unread: the tokens of the first `num_unread` sequences are known on the device only.
    ends: the context length of each sequence after the step.
    longest: the largest of `ends`.
    has_adapters: whether a sequence has a LoRA adapter.
    """

    numbers: StepBuffer
    lengths: list[int]
    num_unread: int
    num_decodes: int
    query_lens: tuple[int, ...]
    ends: SequenceOf[int]
    longest: int
    has_adapters: bool = False

    @property
    def are_decodes(self) -> bool:
        return self.num_decodes == len(self.ends)


class _Decodes:
    """Decoding sequences, kept from step to step while they are the same.

    places: int64 [4, num_seqs]: for each sequence its slot, the position and the KV slot of its
        token, and the end of its context.
    """

    def __init__(
        self, sequences: SequenceOf[Sequence], starts: SequenceOf[int], kv_slots: list[int]
    ) -> None:
        self.sequences = sequences
        self.slots = [sequence.slot for sequence in sequences]
        self.has_adapters = _have_adapters(sequences)
        self.ends: SequenceOf[int] = [start + 1 for start in starts]
        self.longest = max(self.ends, default=0)
        self.places = np.array((self.slots, starts, kv_slots, self.ends), np.int64)
        self._begin: deque[list[int]] | None = None  # item i: rows that begin a block in i steps

    def advance(self, block_size: int) -> list[int]:
        """Advance each sequence by a token. Returns the rows whose token begins a block."""
        if self._begin is None:
            self._begin = deque([] for _ in range(block_size))
            for row, end in enumerate(self.ends):
                self._begin[-end % block_size].append(row)
        further = self.places[1:]
        further += 1
        self.ends = memoryview(further[2].copy())  # a list would take longer, and is rarely needed
        self.longest += 1
        self._begin.rotate(-1)
        return self._begin[-1]


class Batching:
    """Makes the batches of one runner's plans.

    Args:
        slots: the slots of the runner.
        max_num_blocks: most blocks of one sequence.
        has_adapters: whether sequences may have LoRA adapters. The last column of `tables` then has
            the slot of each one's adapter, or -1.
        use_kernel: whether the kernel of `step_arrays` makes the batches of small steps; None: on a
            GPU.

    Attributes:
        arrays: the tensors to which that kernel writes; None without it.
        tables: int32 [num_slots, max_num_blocks], the block tables by slot; with adapters they have
            a column more.
    """

    def __init__(
        self,
        slots: Slots,
        block_size: int,
        max_num_blocks: int,
        device: torch.device,
        *,
        has_adapters: bool = False,
        use_kernel: bool | None = None,
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._max_num_blocks = max_num_blocks
        self._num_columns = max_num_blocks + has_adapters
        self._has_adapters = has_adapters
        self._device = device
        self.tables = torch.zeros(0, self._num_columns, dtype=torch.int32, device=device)
        self._cells, self._columns = self.tables.view(-1), self.tables[:, :0]
        self._chosen = torch.zeros(0, dtype=torch.int64, device=device)
        self._counted = self._chosen, self._chosen.int()
        self._use_kernel = device.type == "cuda" if use_kernel is None else use_kernel
        self.arrays: StepArrays | None = None
        self._make_room()
        self._decodes = _Decodes((), (), [])  # the decoding sequences of the step before
        self._numbers, self._numbers_before = StepBuffer(device), StepBuffer(device)

    # On the host.

    def inputs(self, plan: StepPlan, entered: SequenceOf[Sequence]) -> StepInputs:
        """The numbers to upload for a plan that has work.

        Args:
            entered: sequences of the plan that have just got their slots.
        """
        for sequence in entered:
            sequence.num_listed = 0
        if plan.num_decodes == len(plan.sequences):
            changes = self._decode(plan, are_new=bool(entered))
            sequences = plan.sequences[plan.num_unread :]
            token_ids = [sequence.tokens[-1] for sequence in sequences]
            ends, longest = self._decodes.ends, self._decodes.longest
            has_adapters = self._decodes.has_adapters
            parts: tuple[Ints, ...] = (*self._decodes.places, token_ids, *changes)
        else:
            self._decodes = _Decodes((), (), [])
            starts, slots = plan.first_positions(), [each.slot for each in plan.sequences]
            ends = [*map(add, starts, plan.query_lens)]
            longest = max(ends)
            has_adapters = _have_adapters(plan.sequences)
            token_ids, logits_rows = _tokens(plan, starts)
            spans = [*map(range, starts, ends)]
            kv_slots = chain.from_iterable(map(self._kv_slots, plan.sequences, spans))
            positions = [*chain.from_iterable(spans)]
            begins = [0, *accumulate(plan.query_lens)]
            wanted = [slots[bisect_right(begins, row) - 1] for row in logits_rows]
            changes = self._changes(plan.sequences)
            places = slots, positions, [*kv_slots], ends
            parts = (*places, token_ids, *changes, begins, logits_rows, wanted)
        self._numbers, self._numbers_before = self._numbers_before, self._numbers
        lengths = [*map(len, parts)]
        self._numbers.write(parts, sum(lengths))
        return StepInputs(
            self._numbers,
            lengths,
            plan.num_unread,
            plan.num_decodes,
            tuple(plan.query_lens),
            ends,
            longest,
            has_adapters,
        )

    def _decode(self, plan: StepPlan, *, are_new: bool) -> tuple[list[int], list[int]]:
        """Update `_decodes` for a step. Returns the changes of the block tables.

        If all sequences are one token further than in the step before, a table can have changed
        only where a block begins, because a sequence that lost its blocks would be recomputed.
        """
        decodes, sequences = self._decodes, plan.sequences
        if not (plan.continues and sequences is decodes.sequences):
            slots, starts = [each.slot for each in sequences], plan.first_positions()
            if are_new or slots != decodes.slots or starts != [*decodes.ends]:
                at = map(self._kv_slots, sequences, ((start,) for start in starts))
                self._decodes = _Decodes(sequences, starts, [*chain.from_iterable(at)])
                return self._changes(sequences)
            decodes.sequences = sequences
        begun = decodes.advance(self._block_size)
        for row in begun:
            block = (decodes.ends[row] - 1) // self._block_size
            decodes.places[2, row] = sequences[row].block_ids[block] * self._block_size
        return self._changes([sequences[row] for row in begun])

    def _changes(self, sequences: SequenceOf[Sequence]) -> tuple[list[int], list[int]]:
        """Cells of the block tables that differ from these sequences' blocks, and those blocks."""
        cells: list[int] = []
        block_ids: list[int] = []
        changed = [each for each in sequences if each.num_listed != len(each.block_ids)]
        for sequence in changed:
            num_listed, num_blocks = sequence.num_listed, len(sequence.block_ids)
            if num_blocks > self._max_num_blocks:
                raise ValueError(
                    f"{sequence} does not fit into the {self._max_num_blocks} columns of the block"
                    " tables"
                )
            first = sequence.slot * self._num_columns
            if self._has_adapters and not num_listed:
                cells.append(first + self._max_num_blocks)
                block_ids.append(sequence.adapter_slot)
            cells.extend(range(first + num_listed, first + num_blocks))
            block_ids += sequence.block_ids[num_listed:]
            sequence.num_listed = num_blocks
        return cells, block_ids

    def _kv_slots(self, sequence: Sequence, positions: Iterable[int]) -> list[int]:
        """The KV slots of some positions of a sequence."""
        block_ids, block_size = sequence.block_ids, self._block_size
        return [block_ids[p // block_size] * block_size + p % block_size for p in positions]

    # On the device, in the order of steps.

    def batch(self, step: StepInputs) -> tuple[Batch, Tensor]:
        """The batch, and int64 [num_logits]: the slot of each row of logits.

        See `models.batch.Batch` for shapes and order.
        """
        if self._slots.num_slots > self._chosen.shape[0]:
            self._make_room()
        num_seqs, num_tokens, arrays = len(step.ends), step.lengths[1], self.arrays
        if arrays is not None and num_tokens <= arrays.max_num_tokens:
            return self._in_arrays(step, arrays)
        parts = step.numbers.send_parts(step.lengths)
        slots, positions, kv_slots, ends, token_ids, cells, block_ids = parts[:7]
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
        block_tables, table_rows, adapters = self.tables, None, None
        if step.has_adapters:
            adapters = self.tables[:, -1]
        if arrays is not None:
            table_rows = slots  # kernels find the rows themselves
        else:
            num_columns = -(-step.longest // self._block_size)
            if num_columns != self._columns.shape[1]:
                self._columns = self.tables[:, :num_columns]
            block_tables = self._columns.index_select(0, slots)
            adapters = None if adapters is None else adapters.index_select(0, slots)
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            slots=kv_slots,
            query_start=query_start,
            context_lens=ends.int(),
            block_tables=block_tables,
            table_rows=table_rows,
            logits_rows=logits_rows,
            num_decodes=step.num_decodes,
            max_query_len=max_query_len,
            query_lens=step.query_lens,
            context_lens_host=tuple(step.ends),
            adapters=adapters,
        )
        return batch, slots_of_logits

    def _in_arrays(self, step: StepInputs, arrays: StepArrays) -> tuple[Batch, Tensor]:
        """As `batch`: one kernel launch writes it to the arrays."""
        num_seqs, num_tokens = len(step.ends), step.lengths[1]
        num_logits = num_seqs if step.are_decodes else step.lengths[8]
        num = sum(step.lengths)
        numbers = step.numbers.send(num)
        arrays.fill(
            numbers,
            self.tables,
            self._chosen,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_unread=step.num_unread,
            num_changes=step.lengths[5],
            num_logits=num_logits,
            are_decodes=step.are_decodes,
        )
        batch = Batch(
            token_ids=arrays.token_ids[:num_tokens],
            positions=arrays.positions[:num_tokens],
            slots=arrays.slots[:num_tokens],
            query_start=arrays.query_start[: num_seqs + 1],
            context_lens=arrays.context_lens[:num_seqs],
            block_tables=self.tables,
            table_rows=arrays.table_rows[:num_seqs],
            logits_rows=arrays.logits_rows[:num_logits],
            num_decodes=step.num_decodes,
            max_query_len=1 if step.are_decodes else max(step.query_lens),
            query_lens=step.query_lens,
            context_lens_host=step.ends,
            adapters=self.tables[:, -1] if step.has_adapters else None,
        )
        return batch, numbers[:num_seqs] if step.are_decodes else numbers[num - num_logits : num]

    def remember(self, slots: Tensor, token_ids: Tensor) -> None:
        """Keep the tokens sampled for the sequences in these slots, as input of the next step."""
        self._chosen.index_copy_(0, slots, token_ids)

    def _count(self, number: int) -> tuple[Tensor, Tensor]:
        """The numbers 0, 1, ... as int64 [number] and int32 [number + 1]."""
        if self._counted[0].shape[0] != number:
            counted = torch.arange(number + 1, device=self._device)
            self._counted = counted[:-1], counted.int()
        return self._counted

    def _make_room(self) -> None:
        missing = self._slots.num_slots - self._chosen.shape[0]
        rows = self.tables.new_zeros(missing, self._num_columns)
        self.tables = torch.cat((self.tables, rows))
        self._cells, self._columns = self.tables.view(-1), self.tables[:, :0]
        self._chosen = torch.cat((self._chosen, self._chosen.new_zeros(missing)))
        if self._use_kernel:
            from disagg.kernels.gpu.step_arrays import StepArrays

            num_slots = self._slots.num_slots
            self.arrays = StepArrays.empty(num_slots, max_graph_tokens(num_slots), self._device)


def _have_adapters(sequences: SequenceOf[Sequence]) -> bool:
    """Whether any of them has a LoRA adapter."""
    return any([each.adapter_slot >= 0 for each in sequences])


def max_graph_tokens(max_num_seqs: int) -> int:
    """The most tokens of a step that is small enough for the arrays, and for a graph."""
    return max(max_num_seqs + MAX_AHEAD, MAX_PROMPT_TOKENS)


def _tokens(plan: StepPlan, starts: SequenceOf[int]) -> tuple[list[int], list[int]]:
    """The packed token ids of a step that the host knows, and the rows whose logits are needed.

    Logits are needed after the last token of a sequence and after each token of its draft.
    """
    n, num_unread = plan.num_decodes, plan.num_unread
    token_ids = [sequence.tokens[-1] for sequence in plan.sequences[num_unread:n]]
    logits_rows = [*range(n)]
    for i in range(n, len(plan.sequences)):
        sequence, end = plan.sequences[i], starts[i] + plan.query_lens[i]
        token_ids += sequence.tokens[starts[i] : end]
        num_ahead = end - len(sequence.tokens)
        if num_ahead >= 0:
            token_ids += sequence.draft[:num_ahead]
            num_packed = num_unread + len(token_ids)
            logits_rows += range(num_packed - 1 - num_ahead, num_packed)
    return token_ids, logits_rows
