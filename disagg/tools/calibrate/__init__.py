"""Chooses the thresholds of a cascade of models from measured answers."""
