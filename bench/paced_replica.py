"""The paced worker as a Serve replica. It is a module of its own, because only it needs Ray."""

from __future__ import annotations

from bench.paced_worker import paced_parts
from disagg.app.deployments import WorkerReplica


class PacedReplica(WorkerReplica):
    build_parts = staticmethod(paced_parts)
