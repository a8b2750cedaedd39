"""Sizes a fleet for a load: which GPUs, how many, split how into prefill and decode."""
