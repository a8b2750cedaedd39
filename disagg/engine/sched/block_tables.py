"""The block table of a sequence: allocating, releasing and caching its blocks.

`num_computed` follows the blocks here: a prefix hit raises it, losing the blocks sets it to 0. Only
`Scheduler.apply` advances it by computing.

A sequence gets the blocks of full attention at once, so that two half-computed prompts never wait
for each other's. Blocks of windows come with the chunks that fill them, and go when no later token
sees them (`kv_groups`). Their names stay until the blocks are needed: a prompt that shares only the
beginning of another finds the windows at its end.

Blocks of a recurrent state come to the row in which a step ends, and go when a later row has the
state. They are named only where a chunk of a prompt, or the answer's last whole row, ends: a state
is as large as the KV of hundreds or thousands of tokens, and one for each row would fill the cache.
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
        num_kv_groups = groups.num_groups - groups.num_states
        num_wanted = num_missing * num_kv_groups + groups.num_states
        fits = num_missing <= 0 or leaves_room(num_wanted)
        fits = fits and extend(pool, sequence, max(0, num_missing))
        return fits and begin_row(pool, sequence)
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
    """The positions for which its block table has rows, or had."""
    num_rows = len(sequence.block_ids) // pool.groups.num_groups
    return num_rows * pool.block_size + sequence.num_evicted


def watch_blocks(pool: BlockPool, sequence: Sequence) -> None:
    """Cache the sequence's blocks as they fill up, from the row after `num_published` on."""
    num_tokens = (sequence.num_published + 1) * pool.block_size
    is_watched = pool.enable_prefix_caching or pool.groups.num_partial > 0
    is_watched &= not sequence.num_evicted
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
    if not groups.num_partial:
        return pool.match(hashes)
    num_tokens = groups.num_found(hashes, pool.__contains__) * pool.block_size
    return groups.table(pool.match(groups.names(hashes, num_tokens)), num_tokens)


def adopt(pool: BlockPool, sequence: Sequence, found: list[int], new: list[int]) -> None:
    """Make a block table of `found`, rows with KV, and of `new` blocks of full attention."""
    groups, rows_with_kv = pool.groups, len(found) // pool.groups.num_groups
    if groups.num_partial:
        no_blocks = [NO_BLOCK] * groups.num_partial
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
    """Allocate the missing blocks of KV of `num_rows` more rows, behind those that are complete.

    If there are too few, change nothing and return False.
    """
    missing = _missing(pool, sequence, num_rows)
    new = pool.allocate(len(missing))
    if new is None:
        return False
    _put(pool, sequence, num_rows, missing, new)
    return True


def _missing(pool: BlockPool, sequence: Sequence, num_rows: int) -> SequenceOf[int]:
    """The places in the block table of the next rows that have no block of KV yet."""
    groups, table = pool.groups, sequence.block_ids
    num_groups = groups.num_groups
    first = _num_complete(pool, sequence) * num_groups
    end = first + num_rows * num_groups
    if not groups.num_partial:
        return range(first, end)
    num_kv = num_groups - groups.num_states
    rows = (range(row, row + num_kv) for row in range(first, end, num_groups))
    return [i for row in rows for i in row if i >= len(table) or table[i] == NO_BLOCK]


def _num_complete(pool: BlockPool, sequence: Sequence) -> int:
    """The complete rows of its block table."""
    return (sequence.num_slots - sequence.num_evicted) // pool.block_size


def _put(
    pool: BlockPool,
    sequence: Sequence,
    num_rows: int,
    places: SequenceOf[int],
    block_ids: SequenceOf[int],
) -> None:
    """Complete the next rows with blocks at these places."""
    table = sequence.block_ids
    num_complete = _num_complete(pool, sequence) + num_rows
    table += [NO_BLOCK] * (num_complete * pool.groups.num_groups - len(table))
    for place, block_id in zip(places, block_ids, strict=True):
        table[place] = block_id
    sequence.num_slots = num_complete * pool.block_size + sequence.num_evicted


