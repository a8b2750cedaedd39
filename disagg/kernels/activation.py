"""The activation functions of an MLP's gate. Knows no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

# "gelu_tanh" is GELU (arXiv 1606.08415) in its approximation with tanh, which Gemma uses.
Activation: TypeAlias = Literal["silu", "gelu_tanh"]
