"""Block hashes: a digest of a block's tokens, chained on the digest of the block before it.

Equal hashes mean equal tokens at equal positions under the same model and tenant, so equal KV.
Every process computes the same hashes, which lets a router compare a prompt with what workers have
cached. The root of the chain includes the model, the block size and the tenant, so two tenants
never share a block and cannot probe each other's cache. It also includes the content of a LoRA
adapter, so no KV of one adapter is used for another, or for the model without one.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

BlockHash: TypeAlias = bytes
HASH_NBYTES = 16


def hash_root(
    model_fingerprint: str, block_size: int, tenant: str = "", adapter: str = ""
) -> BlockHash:
    """The parent of a chain's first block: one per (model, block size, tenant, adapter).

    Args:
        adapter: the digest of a LoRA adapter's content; "": the model without one.
    """
    parts = (model_fingerprint, str(block_size), tenant, *([adapter] if adapter else []))
    digest = hashlib.blake2b(digest_size=HASH_NBYTES, person=b"disagg-kv-root")
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Name of the block that holds `token_ids` right after the block named `parent`."""
    raw = array("I", token_ids)
    if sys.byteorder != "little":
        raw.byteswap()
    return hashlib.blake2b(parent + raw.tobytes(), digest_size=HASH_NBYTES).digest()


def image_digest(data: bytes) -> str:
    """Identifies an image's file, also to vLLM."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def hash_image(parent: BlockHash, digest: str) -> BlockHash:
    """Name of a block that has an image, or a part of one, right after the block named `parent`.

    Only an engine knows how many tokens an image has, and where a block after its begin ends. So
    this is the last name in a request: that of the block in which its first image begins. The text
    of that block before the image is not in the name.
    """
    raw = parent + digest.encode()
    return hashlib.blake2b(raw, digest_size=HASH_NBYTES, person=b"disagg-kv-image").digest()


def hash_blocks(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Names of the full blocks of `token_ids`; a partial block at the end has no name."""
    raw = array("I", token_ids)
    if sys.byteorder != "little":
        raw.byteswap()
    tokens = memoryview(raw.tobytes())
    stride = block_size * raw.itemsize
    hashes = []
    for start in range(0, len(tokens) - stride + 1, stride):
        parent = hashlib.blake2b(
            parent + tokens[start : start + stride].tobytes(), digest_size=HASH_NBYTES
        ).digest()
        hashes.append(parent)
    return hashes
