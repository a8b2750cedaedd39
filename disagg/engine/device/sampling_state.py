"""Sampling parameters and token counts of running sequences, kept on the device by slot.

Parameters are uploaded once, when a sequence is first sampled. The token counts for penalties are
updated on the device after each step, so that the next step can be launched before the host has
read the token. The tokens of a sequence that is new in its slot are counted first, so the counts
always equal those of `tokens`, also for a rerouted or recomputed sequence. Applies no parameter
itself: `engine/device/sampler.py` does, with the operations of `kernels/torch/sampling.py`,
`kernels/gpu/sampling.py` (GPUs) or `kernels/cpu/sampling.py` (C++).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.engine.device.logit_edits import LogitEdits
from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued
from disagg.kernels.sampling_rows import (
    FIRST_FLOAT,
    GREEDY_BELOW,
    NUM_COLUMNS,
    Numbers,
    SampledRows,
    SamplingOps,
    SamplingTables,
)
from disagg.kernels.torch.sampling import mix, signed
from disagg.kernels.uploads import copied, upload
from disagg.messages import SamplingParams

_OFF = 1 << 31  # a top-k that is larger than every vocabulary
_UNKNOWN = -1


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def is_adjusted(params: SamplingParams) -> bool:
    return params.has_penalties or params.min_tokens > 0


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The rows of a step's logits and their sequences. Reused while the sequences are the same.

    slots: the same as `rows.slots`, on the host.
    penalised: rows with penalties, so that their tokens are counted.
    scored: rows that may need log-probabilities.
    edits: logit bias, allowed tokens and bad words; None: no row has any.
    is_adjusted: whether some rows are adjusted from the tables.
    """

    slots: list[int]
    rows: SampledRows
    penalised: list[int]
    scored: list[int]
    edits: LogitEdits | None
    is_adjusted: bool


