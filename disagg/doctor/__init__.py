"""Checks of a machine before the first request: can it serve, and if not, what to change."""
