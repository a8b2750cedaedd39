"""Invariants that are checked on request, also where Python drops its own assertions."""

from __future__ import annotations


def require(holds: bool, difference: str) -> None:
    """Raise AssertionError(difference) unless the invariant holds."""
    if not holds:
        raise AssertionError(difference)
