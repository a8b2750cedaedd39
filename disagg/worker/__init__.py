"""A worker: an engine in its own thread, a link server, KV export and KV import.

Roles are preferences, so every worker can export KV (`prefill_worker/`) and import it
(`decode_worker/`). A worker runs under Ray Serve (`app/`) or in one process without Ray
(`local.py`).
"""
