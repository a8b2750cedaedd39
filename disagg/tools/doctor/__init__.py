"""Checks whether a machine can serve, and what to change if it cannot."""
