"""KV by groups of layers, of which those with a sliding window keep only their last tokens.

The layers of a model are divided into groups of equally many, each of layers that see the same
positions: full attention, or a window. A block has `block_size` positions of one group's layers, so
all blocks have the same size, and one pool serves all groups, as in vLLM's hybrid KV cache manager.
Row i of a sequence's block table has one block of each group, for the positions from i * block_size
on; a block of a window is missing (`NO_BLOCK`) where no later token sees it. A model without
windows, or one with the same window in all layers, is one group.

A recurrent state is as many groups as it needs blocks. Their blocks in a row have the state after
the last token that was computed of the row, if there is one, and otherwise are missing. The next
token reads them, and writes the state after itself to its own row. So the state at the end of a
full row is named like its KV, and a prefix can go on from it. Routers are told of each row with
KV, and with a mark of each row with a state (`KVGroups.reported`).

Pure arithmetic: knows no pool, no model and no device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from disagg.blocks import HASH_NBYTES, BlockHash

Window: TypeAlias = int | None  # positions that a token sees, including itself; None: all

STATE = 0  # in place of a window: a block of a recurrent state
NO_BLOCK = -1
STATE_MARK = b"s"  # behind a row's hash in KV events: the state at its end
# Kernels read keys in tiles of so many positions, and mask those outside of a window. A block is
# kept until no tile has a position of it, since even 0 * NaN of a masked value is NaN.
TILE_TOKENS = 64
MAX_GROUPS = 256  # a block's name has one byte for the group
# A worker reports its room in blocks of all groups, for sequences of this length: shorter ones need
# more of a pool, and longer ones less.
USUAL_TOKENS = 8192


@dataclass(frozen=True)
class LayerGroups:
    """The division of a model's layers.

    Attributes:
        windows: of each group; full attention comes first, and states come last.
        places: of each layer: its group, and its number in the group. Layers that share KV have
            the same place.
        num_layers: layers of a block. The last group of a window may use fewer.
    """

    windows: tuple[Window, ...]
    places: tuple[tuple[int, int], ...]
    num_layers: int


def one_group(sources: Sequence[int], window: Window = None) -> LayerGroups:
    """One group of all layers.

    Args:
        sources: of each layer, the one whose KV it reads, which is itself or an earlier one.
    """
    own = sorted(set(sources))
    places = tuple((0, own.index(source)) for source in sources)
    return LayerGroups((window,), places, len(own))


def group_layers(windows: Sequence[Window], sources: Sequence[int] | None = None) -> LayerGroups:
    """Divide layers with these windows.

    The layers with full attention fill their groups, since their blocks are kept for all tokens.
    Those of windows may fill up the last block with nothing.

    Args:
        sources: as in `one_group`, with the same window; None: each layer has KV of its own.
    """
    sources = range(len(windows)) if sources is None else sources
    own = sorted(set(sources))
    num_of = Counter(windows[layer] for layer in own)
    kinds = sorted(num_of, key=lambda window: (window is not None, -(window or 0)))
    if len(kinds) == 1:
        return one_group(sources, kinds[0])
    most = min(num_of.values())
    size = next(size for size in range(most, 0, -1) if num_of[None] % size == 0)
    places: dict[int, tuple[int, int]] = {}
    of_groups: list[Window] = []
    for kind in kinds:
        layers = [layer for layer in own if windows[layer] == kind]
        for i, layer in enumerate(layers):
            places[layer] = len(of_groups) + i // size, i % size
        of_groups += [kind] * -(-len(layers) // size)
    if len(of_groups) > MAX_GROUPS:
        return one_group(sources)
    return LayerGroups(tuple(of_groups), tuple(places[source] for source in sources), size)


def group_with_states(
    num_layers: int, of_states: Collection[int], num_state_blocks: int
) -> LayerGroups:
    """Divide layers of which these have a recurrent state, and the others full attention."""
    windows = None, *[STATE] * num_state_blocks
    num_full = num_layers - len(of_states)
    return LayerGroups(windows, state_places(num_layers, of_states), num_full)


def state_places(num_layers: int, of_states: Collection[int]) -> tuple[tuple[int, int], ...]:
    """The places of a model's layers, if the others have full attention.

    Layers with states are numbered in the group that stands for all blocks of a state.
    """
    places, nums = [], [0, 0]
    for layer in range(num_layers):
        group = layer in of_states
        places.append((int(group), nums[group]))
        nums[group] += 1
    return tuple(places)


@dataclass(frozen=True)
class KVGroups:
    """Which blocks of its groups a sequence needs.

    Indices are those of a sequence's block table: row * num_groups + group.
    """

    windows: tuple[Window, ...]
    block_size: int

    @cached_property
    def num_groups(self) -> int:
        return len(self.windows)

    @cached_property
    def num_full(self) -> int:
        """Groups with full attention, which come first."""
        return self.windows.count(None)

    @cached_property
    def num_partial(self) -> int:
        """Groups that do not keep all rows: windows, and states."""
        return self.num_groups - self.num_full

    @cached_property
    def num_states(self) -> int:
        """Blocks of a recurrent state, which are the last groups; 0: there is none."""
        return self.windows.count(STATE)

    @cached_property
    def of_windows(self) -> range:
        """The groups with a window."""
        return range(self.num_full, self.num_groups - self.num_states)

    def of_state(self, row: int) -> range:
        """The indices of a row's blocks of a state."""
        end = (row + 1) * self.num_groups
        return range(end - self.num_states, end)

    def num_rows(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_row(self, group: int, num_tokens: int) -> int:
        """The first row that tokens from position `num_tokens` on may read."""
        window = self.windows[group]
        if window is None:
            return 0
        if window == STATE:
            return max(0, num_tokens - 1) // self.block_size
        return max(0, num_tokens - window + 1) // TILE_TOKENS * TILE_TOKENS // self.block_size

    @property
    def can_evict(self) -> bool:
        """Whether a sequence may lose rows between others: each layer sees all that are left."""
        return self.windows == (None,)

    def evicted(self, num_tokens: int, sinks: int, window: int) -> range:
        """The rows between the first and the last ones of some tokens."""
        first = self.num_rows(sinks)
        return range(first, max(first, (num_tokens - window) // self.block_size))

    def needed(self, num_tokens: int) -> Sequence[int]:
        """The blocks that are needed to go on after `num_tokens` tokens.

        In the order in which they move between workers: full rows of full attention first, then
        those in windows, and the last row if it is not full. So blocks with names come before
        others, and the blocks of full attention before those that a longer prompt does not need.
        """
        num, num_named = self.num_groups, num_tokens // self.block_size
        if not self.num_partial and num == 1:
            return range(self.num_rows(num_tokens))
        firsts = {group: self.first_row(group, num_tokens) for group in self.of_windows}
        full = [row * num + group for row in range(num_named) for group in range(self.num_full)]
        seen = [
            row * num + group
            for row in range(min(firsts.values(), default=0), num_named)
            for group in firsts
            if row >= firsts[group]
        ]
        if num_tokens and num_tokens == num_named * self.block_size:
            seen += self.of_state(num_named - 1)
        begun = range(num_named * num, self.num_rows(num_tokens) * num)
        return [*full, *seen, *begun]

    def num_needed(self, num_tokens: int) -> int:
        """The number of blocks that `needed` returns."""
        num_rows = self.num_rows(num_tokens)
        firsts = (self.first_row(group, num_tokens) for group in self.of_windows)
        num_states = self.num_states if num_tokens else 0
        return self.num_full * num_rows + sum(num_rows - first for first in firsts) + num_states

    def num_at_most(self, num_tokens: int) -> int:
        """The most blocks that a sequence needs at any time until it has `num_tokens` tokens, if it
        is computed in chunks of a block."""
        num_rows = self.num_rows(num_tokens)
        return self.num_full * num_rows + self.num_coming(num_rows, 0, 0)

    def most_rows(self, group: int) -> int:
        """The most rows of a group with a window that a token and those before it need."""
        window = self.windows[group]
        assert window is not None
        return (window + TILE_TOKENS - 2) // self.block_size + 2

    def num_coming(self, num_rows: int, num_held: int, num_computed: int) -> int:
        """The most blocks of windows and states that a sequence will take, beside those that it
        gives back.

        It has two states while it begins a row: the one that it reads, and the one that it writes.

        Args:
            num_rows: of all its tokens.
            num_held: rows that are complete but for what left a window.
        """
        num_states = self.num_states and max(0, min(num_rows - num_held, 2 - (num_computed > 0)))
        return self.num_states * num_states + sum(
            max(0, min(num_rows - num_held, self.most_rows(group) - (num_held - first)))
            for group in self.of_windows
            for first in (self.first_row(group, num_computed),)
        )

    def longest(self, num_blocks: int) -> int:
        """The most tokens of a sequence for which `num_blocks` blocks are enough."""
        num_rows = range(num_blocks + 1)
        size = self.block_size
        return size * (
            bisect_right(num_rows, num_blocks, key=lambda rows: self.num_at_most(rows * size)) - 1
        )

    def num_whole(self, num_blocks: int) -> int:
        """So many blocks, as a number of rows of sequences of a usual length."""
        return int(num_blocks / self.num_blocks_of_row)

    @cached_property
    def num_blocks_of_row(self) -> float:
        """The blocks of a row on average, of a sequence of a usual length."""
        return (self.num_needed(USUAL_TOKENS) + self.num_states) / self.num_rows(USUAL_TOKENS)

    def names(self, hashes: Sequence[BlockHash], num_tokens: int) -> Sequence[BlockHash]:
        """The names of the leading blocks of `needed`, as far as they are full."""
        num, num_named = self.num_groups, num_tokens // self.block_size
        if num_named > len(hashes) or (num == 1 and not self.num_partial):
            return self.full_names(hashes[:num_named])
        end = num_named * num
        return [block_name(hashes[i // num], i % num) for i in self.needed(num_tokens) if i < end]

    def full_names(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The names of the blocks of full attention, row by row."""
        if self.num_full == 1:
            return hashes
        return [block_name(each, group) for each in hashes for group in range(self.num_full)]

    def reported(self, name: BlockHash) -> BlockHash | None:
        """What KV events say of a block with this name: its row's hash for the first group, the
        marked hash for the last one of a state, and nothing for others."""
        if len(name) <= HASH_NBYTES:
            return name
        if self.num_states and name[HASH_NBYTES] == self.num_groups - 1:
            return name[:HASH_NBYTES] + STATE_MARK
        return None

    def names_of(self, reported: BlockHash) -> Sequence[BlockHash]:
        """The names of the blocks that a KV event stands for."""
        if self.num_groups == 1:
            return (reported,)
        if len(reported) > HASH_NBYTES:
            return self.state_names(reported[:HASH_NBYTES])
        return [block_name(reported, group) for group in range(self.num_groups - self.num_states)]

    def state_names(self, block_hash: BlockHash) -> Sequence[BlockHash]:
        """The names of the blocks of the state at the end of a row."""
        groups = range(self.num_groups - self.num_states, self.num_groups)
        return [block_name(block_hash, group) for group in groups]

    def every_name(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The names of the blocks of all groups, row by row."""
        if self.num_groups == 1:
            return hashes
        return [block_name(each, group) for each in hashes for group in range(self.num_groups)]

    def num_found(self, hashes: Sequence[BlockHash], is_cached: Callable[[BlockHash], bool]) -> int:
        """The most rows of which full attention has all blocks, and windows and states those that
        are needed to go on after them."""
        num_rows = len(hashes)
        for group in range(self.num_full):
            names = (block_name(each, group) for each in hashes[:num_rows])
            num_rows = next((i for i, name in enumerate(names) if not is_cached(name)), num_rows)
        of_state = range(self.num_groups - self.num_states, self.num_groups)
        while num_rows:
            last = hashes[num_rows - 1]
            if not all(is_cached(block_name(last, group)) for group in of_state):
                num_rows -= 1
                continue
            last_missing = -1
            for group in self.of_windows:
                first = self.first_row(group, num_rows * self.block_size)
                rows = range(num_rows - 1, max(first - 1, last_missing), -1)
                missing = (row for row in rows if not is_cached(block_name(hashes[row], group)))
                last_missing = next(missing, last_missing)
            if last_missing < 0:
                break
            num_rows = last_missing  # longer prefixes need this row too
        return num_rows

    def table(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The block table of a sequence that has the blocks of `needed`."""
        needed = self.needed(num_tokens)
        table = [NO_BLOCK] * (self.num_rows(num_tokens) * self.num_groups)
        for index, block_id in zip(needed, block_ids, strict=True):
            table[index] = block_id
        return table


@dataclass(frozen=True)
class WantedPrefix:
    """A prompt's prefix that a tier may have more of than a cache.

    Attributes:
        hashes: of its rows.
        num_here: leading rows that the cache has, enough to go on after them.
        is_here: whether the cache has a block with this name.
        compute_s: predicted seconds to compute the first n rows after these; any thread may call
            it.
    """

    groups: KVGroups
    hashes: Sequence[BlockHash]
    num_here: int
    is_here: Callable[[BlockHash], bool]
    compute_s: Callable[[int], float]

    def names(self, num_rows: int) -> Sequence[BlockHash]:
        """The names of the blocks that are needed to go on after `num_rows` rows."""
        return self.groups.names(self.hashes, num_rows * self.groups.block_size)


def block_name(block_hash: BlockHash, group: int) -> BlockHash:
    """The name of a group's block of a row: the row's hash, and the group but for the first."""
    return block_hash if group == 0 else block_hash + bytes((group,))
