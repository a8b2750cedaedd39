"""What the gate of an MLP goes through. Knows no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

# GELU (arXiv 1606.08415) by its approximation with tanh, which Gemma uses.
Activation: TypeAlias = Literal["silu", "gelu_tanh"]
