"""To which ingress a worker is first among equals.

Ingresses that route at the same moment do not know of each other's requests. Where many workers are
idle and cost the same, each ingress prefers other ones, so that two rarely choose the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection


def home_of(worker_id: str, ingress_ids: Collection[str]) -> str:
    """One of the ingresses; "" if there are fewer than two.

    By rendezvous hashing: a share of the workers for each ingress, and one that comes or goes
    changes no other's than its own.
    """
    if len(set(ingress_ids)) < 2:
        return ""
    return max(ingress_ids, key=lambda ingress_id: _draw(worker_id, ingress_id))


def _draw(worker_id: str, ingress_id: str) -> bytes:
    return hashlib.blake2b(f"{worker_id} {ingress_id}".encode(), digest_size=8).digest()
