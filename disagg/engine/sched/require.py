"""Checks of invariants that work under `python -O` too, which drops assert statements."""

from __future__ import annotations


def require(holds: bool, difference: str) -> None:
    """Raise AssertionError(difference) unless the invariant holds."""
    if not holds:
        raise AssertionError(difference)
