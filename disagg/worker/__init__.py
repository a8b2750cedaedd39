"""A worker: an engine in its own thread, a link server, KV export and KV import.

Roles are preferences, so every worker can export KV (`kv_export`) and import it (`kv_import`). A
worker runs under Ray Serve (`app/`) or in one process without Ray (`local.py`).
"""
