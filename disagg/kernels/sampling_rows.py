"""The inputs of the sampling kernels: tables of all running sequences, and a step's rows.

The parameters of a sequence are in the row of its slot, and stay there while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

GREEDY_BELOW = 1e-5  # lower temperatures choose the most likely token

# A draw has two stages: first a group of neighbouring token ids, then one of its tokens.
GROUP_SIZE = 256
FIRST_GROUP_COUNTER = 1 << 32  # so that groups and tokens have different noise
GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea and Flood, 2014): increment ...
MIX_1 = 0xBF58476D1CE4E5B9  # ... and multipliers of the finalizer
MIX_2 = 0x94D049BB133111EB

# Columns of `SamplingTables.numbers`; from FIRST_FLOAT on these are the bits of float64.
SEED, TOP_K, MIN_TOKENS, FIRST_FLOAT = 0, 1, 2, 3
TEMPERATURE, TOP_P, REACH, REPETITION, PRESENCE, FREQUENCY = range(FIRST_FLOAT, 9)
NUM_COLUMNS = 9


class Numbers(NamedTuple):
    """The sampling parameters of a sequence, as the kernels read them.

    Fields that are not listed here are the same as in `SamplingParams`.

    seed: the seed, mixed once, as a signed 64-bit integer.
    top_k: a number above the vocabulary size if it is off.
    min_tokens: tokens of prompt and output before the sequence may end; 0 if it always may.
    temperature: 0 if the most likely token is chosen.
    top_p: infinite if it is off.
    reach: how far below the largest scaled logit a candidate may be, which follows from min-p.
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
    stop_ids: int32 [num_slots, n], padded with -1; only for sequences with `min_tokens`.
    seen_ids: int32 [num_slots, n]: the distinct tokens of prompt and output, in any order; only
        for sequences with penalties, like the next two.
    num_seen: int32 [num_slots]: the number of these tokens.
    counts: int32 [num_slots, vocab_size]: 0 for tokens that were not seen, else 1 plus the number
        of times that the token is in the output.
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
    narrowed: int64, indices in `drawn` of the rows with top-k or top-p.
    adjusted: int64, the rows with penalties or `min_tokens`.
    remembered: int64, the rows with penalties, whose tokens are counted.
    has_min_p: whether some row has min-p.
    """

    slots: Tensor
    drawn: Tensor
    narrowed: Tensor
    adjusted: Tensor
    remembered: Tensor
    has_min_p: bool


class SamplingOps(Protocol):
    """The sampling operations of a device. No call waits for the device."""

    def adjust_(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> None:
        """Apply penalties in place, and rule out stop tokens before `min_tokens`.

        NaN stays NaN, and an infinite logit stays one or becomes NaN, so that `choose` sees it.

        The repetition penalty (Keskar et al., 2019) is for tokens of prompt and output. Presence
        and frequency penalties, as OpenAI defines them, are for tokens of the output.

        Args:
            logits: float32 [num_rows, vocab_size].
            positions: int64 [num_rows], positions of the tokens that will be chosen.
        """
        ...

    def choose(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> Tensor:
        """Choose the next token of each row. Overwrites the logits.

        There is none if a logit, divided by the temperature, is NaN or infinite, or if all are
        -inf. A single -inf only rules out its token.

        Returns:
            int64 [2, num_rows]: the token ids, and whether there is none. The token id is then 0,
            because the step after this one may be launched before the host knows.

        Args: see `adjust_`.
        """
        ...

    def remember(
        self,
        tables: SamplingTables,
        slots: Tensor,
        token_ids: Tensor,
        rows: Tensor,
    ) -> None:
        """Count one more token of each slot's output. No slot may occur twice.

        Args:
            slots, token_ids: int64 [n].
            rows: int64, indices of the pairs that are counted.
        """
        ...
