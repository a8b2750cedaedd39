"""Reports whether the prefix index has room for the blocks of the whole fleet.

It exports metrics, and logs a warning before the index forgets blocks that workers have.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from disagg.router.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


class IndexRoom:
    """Compares the size of an index with the KV blocks of all workers. Warns once until it fits."""

    def __init__(self, index: PrefixIndex, registry: CollectorRegistry) -> None:
        self._index = index
        self._has_warned = False
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "bytes": (
                "Memory of the prefix index of this ingress, in bytes",
                lambda: index.nbytes,
            ),
            "blocks": (
                "Number of different KV blocks in the prefix index of this ingress, each cached on"
                " one or more workers",
                lambda: index.num_blocks,
            ),
            "max_blocks": (
                "Largest number of KV blocks in the prefix index (prefix_index_nbytes). If workers"
                " cache more, the ingress forgets the oldest and misses prefix hits",
                lambda: index.max_num_blocks,
            ),
            "evicted_blocks": (
                "Number of KV blocks that the prefix index has forgotten for lack of room since the"
                " ingress started, although workers may still have them",
                lambda: index.num_evicted,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = Gauge(f"disagg_prefix_index_{name}", text, registry=registry)
            gauge.set_function(value)

    def check(self, num_blocks: int) -> None:
        """Warn if the index is too small. `num_blocks` is the total of all present workers."""
        room = self._index.max_num_blocks
        is_too_small = num_blocks > room
        if is_too_small and not self._has_warned:
            log.warning(
                "The workers have %d KV blocks in total, but the prefix index of an ingress has"
                " room for %d. Blocks that several workers cache count once, but if the index"
                " fills up, it forgets cached prefixes. Multiply prefix_index_nbytes by %.1f,"
                " or use larger blocks (block_size).",
                num_blocks,
                room,
                math.ceil(10 * num_blocks / room) / 10,
            )
        self._has_warned = is_too_small