class SamplingState:
    """The sampling tables of the sequences in `slots`, and how many tokens each table counts."""

    def __init__(
        self,
        ops: SamplingOps,
        slots: Slots,
        vocab_size: int,
        device: torch.device,
        max_model_len: int | None = None,
    ) -> None:
        self._ops = ops
        self._slots = slots
        self._vocab_size = vocab_size
        # Most tokens that a sequence has seen; writes to one more column are not kept.
        self._most_seen = min(max_model_len or vocab_size, vocab_size)
        self._device = device
        self.tables = SamplingTables(
            numbers=self._zeros(0, NUM_COLUMNS, dtype=torch.int64),
            stop_ids=self._zeros(0, 1) - 1,
            seen_ids=self._zeros(0, 1),
            num_seen=self._zeros(0),
            counts=self._zeros(0, vocab_size),
        )
        self._num_known: list[int] = []  # number of counted tokens of each slot, or `_UNKNOWN` ...
        self._num_remembered = 0  # ... plus this number for each row that `_last` penalises
        self._last: RowSampling | None = None
        self._sequences: SequenceOf[Continued] = ()  # the sequences of `_last`

    def enter(self, entered: SequenceOf[int]) -> None:
        """Record that these slots have new owners."""
        if entered:
            self._settle()
            self._last = None
            self._num_known += [_UNKNOWN] * (self._slots.num_slots - len(self._num_known))
        for slot in entered:
            self._num_known[slot] = _UNKNOWN

    def step(self, sequences: SequenceOf[Continued], num_unread: int) -> RowSampling:
        """Bring the tables up to date for a step; returns how its rows are sampled.

        Args:
            sequences: row i belongs to sequences[i], whose tokens all have been computed.
            num_unread: for the first `num_unread` rows only the device knows the last token, and
                has counted it.
        """
        step = self._last
        if step is None or sequences is not self._sequences:
            slots = [sequence.slot for sequence in sequences]
            if step is None or step.slots != slots:
                self._settle()
                self._write_new([each for each in sequences if isinstance(each, Sequence)])
                self._last = step = self._step_of(slots, sequences)
            self._sequences = sequences
        if num_unread < len(sequences) and step.penalised:
            self._settle()
            self._catch_up([sequences[row] for row in step.penalised if row >= num_unread])
        return step

    def remember(self, step: RowSampling, token_ids: Tensor) -> None:
        """Count the chosen tokens, [num_rows], of sequences with penalties."""
        if not step.penalised:
            return
        rows = step.rows
        self._ops.remember(self.tables, rows.slots, token_ids, rows.remembered)
        self._num_remembered += 1

    def _settle(self) -> None:
        """Bring `_num_known` up to date."""
        step, num_remembered = self._last, self._num_remembered
        self._num_remembered = 0
        if step is not None and num_remembered:
            for row in step.penalised:
                self._num_known[step.slots[row]] += num_remembered

    def _step_of(self, slots: list[int], sequences: SequenceOf[Continued]) -> RowSampling:
        params = [sequence.sampling for sequence in sequences]
        drawn = [row for row, each in enumerate(params) if not is_greedy(each)]
        limits = ((params[row].top_k, params[row].top_p) for row in drawn)
        narrowed = [index for index, (k, p) in enumerate(limits) if k > 0 or p < 1.0]
        adjusted = [row for row, each in enumerate(params) if is_adjusted(each)]
        penalised = [row for row in adjusted if params[row].has_penalties]
        parts = (slots, drawn, narrowed, adjusted, penalised)
        packed = upload([*chain.from_iterable(parts)], torch.int64, self._device)
        tensors = torch.split(packed, [*map(len, parts)])
        return RowSampling(
            slots=slots,
            rows=SampledRows(
                slots=tensors[0],
                drawn=tensors[1],
                narrowed=tensors[2],
                adjusted=tensors[3],
                remembered=tensors[4],
                has_min_p=any(params[row].min_p > 0 for row in drawn),
            ),
            penalised=penalised,
            scored=[row for row, each in enumerate(params) if each.logprobs is not None],
            edits=LogitEdits.from_params(params, self._vocab_size, self._device),
            is_adjusted=bool(adjusted),
        )

    # Writing tables.

    def _write_new(self, sequences: list[Sequence]) -> None:
        new = [each for each in sequences if self._num_known[each.slot] == _UNKNOWN]
        if not new:
            return
        self._make_room(new)
        numbers = torch.tensor([_numbers(each)[:FIRST_FLOAT] for each in new], dtype=torch.int64)
        floats = torch.tensor([_numbers(each)[FIRST_FLOAT:] for each in new], dtype=torch.float64)
        rows = torch.cat((numbers, floats.view(torch.int64)), dim=1)
        where = upload([each.slot for each in new], torch.int64, self._device)
        self.tables.numbers[where] = copied(rows, self._device)
        stopping = [each for each in new if each.sampling.min_tokens > 0]
        if stopping:
            width = self.tables.stop_ids.shape[1]
            stop_ids = torch.full((len(stopping), width), -1, dtype=torch.int32)
            for row, each in enumerate(stopping):
                named = [i for i in each.stop_ids if 0 <= i < self._vocab_size]
                stop_ids[row, : len(named)] = torch.tensor(named, dtype=torch.int32)
            where = upload([each.slot for each in stopping], torch.int64, self._device)
            self.tables.stop_ids[where] = copied(stop_ids, self._device)
        for each in new:
            self._num_known[each.slot] = 0

    def _catch_up(self, sequences: list[Continued]) -> None:
        """Count the tokens that the device has not counted."""
        known = self._num_known
        behind = [each for each in sequences if known[each.slot] != each.num_tokens]
        if not behind:
            return
        places, counts, num_seen = array("q"), array("q"), array("q")
        for each in behind:
            found = dict.fromkeys(each.tokens, 1)
            for token_id, count in Counter(each.tokens[each.num_prompt_tokens :]).items():
                found[token_id] = 1 + count
            places.extend(found)
            counts.extend(found.values())
            num_seen.append(len(found))
            self._num_known[each.slot] = each.num_tokens
        slots = array("q", [each.slot for each in behind])
        packed = torch.frombuffer(slots + num_seen + places + counts, dtype=torch.int64)
        sizes = [len(slots), len(slots), len(places), len(places)]
        parts = torch.split(copied(packed, self._device), sizes)
        rows, ids = parts[0].repeat_interleave(parts[1], output_size=len(places)), parts[2]
        tables = self.tables
        tables.counts[parts[0]] = 0
        tables.counts[rows, ids] = parts[3].int()
        tables.num_seen[parts[0]] = parts[1].int()
        ends = parts[1].cumsum(0)
        begins = (ends - parts[1]).repeat_interleave(parts[1], output_size=len(places))
        tables.seen_ids[rows, torch.arange(len(places), device=self._device) - begins] = ids.int()

    def _make_room(self, new: list[Sequence]) -> None:
        tables, num_slots = self.tables, self._slots.num_slots
        tables.numbers = _grown(tables.numbers, num_slots, NUM_COLUMNS, 0)
        stopping = (len(each.stop_ids) for each in new if each.sampling.min_tokens > 0)
        tables.stop_ids = _grown(tables.stop_ids, num_slots, max(stopping, default=1), -1)
        if any([each.sampling.has_penalties for each in new]):
            tables.seen_ids = _grown(tables.seen_ids, num_slots, self._most_seen + 1, 0)
            tables.num_seen = _grown(tables.num_seen, num_slots, 0, 0)
            tables.counts = _grown(tables.counts, num_slots, self._vocab_size, 0)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


def _grown(table: Tensor, num_rows: int, num_columns: int, fill: int) -> Tensor:
    """The table, or a copy with at least so many rows, and so many columns if it has any."""
    missing = [max(0, num_rows - table.shape[0])]
    if table.dim() == 2:
        missing.append(max(0, num_columns - table.shape[1]))
    if not any(missing):
        return table
    return functional.pad(table, [each for n in reversed(missing) for each in (0, n)], value=fill)


def _numbers(sequence: Sequence) -> Numbers:
    params = sequence.sampling
    otherwise: dict[str, Any] = {
        "seed": signed(mix(params.seed & ((1 << 64) - 1))),
        "top_k": params.top_k or _OFF,
        "min_tokens": sequence.num_prompt_tokens + params.min_tokens if params.min_tokens else 0,
        "temperature": 0.0 if is_greedy(params) else params.temperature,
        "top_p": params.top_p if params.top_p < 1.0 else math.inf,
        "reach": -math.log(params.min_p) if params.min_p > 0 else math.inf,
    }
    alike = {name: getattr(params, name) for name in Numbers._fields if name not in otherwise}
    return Numbers(**otherwise, **alike)
