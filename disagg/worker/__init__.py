"""A worker: one engine behind a link, with both doors.

Roles are preferences, so every worker can let sequences leave (`prefill_worker/`) and arrive
(`decode_worker/`); this package puts the two doors, the engine's thread and the link server
together. It runs under Ray Serve (`app/`) and in one process without it (`local.py`) alike.
"""
