"""The block table of a sequence: allocating, releasing and caching its blocks.

`num_computed` follows the blocks here: a prefix hit raises it, losing the blocks sets it to 0. Only
`Scheduler.apply` advances it by computing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from disagg.blocks import hash_block
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence

_NEVER = 1 << 62


def give_blocks(pool: BlockPool, sequence: Sequence, leaves_room: Callable[[int], bool]) -> bool:
    """Give a sequence the blocks of all its tokens, cached or new; False if there are too few.

    It gets all blocks at once, so that two half-computed prompts never wait for each other's
    blocks.

    Args:
        leaves_room: returns whether so many blocks may be taken.
    """
    num_needed = -(-len(sequence.tokens) // pool.block_size) - len(sequence.block_ids)
    if sequence.block_ids:
        fits = num_needed <= 0 or leaves_room(num_needed)
        return fits and extend(pool, sequence, max(0, num_needed))
    found = find_prefix(pool, sequence)
    num_new = num_needed - len(found)
    if not leaves_room(num_new):
        return False
    pool.acquire(found)  # before `allocate`, which might evict them
    new = pool.allocate(num_new) if leaves_room(num_new) else None
    if new is None:
        pool.release(found)
        return False
    adopt(pool, sequence, found, new)
    watch_blocks(pool, sequence)
    if not sequence.was_admitted:
        sequence.was_admitted = True
        sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
    return True


def take_imported(pool: BlockPool, sequence: Sequence) -> None:
    """Record the blocks with imported KV that a sequence has come with; cache the full ones."""
    sequence.num_slots = len(sequence.block_ids) * pool.block_size
    sequence.was_admitted = True
    sequence.num_published = 0
    watch_blocks(pool, sequence)
    if sequence.num_computed >= sequence.publish_at:
        publish(pool, sequence)


def watch_blocks(pool: BlockPool, sequence: Sequence) -> None:
    """Cache the sequence's blocks as they fill up, from the block after `num_published` on."""
    num_tokens = (sequence.num_published + 1) * pool.block_size
    sequence.publish_at = num_tokens if pool.enable_prefix_caching else _NEVER


def find_prefix(pool: BlockPool, sequence: Sequence) -> list[int]:
    """The cached blocks that have the sequence's leading tokens.

    They never include its last token, which is always computed because its logits are needed.
    """
    if not pool.enable_prefix_caching or sequence.prompt_logprobs is not None:
        return []  # log-probabilities of a prompt require that all of it is computed
    num_findable = (len(sequence.tokens) - 1) // pool.block_size
    return pool.match(sequence.block_hashes[:num_findable])


def adopt(pool: BlockPool, sequence: Sequence, found: list[int], new: list[int]) -> None:
    """Add `found`, blocks with KV, and then `new`, blocks without, to the block table."""
    sequence.block_ids = found + new
    sequence.num_slots = len(sequence.block_ids) * pool.block_size
    sequence.num_computed = len(found) * pool.block_size
    sequence.num_published = len(found)


def extend(pool: BlockPool, sequence: Sequence, num_blocks: int) -> bool:
    """Allocate `num_blocks` more blocks. If there are too few, change nothing and return False."""
    new = pool.allocate(num_blocks)
    if new is None:
        return False
    sequence.block_ids += new
    sequence.num_slots += num_blocks * pool.block_size
    return True


def grow(pool: BlockPool, sequences: SequenceOf[Sequence]) -> bool:
    """Allocate one block for each sequence. If there are too few, change nothing and return
    False."""
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
    num_kept = -(-len(sequence.tokens) // pool.block_size)
    spare = sequence.block_ids[num_kept:]
    if spare:
        pool.release(spare)
        del sequence.block_ids[num_kept:]
        sequence.num_listed = min(num_kept, sequence.num_listed)
        sequence.num_slots = num_kept * pool.block_size


def give_back(pool: BlockPool, sequence: Sequence) -> None:
    pool.release(disown(sequence))


def disown(sequence: Sequence) -> list[int]:
    """Remove and return a sequence's blocks. The caller becomes their holder."""
    block_ids, sequence.block_ids = sequence.block_ids, []
    sequence.num_slots = sequence.num_listed = 0
    sequence.num_computed = 0
    return block_ids


def publish(pool: BlockPool, sequence: Sequence) -> None:
    """Cache the blocks that `num_computed` has filled since the last call, under their hashes.

    Blocks with generated tokens are hashed here; the router hashed the others.
    """
    block_size, hashes = pool.block_size, sequence.block_hashes
    num_full = sequence.num_computed // block_size
    for i in range(sequence.num_published, num_full):
        if i == len(hashes):
            parent = hashes[-1] if hashes else sequence.hash_root
            filled = sequence.tokens[i * block_size : (i + 1) * block_size]
            hashes.append(hash_block(parent, filled))
        pool.publish(sequence.block_ids[i], hashes[i])
    sequence.num_published = num_full
    sequence.publish_at = (num_full + 1) * block_size
