"""Which ingress prefers a worker among workers that cost the same: the worker's home.

Ingresses that route at the same moment do not know of each other's requests. Where many workers are
idle and cost the same, each ingress prefers those whose home it is, so two rarely choose the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection


def home_of(worker_id: str, ingress_ids: Collection[str]) -> str:
    """The home of a worker, one of the ingresses; "" if there are fewer than two.

    Rendezvous hashing: each ingress gets a similar share of the workers, and if an ingress comes or
    goes, only its own share changes.
    """
    if len(set(ingress_ids)) < 2:
        return ""
    return max(ingress_ids, key=lambda ingress_id: _draw(worker_id, ingress_id))


def _draw(worker_id: str, ingress_id: str) -> bytes:
    return hashlib.blake2b(f"{worker_id} {ingress_id}".encode(), digest_size=8).digest()
