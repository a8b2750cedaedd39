"""Moves numbered blocks between slabs. Knows no model, no torch, no Ray."""
