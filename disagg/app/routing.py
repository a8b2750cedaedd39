"""The request router that Serve runs in each ingress for each worker deployment.

Requests do not go through it: they go over our own links to the worker that `router/policy.py`
chose. It exists because Serve sends the membership, with the metadata of replicas, only to request
routers.
"""

from __future__ import annotations

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class MembershipRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # ray is untyped here
    """Passes the membership to the ingress. Serve's control calls may go to any replica."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        # Imported here, because Serve pickles this class by value (see `membership`).
        from disagg.app import membership

        found = [membership.from_metadata(replica.replica_metadata) for replica in replicas]
        deployment = self._deployment_id.name
        membership.replace(deployment, [record for record in found if record is not None])
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]
