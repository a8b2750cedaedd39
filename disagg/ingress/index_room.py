"""Says whether the prefix index has room for the blocks of the whole fleet: in `/metrics`, and in
the log before the index forgets blocks that workers have.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from disagg.router.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


class IndexRoom:
    """Compares the room of an index with the KV blocks of all workers. Warns once until it fits."""

    def __init__(self, index: PrefixIndex, registry: CollectorRegistry) -> None:
        self._index = index
        self._has_warned = False
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "bytes": (
                "Memory of this ingress that holds the names of cached KV blocks, in bytes",
                lambda: index.nbytes,
            ),
            "blocks": (
                "Different KV blocks that this ingress knows to be cached on one or more workers",
                lambda: index.num_blocks,
            ),
            "max_blocks": (
                "KV blocks that this ingress has room to know (prefix_index_nbytes). With more"
                " cached ones it forgets the oldest, and routes their requests elsewhere",
                lambda: index.max_num_blocks,
            ),
            "evicted_blocks": (
                "KV blocks that this ingress has forgotten for want of room since it started,"
                " although workers may still have them",
                lambda: index.num_evicted,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = Gauge(f"disagg_prefix_index_{name}", text, registry=registry)
            gauge.set_function(value)

    def check(self, num_blocks: int) -> None:
        """`num_blocks`: of all workers that are there now."""
        room = self._index.max_num_blocks
        is_too_small = num_blocks > room
        if is_too_small and not self._has_warned:
            log.warning(
                "The workers have %d KV blocks together, and the prefix index of an ingress has"
                " room for %d. Blocks that several workers cache count once, but if it fills up,"
                " cached prefixes are forgotten. Multiply prefix_index_nbytes by %.1f,"
                " or use larger blocks (block_size).",
                num_blocks,
                room,
                math.ceil(10 * num_blocks / room) / 10,
            )
        self._has_warned = is_too_small
