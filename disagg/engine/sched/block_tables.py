"""The block table of a sequence: allocating, releasing and caching its blocks.

`num_computed` follows the blocks here: a prefix hit raises it, losing the blocks sets it to 0. Only
`Scheduler.apply` advances it by computing.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from disagg.blocks import hash_block
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence


def find_prefix(pool: BlockPool, sequence: Sequence) -> list[int]:
    """Findable blocks with the sequence's leading tokens.

    They never reach its last token: that one is computed, because its logits are wanted.
    """
    num_findable = (len(sequence.tokens) - 1) // pool.block_size
    return pool.match(sequence.block_hashes[:num_findable])


def adopt(pool: BlockPool, sequence: Sequence, found: list[int], new: list[int]) -> None:
    """Own `found`, whose KV is there, and then `new`, whose KV is not."""
    sequence.block_ids = found + new
    sequence.num_slots = len(sequence.block_ids) * pool.block_size
    sequence.num_computed = len(found) * pool.block_size
    sequence.num_published = len(found)


def extend(pool: BlockPool, sequence: Sequence, num_blocks: int) -> bool:
    """Own `num_blocks` more blocks; False, and nothing happens, if there are too few."""
    new = pool.allocate(num_blocks)
    if new is None:
        return False
    sequence.block_ids += new
    sequence.num_slots += num_blocks * pool.block_size
    return True


def grow(pool: BlockPool, sequences: SequenceOf[Sequence]) -> bool:
    """One more block for each; False, and nothing happens, if there are too few for all."""
    new = pool.allocate(len(sequences), apart=True)
    if new is None:
        return False
    block_size = pool.block_size
    for sequence, block_id in zip(sequences, new, strict=True):
        sequence.block_ids.append(block_id)
        sequence.num_slots += block_size
    return True


def trim(pool: BlockPool, sequence: Sequence) -> None:
    """Give back the blocks beyond the sequence's tokens."""
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
    """Take its blocks from a sequence, for somebody else to hold or to release."""
    block_ids, sequence.block_ids = sequence.block_ids, []
    sequence.num_slots = sequence.num_listed = 0
    sequence.num_computed = 0
    return block_ids


def publish(pool: BlockPool, sequence: Sequence) -> None:
    """Name and publish the blocks that `num_computed` has filled since the last call.

    Blocks that generated tokens have filled get their names here.
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
