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
from operator import add, sub
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import MAX_AHEAD
from disagg.engine.sched.step import StepPlan
from disagg.models.batch import Batch
from disagg.rank_messages import StepShape

if TYPE_CHECKING:  # imports Triton, which a machine without a GPU may lack
    from disagg.kernels.gpu.step_arrays import StepArrays

Ints: TypeAlias = SequenceOf[int] | NDArray[np.int64]


# With more tokens than that of prompts the device needs longer to compute than the host to launch.
# Not yet measured.
MAX_PROMPT_TOKENS = 256


class StepBuffer:
    """Integers of a step, written on the host and read on the device.

    A rank has two buffers, one for the running step and one for the step after it. So on a GPU the
    host never overwrites a buffer before it is copied: the first rank has read the results of all
    steps but the last, and these depend on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserve(0)

    def _reserve(self, num: int) -> None:
        is_cpu = self._device.type == "cpu"
        self._on_host = torch.empty(2 * num, dtype=torch.int64, pin_memory=not is_cpu)
        self._on_device = self._on_host if is_cpu else self._on_host.to(self._device)
        self._array = self._on_host.numpy()

    def write(self, parts: SequenceOf[Ints], num: int) -> None:
        """Write the parts one after the other; together they have `num` numbers."""
        if num > self._array.shape[0]:
            self._reserve(num)
        # "unsafe" since NumPy takes an empty list for an array of floats.
        np.concatenate(parts, out=self._array[:num], casting="unsafe")

    def written(self, first: int, end: int) -> NDArray[np.int64]:
        """The written numbers from `first` to `end`; not a copy."""
        return self._array[first:end]

    def send(self, num: int) -> Tensor:
        """Copy the written numbers to the device. The first `num` of the result are theirs."""
        if self._on_device is not self._on_host:
            self._on_device[:num].copy_(self._on_host[:num], non_blocking=True)
        return self._on_device


@dataclass(slots=True)
class StepInputs:
    """The numbers of a step that are uploaded to the device.

    numbers: int64, in the parts that `StepShape` describes.
    """

    numbers: StepBuffer
    shape: StepShape

    def to_bytes(self) -> bytes:
        """The numbers, for `Batching.received` of another rank."""
        return self.numbers.written(0, sum(self.shape.lengths)).tobytes()


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
        self.are_shifted = _are_shifted(sequences)
        ends = [start + 1 - each.num_evicted for start, each in zip(starts, sequences, strict=True)]
        self.places = np.array((self.slots, starts, kv_slots, ends), np.int64)
        self._begin: deque[list[int]] | None = None  # item i: rows that begin a block in i steps

    @property
    def next_positions(self) -> list[int]:
        return (self.places[1] + 1).tolist()  # type: ignore[no-any-return]

    def advance(self, block_size: int) -> list[int]:
        """Advance each sequence by a token. Returns the rows whose token begins a block."""
        if self._begin is None:
            self._begin = deque([] for _ in range(block_size))
            for row, position in enumerate(self.next_positions):
                self._begin[-position % block_size].append(row)
        self.places[1:] += 1
        self._begin.rotate(-1)
        return self._begin[-1]


class Batching:
    """Makes the batches of one runner's plans.

    Args:
        slots: the slots of the runner.
        max_num_blocks: most rows of one sequence's block table.
        num_groups: blocks in such a row (`disagg.kv_groups`).
        has_adapters: whether sequences may have LoRA adapters. The last column of `tables` then has
            the slot of each one's adapter, or -1.
        use_kernel: whether the kernel of `step_arrays` makes the batches of small steps; None: on a
            GPU.

    Attributes:
        arrays: the tensors to which that kernel writes small steps, at addresses that do not change
            while there are as many slots; None without the kernel.
        tables: int32 [num_slots, num_groups * max_num_blocks], the block tables of all groups by
            slot; with adapters they have a column more.
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
        num_groups: int = 1,
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._num_groups = num_groups
        self._max_num_blocks = max_num_blocks
        self._num_columns = num_groups * max_num_blocks + has_adapters
        self._has_adapters = has_adapters
        self._device = device
        self.tables = torch.zeros(0, self._num_columns, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(0, dtype=torch.int64, device=device)
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
            has_adapters, are_shifted = self._decodes.has_adapters, self._decodes.are_shifted
            parts: tuple[Ints, ...] = (*self._decodes.places, token_ids, *changes)
        else:
            self._decodes = _Decodes((), (), [])
            starts, slots = plan.first_positions(), [each.slot for each in plan.sequences]
            ends = [*map(add, starts, plan.query_lens)]
            has_adapters, are_shifted = _have_adapters(plan.sequences), _are_shifted(plan.sequences)
            token_ids, logits_rows = _tokens(plan, starts)
            spans = [*map(range, starts, ends)]
            kv_slots = chain.from_iterable(map(self.kv_slots, plan.sequences, spans))
            positions = [*chain.from_iterable(spans)]
            begins = [0, *accumulate(plan.query_lens)]
            wanted = [slots[bisect_right(begins, row) - 1] for row in logits_rows]
            changes = self._changes(plan.sequences)
            if are_shifted:
                evicted = [each.num_evicted for each in plan.sequences]
                ends = [*map(sub, ends, evicted)]
            places = slots, positions, [*kv_slots], ends
            parts = (*places, token_ids, *changes, begins, logits_rows, wanted)
        lengths = [*map(len, parts)]
        query_lens = tuple(plan.query_lens)
        numbers = plan.num_unread, plan.num_decodes, query_lens
        shape = StepShape(lengths, *numbers, has_adapters, are_shifted)
        return self._written(parts, shape)

    def received(self, numbers: bytes, shape: StepShape) -> StepInputs:
        """The inputs that the first rank has made, and sent as `StepInputs.to_bytes`."""
        return self._written((np.frombuffer(numbers, np.int64),), shape)

    def _written(self, parts: SequenceOf[Ints], shape: StepShape) -> StepInputs:
        self._numbers, self._numbers_before = self._numbers_before, self._numbers
        self._numbers.write(parts, sum(shape.lengths))
        return StepInputs(self._numbers, shape)

    def _decode(self, plan: StepPlan, *, are_new: bool) -> tuple[list[int], list[int]]:
        """Update `_decodes` for a step. Returns the changes of the block tables.

        If all sequences are one token further than in the step before, a table can have changed
        only where a block begins, because a sequence that lost its blocks would be recomputed.
        """
        decodes, sequences = self._decodes, plan.sequences
        if not (plan.continues and sequences is decodes.sequences):
            slots, starts = [each.slot for each in sequences], plan.first_positions()
            if are_new or slots != decodes.slots or starts != decodes.next_positions:
                at = map(self.kv_slots, sequences, ((start,) for start in starts))
                self._decodes = _Decodes(sequences, starts, [*chain.from_iterable(at)])
                return self._changes(sequences)
            decodes.sequences = sequences
        begun = decodes.advance(self._block_size)
        for row in begun:
            block = (decodes.places[3, row] - 1) // self._block_size
            first = sequences[row].block_ids[block * self._num_groups]
            decodes.places[2, row] = first * self._block_size
        return self._changes([sequences[row] for row in begun])

    def _changes(self, sequences: SequenceOf[Sequence]) -> tuple[list[int], list[int]]:
        """Cells of the block tables that differ from these sequences' blocks, and those blocks."""
        cells: list[int] = []
        block_ids: list[int] = []
        block_size, num_groups = self._block_size, self._num_groups
        changed = [each for each in sequences if each.num_listed != each.num_slots]
        for sequence in changed:
            num_evicted = sequence.num_evicted
            begin = max(0, sequence.num_listed - num_evicted) // block_size
            end = (sequence.num_slots - num_evicted) // block_size
            if end > self._max_num_blocks:
                raise ValueError(
                    f"{sequence} does not fit into the {self._max_num_blocks} columns of the block"
                    " tables"
                )
            first = sequence.slot * self._num_columns
            if self._has_adapters and not begin:
                cells.append(first + self._num_columns - 1)
                block_ids.append(sequence.adapter_slot)
            rows = sequence.block_ids[begin * num_groups : end * num_groups]
            for group in range(num_groups):
                cells.extend(range(first + begin, first + end))
                block_ids += rows[group::num_groups]
                first += self._max_num_blocks
            sequence.num_listed = sequence.num_slots
        return cells, block_ids

    def kv_slots(self, sequence: Sequence, positions: Iterable[int]) -> list[int]:
        """The KV slots of some positions of a sequence, in the first group of layers."""
        block_ids, size, num_groups = sequence.block_ids, self._block_size, self._num_groups
        first = sequence.num_evicted
        return [block_ids[(p - first) // size * num_groups] * size + p % size for p in positions]

    # On the device, in the order of steps.

    def batch(self, step: StepInputs) -> tuple[Batch, Tensor]:
        """The batch, and int64 [num_logits]: the slot of each row of logits.

        See `models.batch.Batch` for shapes and order.
        """
        if self._slots.num_slots > self._chosen.shape[0]:
            self._make_room()
        shape = step.shape
        numbers = step.numbers.send(sum(shape.lengths))
        make = self._from_kernel if self._use_kernel else self._from_torch
        tensors, slots_of_logits = make(numbers, shape)
        first = shape.num_seqs + 2 * shape.num_tokens  # of the ends of contexts
        batch = Batch(
            **tensors,
            num_decodes=shape.num_decodes,
            max_query_len=1 if shape.are_decodes else max(shape.query_lens),
            query_lens=shape.query_lens,
            context_lens_host=step.numbers.written(first, first + shape.num_seqs).tolist(),
            are_shifted=shape.are_shifted,
        )
        return batch, slots_of_logits

    def _from_torch(
        self, numbers: Tensor, shape: StepShape
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """The tensors of a batch, and the slots of its logits. The rows of tables are copied."""
        parts = numbers[: sum(shape.lengths)].split_with_sizes(shape.lengths)
        slots, positions, kv_slots, ends, token_ids, cells, block_ids, *of_chunks = parts
        self.tables.view(-1).index_copy_(0, cells, block_ids.int())
        if shape.num_unread:
            unread = self._chosen.index_select(0, slots[: shape.num_unread])
            token_ids = torch.cat((unread, token_ids))
        if of_chunks:
            begins, logits_rows, slots_of_logits = of_chunks
        else:
            begins = torch.arange(shape.num_seqs + 1)
            logits_rows, slots_of_logits = begins[:-1], slots
        num_columns = -(-int(ends.max()) // self._block_size)
        tensors = {
            "token_ids": token_ids,
            "positions": positions,
            "slots": kv_slots,
            "query_start": begins.int(),
            "context_lens": ends.int(),
            "logits_rows": logits_rows,
            "block_tables": self._leading_columns(num_columns).index_select(0, slots).flatten(1),
            "adapters": self.tables[:, -1].index_select(0, slots) if shape.has_adapters else None,
        }
        return tensors, slots_of_logits

    def _from_kernel(self, numbers: Tensor, shape: StepShape) -> tuple[dict[str, Any], Tensor]:
        """As `_from_torch`, in one launch. Other kernels find the rows of tables themselves."""
        from disagg.kernels.gpu.step_arrays import StepArrays

        arrays = self.arrays
        if arrays is None or shape.num_tokens > arrays.max_num_tokens:
            arrays = StepArrays.empty(shape.num_seqs, shape.num_tokens, self._device)
        arrays.fill(
            numbers,
            self.tables,
            self._chosen,
            num_seqs=shape.num_seqs,
            num_tokens=shape.num_tokens,
            num_unread=shape.num_unread,
            num_changes=shape.num_changes,
            num_logits=shape.num_logits,
            are_decodes=shape.are_decodes,
        )
        tensors = {
            **arrays.first(shape.num_seqs, shape.num_tokens, shape.num_logits),
            "block_tables": self.tables,
            "adapters": self.tables[:, -1] if shape.has_adapters else None,
        }
        num = sum(shape.lengths)
        first, end = (0, shape.num_seqs) if shape.are_decodes else (num - shape.num_logits, num)
        return tensors, numbers[first:end]

    def remember(self, slots: Tensor, token_ids: Tensor) -> None:
        """Keep the tokens sampled for the sequences in these slots, as input of the next step."""
        self._chosen.index_copy_(0, slots, token_ids)

    def _leading_columns(self, number: int) -> Tensor:
        """The first rows of the block tables of each group."""
        if self._num_groups == 1:
            return self.tables[:, :number]
        tables = self.tables[:, : self._num_groups * self._max_num_blocks]
        return tables.view(-1, self._num_groups, self._max_num_blocks)[..., :number]

    def _make_room(self) -> None:
        num_slots = self._slots.num_slots
        missing = num_slots - self._chosen.shape[0]
        rows = self.tables.new_zeros(missing, self._num_columns)
        self.tables = torch.cat((self.tables, rows))
        self._chosen = torch.cat((self._chosen, self._chosen.new_zeros(missing)))
        if self._use_kernel:
            from disagg.kernels.gpu.step_arrays import StepArrays

            self.arrays = StepArrays.empty(num_slots, max_graph_tokens(num_slots), self._device)


def _have_adapters(sequences: SequenceOf[Sequence]) -> bool:
    """Whether any of them has a LoRA adapter."""
    return any([each.adapter_slot >= 0 for each in sequences])


def _are_shifted(sequences: SequenceOf[Sequence]) -> bool:
    """See `Batch.are_shifted`."""
    return any([each.num_evicted > 0 for each in sequences])


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
