"""The inputs of the sampling kernels: tables of all running sequences, and a step's rows.

A sequence's values are in the row of its slot, and stay there while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

GREEDY_BELOW = 1e-5  # temperatures that only an argmax survives

# The noise of a draw: a group of neighbouring token ids is drawn first, then one of them.
GROUP_SIZE = 256
FIRST_GROUP_COUNTER = 1 << 32  # the noise of groups is not that of tokens
GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea and Flood, 2014): increment ...
MIX_1 = 0xBF58476D1CE4E5B9  # ... and multipliers of the finalizer
MIX_2 = 0x94D049BB133111EB

# Columns of `SamplingTables.numbers`; from FIRST_FLOAT on these are the bits of float64.
SEED, TOP_K, MIN_TOKENS, FIRST_FLOAT = 0, 1, 2, 3
TEMPERATURE, TOP_P, REACH, REPETITION, PRESENCE, FREQUENCY = range(FIRST_FLOAT, 9)
NUM_COLUMNS = 9


class Numbers(NamedTuple):
    """The sampling parameters of a sequence, as the kernels read them.

    What is called as in `SamplingParams` and not listed here is the same there.

    seed: mixed once, as a signed 64-bit integer.
    top_k: a number beyond the vocabulary where it is off.
    min_tokens: of prompt and output, before the sequence may end; 0 where it always may.
    temperature: 0 where the most likely token is taken.
    top_p: infinite where it is off.
    reach: how far below the largest scaled logit a candidate may be, as min-p says.
    """

    seed: int
    top_k: int
    min_tokens: int
    temperature: float
    top_p: float
    reach: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


@dataclass(slots=True)
class SamplingTables:
    """The sampling parameters and token counts of running sequences, on the device.

    numbers: int64 [num_slots, NUM_COLUMNS].
    stop_ids: int32 [num_slots, n], padded with -1; of those with `min_tokens`.
    seen_ids: int32 [num_slots, n]: different tokens of prompt and output, in any order; only of
        those with penalties, as the next two.
    num_seen: int32 [num_slots].
    counts: int32 [num_slots, vocab_size]: 0 for tokens that were not seen, else one more than the
        times that the token is in the output.
    """

    numbers: Tensor
    stop_ids: Tensor
    seen_ids: Tensor
    num_seen: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """How each row of a step's logits is sampled.

    slots: int64 [num_rows].
    drawn: int64, the rows that are not greedy.
    narrowed: int64, places in `drawn` of the rows with top-k or top-p.
    adjusted: int64, the rows with penalties or `min_tokens`.
    remembered: int64, those of them with penalties.
    has_min_p: some row has it.
    largest_top_k: of the narrowed; beyond the vocabulary where one has none.
    """

    slots: Tensor
    drawn: Tensor
    narrowed: Tensor
    adjusted: Tensor
    remembered: Tensor
    has_min_p: bool
    largest_top_k: int


class SamplingOps(Protocol):
    """The sampling operations of a device. No call waits for the device."""

    def adjust_(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> None:
        """Apply penalties, and before `min_tokens` rule out the end, in place.

        Repetition (Keskar et al., 2019) is over prompt and output; presence and frequency, as
        OpenAI defines them, over the output.

        Args:
            logits: float32 [num_rows, vocab_size].
            positions: int64 [num_rows], of the tokens that are to be chosen.
        """
        ...

    def choose(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> Tensor:
        """The next token of each row, int64 [num_rows]; consumes the logits. Args: `adjust_`."""
        ...

    def remember(
        self,
        tables: SamplingTables,
        slots: Tensor,
        token_ids: Tensor,
        rows: Tensor,
    ) -> None:
        """Count one more token of each slot's output. No slot twice.

        Args:
            slots, token_ids: int64 [n].
            rows: int64, those of the n that count.
        """
        ...
