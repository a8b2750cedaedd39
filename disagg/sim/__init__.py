"""The product's own router, scheduler, block pool and doors on a virtual clock; engines and
networks are simulated: they take the time that a time model says."""
