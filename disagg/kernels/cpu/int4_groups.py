"""How many neighbouring values in a row of a 4-bit weight share a scale. Knows no torch.

With groups of 128, SmolLM2-135M loses most of its quality: its perplexity is 53 instead of 31.
"""

from __future__ import annotations

GROUP = 32  # csrc/int4.h takes any multiple of 8


def num_groups(num_in: int) -> int:
    """The number of groups in a row of `num_in` values; the last group may be shorter."""
    return -(-num_in // GROUP)
