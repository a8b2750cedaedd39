"""The block table of a sequence: allocating, releasing and caching its blocks.

`num_computed` follows the blocks here: a prefix hit raises it, losing the blocks sets it to 0. Only
`Scheduler.apply` advances it by computing.

A sequence gets the blocks of full attention at once, so that two half-computed prompts never wait
for each other's. Blocks of windows come with the chunks that fill them, and go when no later token
sees them (`kv_groups`). Their names stay until the blocks are needed: a prompt that shares only the
beginning of another finds the windows at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from disagg.blocks import BlockHash, hash_block
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence
from disagg.kv_groups import NO_BLOCK, block_name

_NEVER = 1 << 62


def give_blocks(pool: BlockPool, sequence: Sequence, leaves_room: Callable[[int], bool]) -> bool:
    """Give a sequence the blocks of all its tokens, cached or new; False if there are too few.

    Args:
        leaves_room: returns whether so many blocks may be taken.
    """
    groups, num_tokens = pool.groups, len(sequence.tokens)
    if sequence.block_ids:
        num_missing = groups.num_rows(num_tokens) - sequence.num_slots // pool.block_size
        fits = num_missing <= 0 or leaves_room(num_missing * groups.num_groups)
        return fits and extend(pool, sequence, max(0, num_missing))
    found = find_prefix(pool, sequence)
    num_found, num_rows = len(found) // groups.num_groups, groups.num_rows(num_tokens)
    num_new, held = (num_rows - num_found) * groups.num_full, held_blocks(found)
    num_wanted = num_new + groups.num_coming(num_rows, num_found, num_found * pool.block_size)
    if not leaves_room(num_wanted):
        return False
    pool.acquire(held)  # before `allocate`, which might evict them
    new = pool.allocate(num_new) if leaves_room(num_wanted) else None
    if new is None:
        pool.release(held)
        return False
    adopt(pool, sequence, found, new)
    watch_blocks(pool, sequence)
    if not sequence.was_admitted:
        sequence.was_admitted = True
        sequence.num_cached_tokens = sequence.num_computed
    return True


def take_imported(pool: BlockPool, sequence: Sequence) -> None:
    """Record the blocks with imported KV that a sequence has come with; cache the full ones."""
    sequence.num_slots = num_slots(pool, sequence)
    sequence.was_admitted = True
    sequence.num_cached_tokens = sequence.num_computed
    sequence.num_published = 0
    watch_blocks(pool, sequence)
    if sequence.num_computed >= sequence.publish_at:
        publish(pool, sequence)


def num_slots(pool: BlockPool, sequence: Sequence) -> int:
    """The positions for which its block table has rows."""
    return len(sequence.block_ids) // pool.groups.num_groups * pool.block_size


def watch_blocks(pool: BlockPool, sequence: Sequence) -> None:
    """Cache the sequence's blocks as they fill up, from the row after `num_published` on."""
    num_tokens = (sequence.num_published + 1) * pool.block_size
    is_watched = pool.enable_prefix_caching or pool.groups.num_windows > 0
    sequence.publish_at = num_tokens if is_watched else _NEVER


def find_prefix(pool: BlockPool, sequence: Sequence) -> list[int]:
    """A block table of the cached blocks that have the sequence's leading tokens.

    They never include its last token, which is always computed because its logits are needed.
    """
    if not pool.enable_prefix_caching or sequence.prompt_logprobs is not None:
        return []  # log-probabilities of a prompt require that all of it is computed
    num_findable = (len(sequence.tokens) - 1) // pool.block_size
    return cached_table(pool, sequence.block_hashes[:num_findable])


def cached_table(pool: BlockPool, hashes: SequenceOf[BlockHash]) -> list[int]:
    """A block table of the longest prefix that is cached under `hashes`, which are of full rows."""
    groups = pool.groups
    if not groups.num_windows:
        return pool.match(hashes)
    num_tokens = groups.num_found(hashes, pool.__contains__) * pool.block_size
    return groups.table(pool.match(groups.names(hashes, num_tokens)), num_tokens)


def adopt(pool: BlockPool, sequence: Sequence, found: list[int], new: list[int]) -> None:
    """Make a block table of `found`, rows with KV, and of `new` blocks of full attention."""
    groups, rows_with_kv = pool.groups, len(found) // pool.groups.num_groups
    if groups.num_windows:
        no_blocks = [NO_BLOCK] * groups.num_windows
        num_rows = groups.num_rows(len(sequence.tokens)) - rows_with_kv
        full = groups.num_full
        of_rows = (new[row * full : (row + 1) * full] + no_blocks for row in range(num_rows))
        sequence.block_ids = found + [each for row in of_rows for each in row]
        sequence.num_slots = rows_with_kv * pool.block_size
    else:
        sequence.block_ids = found + new
        sequence.num_slots = len(sequence.block_ids) * pool.block_size
    sequence.num_computed = rows_with_kv * pool.block_size
    sequence.num_published = rows_with_kv


