"""Answers in Python, without a server: the fleet of `disagg.local` behind vLLM's names."""
