"""The real router, scheduler, block pool, KV export and import on a virtual clock; engines and
networks are simulated: they take the time that a time model says."""
