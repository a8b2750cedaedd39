"""Simulates fleets on a virtual clock.

The router, scheduler, block pool, KV export and KV import are the real ones. Only engines and
networks are simulated: they take the time that a time model predicts.
"""
