"""A worker: an engine in its own thread, a link server, KV export and KV import.

Roles are preferences, so every worker can export KV (`prefill_worker/`) and import it
(`decode_worker/`). Runs under Ray Serve (`app/`) and in one process without Ray (`local.py`).
"""