def extend(pool: BlockPool, sequence: Sequence, num_rows: int) -> bool:
    """Allocate the missing blocks of `num_rows` more rows, behind those that are complete.

    If there are too few, change nothing and return False.
    """
    rows, held = _next_rows(pool, sequence, num_rows)
    new = pool.allocate(len(rows) - len(held) + held.count(NO_BLOCK))
    if new is None:
        return False
    if held:
        rest = iter(new)
        new = [next(rest) if each == NO_BLOCK else each for each in held] + [*rest]
    sequence.block_ids[rows.start : rows.stop] = new
    sequence.num_slots += num_rows * pool.block_size
    return True


def _next_rows(pool: BlockPool, sequence: Sequence, num_rows: int) -> tuple[range, list[int]]:
    """The places of the next rows in the block table, and what is there: blocks of full attention,
    or nothing yet."""
    num_groups = pool.groups.num_groups
    first = sequence.num_slots // pool.block_size * num_groups
    rows = range(first, first + num_rows * num_groups)
    return rows, sequence.block_ids[rows.start : rows.stop]


def make_room(pool: BlockPool, sequence: Sequence, num_tokens: int, num_spare: int) -> None:
    """Allocate blocks of windows for the first `num_tokens` tokens, as far as there are
    `num_spare`."""
    num_rows = pool.groups.num_rows(num_tokens) - sequence.num_slots // pool.block_size
    num_rows = min(num_rows, num_spare // max(1, pool.groups.num_windows))
    if num_rows > 0:
        extend(pool, sequence, num_rows)


def grow(pool: BlockPool, sequences: SequenceOf[Sequence]) -> bool:
    """Allocate one row for each sequence. If there are too few blocks, change nothing and return
    False."""
    if pool.groups.num_windows:
        rows = [_next_rows(pool, sequence, 1) for sequence in sequences]
        num_new = sum(len(row) - len(held) + held.count(NO_BLOCK) for row, held in rows)
        return num_new <= pool.num_free and all(extend(pool, each, 1) for each in sequences)
    new = pool.allocate(len(sequences), apart=True)
    if new is None:
        return False
    block_size = pool.block_size
    for sequence, block_id in zip(sequences, new, strict=True):
        sequence.block_ids.append(block_id)
        sequence.num_slots += block_size
    return True


def trim(pool: BlockPool, sequence: Sequence) -> None:
    """Release the blocks beyond the sequence's tokens."""
    num_rows = pool.groups.num_rows(len(sequence.tokens))
    num_kept = num_rows * pool.groups.num_groups
    spare = sequence.block_ids[num_kept:]
    if spare:
        pool.release(spare)
        del sequence.block_ids[num_kept:]
        sequence.num_slots = num_rows * pool.block_size
        sequence.num_listed = min(sequence.num_slots, sequence.num_listed)


def give_back(pool: BlockPool, sequence: Sequence) -> None:
    pool.release(disown(sequence))


def disown(sequence: Sequence) -> list[int]:
    """Remove and return a sequence's blocks. The caller becomes their holder."""
    table, sequence.block_ids = sequence.block_ids, []
    sequence.num_slots = sequence.num_listed = 0
    sequence.num_computed = 0
    return held_blocks(table)


def held_blocks(table: list[int]) -> list[int]:
    """The blocks of a block table."""
    return [block_id for block_id in table if block_id != NO_BLOCK] if NO_BLOCK in table else table


def publish(pool: BlockPool, sequence: Sequence) -> None:
    """Cache the rows that `num_computed` has filled since the last call, under their hashes, and
    release the blocks that no later token sees.

    Rows with generated tokens are hashed here; the router hashed the others.
    """
    block_size, hashes = pool.block_size, sequence.block_hashes
    num_full = sequence.num_computed // block_size
    if pool.enable_prefix_caching:
        num_groups, table = pool.groups.num_groups, sequence.block_ids
        for row in range(sequence.num_published, num_full):
            if row == len(hashes):
                parent = hashes[-1] if hashes else sequence.hash_root
                filled = sequence.tokens[row * block_size : (row + 1) * block_size]
                hashes.append(hash_block(parent, filled))
            for group, block_id in enumerate(table[row * num_groups : (row + 1) * num_groups]):
                if block_id != NO_BLOCK:
                    pool.publish(block_id, block_name(hashes[row], group))
    if pool.groups.num_windows:
        _leave_behind(pool, sequence)
    sequence.num_published = num_full
    sequence.publish_at = (num_full + 1) * block_size


def _leave_behind(pool: BlockPool, sequence: Sequence) -> None:
    """Release the blocks of windows that no token from `num_computed` on sees.

    At once, also while a step is under way: it neither writes to them nor reads them.
    """
    groups, table = pool.groups, sequence.block_ids
    left: list[int] = []
    for group in groups.of_windows:
        index = (groups.first_row(group, sequence.num_computed) - 1) * groups.num_groups + group
        while index >= 0 and table[index] != NO_BLOCK:
            left.append(table[index])
            table[index] = NO_BLOCK
            index -= groups.num_groups
    pool.release(left)