def lacks_row(pool: BlockPool, sequence: Sequence) -> bool:
    """Whether the next token has no slot for its KV, or nowhere to write the state after it."""
    position, groups = sequence.num_computed, pool.groups
    if position >= sequence.num_slots:
        return True
    return groups.num_states > 0 and not _has_state(pool, sequence, position // pool.block_size)


def begin_row(pool: BlockPool, sequence: Sequence) -> bool:
    """Allocate what the next token lacks. If there are too few blocks, change nothing and return
    False."""
    return grow(pool, (sequence,)) if lacks_row(pool, sequence) else True


def _lacking(pool: BlockPool, sequence: Sequence) -> tuple[int, list[int]]:
    """What the next token lacks: the number of rows, and the places of blocks."""
    row, num_rows = sequence.num_computed // pool.block_size, 1
    if not pool.groups.num_states:
        return num_rows, [*_missing(pool, sequence, num_rows)]
    num_rows = int(sequence.num_computed >= sequence.num_slots)
    places = [*_missing(pool, sequence, num_rows)]
    if not _has_state(pool, sequence, row):
        places += pool.groups.of_state(row)
    return num_rows, places


def _has_state(pool: BlockPool, sequence: Sequence, row: int) -> bool:
    """Whether a row has the blocks of a state."""
    last, table = (row + 1) * pool.groups.num_groups - 1, sequence.block_ids
    return last < len(table) and table[last] != NO_BLOCK


def place_state(pool: BlockPool, sequence: Sequence, end: int) -> bool:
    """Give the row of the last token before position `end` the blocks of a state; False: there are
    too few.

    Those are used first that the sequence has in a later row than that of its last computed token,
    where no state has been written yet.
    """
    groups, size, table = pool.groups, pool.block_size, sequence.block_ids
    row = (end - 1) // size
    if not groups.num_states or _has_state(pool, sequence, row):
        return True
    last_used, first = (sequence.num_computed - 1) // size, row
    for other in (sequence.num_computed // size, sequence.num_slots // size - 1):
        if other > last_used and _has_state(pool, sequence, other):
            places, first = groups.of_state(other), min(row, other)
            new: list[int] | None = table[places.start : places.stop]
            table[places.start : places.stop] = [NO_BLOCK] * groups.num_states
            break
    else:
        new = pool.allocate(groups.num_states)
    if new is None:
        return False
    places = groups.of_state(row)
    table[places.start : places.stop] = new
    sequence.num_listed = min(sequence.num_listed, first * size)
    return True


def make_room(pool: BlockPool, sequence: Sequence, num_tokens: int, num_spare: int) -> None:
    """Allocate blocks of windows for the first `num_tokens` tokens, as far as there are
    `num_spare`."""
    num_rows = pool.groups.num_rows(num_tokens) - sequence.num_slots // pool.block_size
    if num_windows := len(pool.groups.of_windows):
        num_rows = min(num_rows, num_spare // num_windows)
    if num_rows > 0:
        extend(pool, sequence, num_rows)


def grow(pool: BlockPool, sequences: SequenceOf[Sequence]) -> bool:
    """Allocate what the next token of each sequence lacks: one row. If there are too few blocks,
    change nothing and return False."""
    if pool.groups.num_partial:
        lacking = [_lacking(pool, sequence) for sequence in sequences]
        if sum(len(places) for _, places in lacking) > pool.num_free:
            return False
        for sequence, (num_rows, places) in zip(sequences, lacking, strict=True):
            new = pool.allocate(len(places))
            assert new is not None
            _put(pool, sequence, num_rows, places, new)
            if pool.groups.num_states:
                sequence.num_listed = min(sequence.num_listed, sequence.num_computed)
        return True
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
    num_rows = pool.groups.num_rows(len(sequence.tokens) - sequence.num_evicted)
    num_kept = num_rows * pool.groups.num_groups
    spare = sequence.block_ids[num_kept:]
    if spare:
        pool.release(spare)
        del sequence.block_ids[num_kept:]
        sequence.num_slots = num_rows * pool.block_size + sequence.num_evicted
        sequence.num_listed = min(sequence.num_slots, sequence.num_listed)


def give_back(pool: BlockPool, sequence: Sequence) -> None:
    pool.release(disown(sequence))


def disown(sequence: Sequence) -> list[int]:
    """Remove and return a sequence's blocks. The caller becomes their holder."""
    table, sequence.block_ids = sequence.block_ids, []
    sequence.num_slots = sequence.num_listed = sequence.num_evicted = 0
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
    groups = pool.groups
    if pool.enable_prefix_caching:
        num_groups, table = groups.num_groups, sequence.block_ids
        for row in range(sequence.num_published, num_full):
            if row == len(hashes):
                parent = hashes[-1] if hashes else sequence.hash_root
                filled = sequence.tokens[row * block_size : (row + 1) * block_size]
                hashes.append(hash_block(parent, filled))
            end = (row + 1) * num_groups - groups.num_states
            for group, block_id in enumerate(table[row * num_groups : end]):
                if block_id != NO_BLOCK:
                    pool.publish(block_id, block_name(hashes[row], group))
        if groups.num_states and num_full > 0 and sequence.num_computed % block_size == 0:
            _publish_state(pool, sequence, num_full - 1)
    if groups.num_partial:
        _leave_behind(pool, sequence)
    sequence.num_published = num_full
    sequence.publish_at = (num_full + 1) * block_size
    if groups.num_states and sequence.num_computed == num_full * block_size:
        sequence.publish_at = sequence.num_computed + 1  # the state before is not needed then


def _publish_state(pool: BlockPool, sequence: Sequence, row: int) -> None:
    """Cache the state at the end of a row: for good in the prompt, where others like it may fork,
    and in the answer until the next row is full."""
    groups, hashes = pool.groups, sequence.block_hashes
    is_of_answer = (row + 1) * pool.block_size > sequence.num_prompt_tokens
    if is_of_answer and row:
        pool.drop_passing(groups.state_names(hashes[row - 1]))
    names = groups.state_names(hashes[row])
    for index, name in zip(groups.of_state(row), names, strict=True):
        pool.publish(sequence.block_ids[index], name, is_passing=is_of_answer)


def keep_last_state(pool: BlockPool, sequence: Sequence) -> None:
    """Keep the state at the end of an answer's last full row, from which the next turn of its
    conversation goes on."""
    is_named = pool.enable_prefix_caching and sequence.num_published > 0
    if pool.groups.num_states and is_named:
        last = sequence.block_hashes[sequence.num_published - 1]
        pool.keep_passing(pool.groups.state_names(last))


def _leave_behind(pool: BlockPool, sequence: Sequence) -> None:
    """Release the blocks of windows and states that no token from `num_computed` on sees.

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
    if groups.num_states:
        # Before the rows that were published there has been none since the last call.
        rows = range(
            max(0, sequence.num_published - 1), (sequence.num_computed - 1) // pool.block_size
        )
        for places in (groups.of_state(row) for row in rows if _has_state(pool, sequence, row)):
            left += table[places.start : places.stop]
            table[places.start : places.stop] = [NO_BLOCK] * groups.num_states
    pool.release(left)
