"""Applies sampling parameters to logits and chooses the tokens.

The order is vLLM's: grammar, `LogitEdits` (bias, allowed tokens, bad words), penalties,
temperature, min-p, top-k, top-p; `Deferral` comes before the temperature. Reported
log-probabilities are those of the model, before any of these. The arithmetic is in `kernels/`:
`gpu/sampling.py` on a GPU, `cpu/sampling.py` (C++) or `torch/sampling.py` on a CPU. `SamplingState`
keeps the parameters on the device.

A token depends on its sequence's tokens and sampling parameters only. The noise of a candidate is a
hash of (seed, position, token id), so the batch, the chunks and the worker do not change it, and a
sequence that moves or is recomputed continues with the same tokens. A draw adds Gumbel noise to
logits and takes the largest, which is a draw from their softmax (Gumbel, 1954): first among groups
of 256 token ids, then in the chosen group. Unlike with a cumulative sum, rounding that differs
between devices hardly ever changes the token.

Only `Chosen.read` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from disagg.engine.device.deferral import Deferral
from disagg.engine.device.sampling_state import RowSampling, SamplingState
from disagg.engine.device.slots import Slots
from disagg.engine.device.token_masks import TokenMasks
from disagg.engine.device.workspace import ROWS_AT_ONCE
from disagg.engine.sched.speculation import Continued
from disagg.engine.sched.step import SampledToken
from disagg.errors import InvalidLogits
from disagg.kernels.dispatch import sampling_ops_for
from disagg.kernels.sampling_rows import SamplingOps
from disagg.kernels.uploads import upload
from disagg.messages import TokenLogprobs

_NONE = (
    "The model gave logits from which no token can be chosen: some are NaN or infinite, or all that"
    " the request allows are -inf. The weights may be damaged, or a number may have overflowed."
)


class Sampler:
    """Chooses the next tokens of sequences that have a slot.

    Args:
        ops: the device's operations; by default those that `sampling_ops_for` chooses.
        max_model_len: longest sequence; None: not known.
        deferral: whether tokens of drafts stand that would not be chosen; None: none does.
    """

    def __init__(
        self,
        slots: Slots,
        vocab_size: int,
        device: torch.device,
        ops: SamplingOps | None = None,
        max_model_len: int | None = None,
        deferral: Deferral | None = None,
    ) -> None:
        self._ops = ops or sampling_ops_for(device)
        self._deferral = deferral
        self._state = SamplingState(self._ops, slots, vocab_size, device, max_model_len)

    def enter(self, entered: SequenceOf[int]) -> None:
        """Record that these slots have just been given to other sequences."""
        self._state.enter(entered)

    def sample(
        self,
        logits: Tensor,
        sequences: SequenceOf[Continued],
        positions: Tensor,
        masks: TokenMasks | None = None,
        num_unread: int = 0,
    ) -> Chosen:
        """Choose the next token of each sequence.

        Args:
            logits: float32 [num_sequences, vocab_size]; consumed.
            sequences: row i belongs to sequences[i], whose tokens all have been computed.
            positions: int64 [num_sequences], the position of the last token of each sequence.
            masks: the tokens that grammars allow.
            num_unread: the first `num_unread` sequences have one token more than the host knows,
                because the results of the step before are not read yet.
        """
        if not sequences:
            return Chosen(positions.new_empty(2, 0), None)
        state, ops = self._state, self._ops
        step = state.step(sequences, num_unread)
        scores = _Scores.gather(logits, step, sequences, num_unread)
        if masks is not None:
            masks.apply_(logits)
        if step.edits is not None:
            step.edits.apply_(logits, sequences)
        positions = positions + 1
        if step.is_adjusted:
            ops.adjust_(logits, state.tables, step.rows, positions)
        if self._deferral is not None:
            self._deferral.apply_(logits, sequences)
        chosen = Chosen(ops.choose(logits, state.tables, step.rows, positions), scores)
        state.remember(step, chosen.token_ids)
        return chosen


class _Scores:
    """Log-probabilities of some rows, computed before the tokens are chosen.

    wanted: pairs of a row and the number of most likely tokens to report for it.
    """

    def __init__(self, logits: Tensor, wanted: list[tuple[int, int]]) -> None:
        self.wanted = wanted
        self.rows = upload([row for row, _ in wanted], torch.int64, logits.device)
        self.log_probs = logits.new_empty(len(wanted), logits.shape[1])
        parts = torch.split(self.rows, ROWS_AT_ONCE), torch.split(self.log_probs, ROWS_AT_ONCE)
        for rows, log_probs in zip(*parts, strict=True):
            torch.log_softmax(logits[rows], dim=-1, out=log_probs)

    @classmethod
    def gather(
        cls,
        logits: Tensor,
        step: RowSampling,
        sequences: SequenceOf[Continued],
        num_unread: int,
    ) -> _Scores | None:
        wanted = []
        for row in step.scored:
            params, num_tokens = sequences[row].sampling, sequences[row].num_output_tokens
            num_tokens += row < num_unread
            if params.logprobs_until is None or num_tokens < params.logprobs_until:
                wanted.append((row, params.logprobs or 0))
        return cls(logits, wanted) if wanted else None

    def tensors(self, token_ids: Tensor) -> list[Tensor]:
        """Log-probabilities of the chosen tokens [n]; if requested, the largest [n, k] and their
        token ids."""
        chosen = self.log_probs.gather(1, token_ids[self.rows].unsqueeze(1)).flatten()
        num_top = max(num_top for _, num_top in self.wanted)
        if not num_top:
            return [chosen]
        return [chosen, *self.log_probs.topk(min(num_top, self.log_probs.shape[-1]), dim=-1)]


class Chosen:
    """A step's chosen tokens, on the device and while they are copied to the host.

    Args:
        chosen: the result of `SamplingOps.choose`.

    Attributes:
        token_ids: int64 [num_sequences], valid also where there is no token.
    """

    def __init__(self, chosen: Tensor, scores: _Scores | None) -> None:
        self.token_ids = chosen[0]
        self._wanted = scores.wanted if scores else []
        self._read = _reader([chosen, *(scores.tensors(self.token_ids) if scores else ())])

    def read(self) -> list[SampledToken]:
        """As `sampled`, but every item is a `SampledToken`. Raises the first error."""
        tokens: list[SampledToken] = []
        for each in self.sampled():
            if isinstance(each, InvalidLogits):
                raise each
            tokens.append(SampledToken(each) if isinstance(each, int) else each)
        return tokens

    def sampled(self) -> list[int | SampledToken | InvalidLogits]:
        """The tokens. Waits for them, but not for work that was launched after them."""
        (token_ids, has_none), *scores = self._read()
        sampled: list[int | SampledToken | InvalidLogits] = token_ids
        if scores:
            tops: list[Any] = [()] * len(self._wanted)
            if len(scores) > 1:
                tops = [tuple(zip(*pair, strict=True)) for pair in zip(*scores[:0:-1], strict=True)]
            for (row, num_top), chosen, top in zip(self._wanted, scores[0], tops, strict=True):
                sampled[row] = SampledToken(token_ids[row], TokenLogprobs(chosen, top[:num_top]))
        if any(has_none):
            for row in compress(range(len(sampled)), has_none):
                sampled[row] = InvalidLogits(_NONE)
        return sampled


def _reader(tensors: list[Tensor]) -> Callable[[], list[list[Any]]]:
    if tensors[0].device.type == "cpu":
        return lambda: [tensor.tolist() for tensor in tensors]
    on_host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    for host, device in zip(on_host, tensors, strict=True):
        host.copy_(device, non_blocking=True)
    # Without spinning, which would hold a lock of the driver that transfers need.
    is_there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    is_there.record()

    def read() -> list[list[Any]]:
        is_there.synchronize()
        return [tensor.tolist() for tensor in on_host]

    return read
