"""Warns before the prefix index is too small for the fleet, and forgets blocks that are cached."""

from __future__ import annotations

import logging
import math

from disagg.router.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


class IndexRoom:
    """Compares the room of an index with the KV blocks of all workers. Warns once until it fits."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._has_warned = False

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
