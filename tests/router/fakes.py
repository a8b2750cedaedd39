"""Hand-made fleets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.blocks import BlockHash, hash_root
from disagg.kvtransfer.ticket import Peer
from disagg.messages import (
    GenerateRequest,
    StepCosts,
    TransferFigure,
    WorkerRecord,
    WorkerStatus,
)
from disagg.router.fleet import Fleet
from disagg.router.prefix_index import PrefixIndex
from tests.generate_requests import new_request

BLOCK_SIZE = 16
ROOT = hash_root("toy", BLOCK_SIZE)

# 10 ms a step, 0.1 ms a prompt token: a prompt of 1,000 tokens takes about 110 ms.
COSTS = StepCosts((1e-2, 1e-4, 1e-9, 1e-4, 1e-8, 2e-4), 100, 0.05)


def make_record(worker_id: str, **changes: Any) -> WorkerRecord:
    peer = Peer(
        worker_id=worker_id,
        epoch=changes.get("epoch", 1),
        transport="local",
        layout=changes.pop("layout", "toy/bs16"),
        num_blocks=1000,
        block_nbytes=changes.pop("block_nbytes", 1 << 14),
        base_address=0,
        stamps_address=0,
        device_id=-1,
        agent=b"",
    )
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "role": "prefill" if worker_id.startswith("p") else "decode",
        "model": "toy",
        "host": "127.0.0.1",
        "port": 1,
        "epoch": 1,
        "block_size": BLOCK_SIZE,
        "num_blocks": 1000,
        "max_model_len": 8192,
        "peer": peer,
        "pid": 1,
    }
    return WorkerRecord(**(fields | changes))


def make_status(**changes: Any) -> WorkerStatus:
    fields: dict[str, Any] = {"num_free_blocks": 1000, "num_blocks": 1000, "step_costs": COSTS}
    return WorkerStatus(**(fields | changes))


def far_from(*worker_ids: str) -> tuple[TransferFigure, ...]:
    """What a worker measured that had better compute KV than pull it from these."""
    return tuple(TransferFigure(worker_id, 1000.0, 1e9) for worker_id in worker_ids)


def make_fleet(
    *records: WorkerRecord | str, held: dict[str, list[BlockHash]] | None = None
) -> Fleet:
    """An idle fleet; names that begin with p prefill, others decode."""
    fleet = Fleet()
    for record in records:
        if isinstance(record, str):
            record = make_record(record)
        fleet.worker_synced(record, (held or {}).get(record.worker_id, []), make_status())
    return fleet


def make_request(num_tokens: int = 100, **changes: Any) -> GenerateRequest:
    token_ids = changes.pop("token_ids", range(num_tokens))
    usual: dict[str, Any] = {
        "request_id": "request-0",
        "model": "toy",
        "hash_root": ROOT,
        "max_tokens": 64,
    }
    return new_request(token_ids, block_size=BLOCK_SIZE, **(usual | changes))


def held_by(
    index: PrefixIndex, block_hashes: Sequence[BlockHash], *, has_states: bool = False
) -> dict[str, int]:
    """The number of leading blocks that each worker has cached, if it has at least one."""
    found = index.find(block_hashes, has_states=has_states)
    depths = found.depths(index._bits.values())
    return {name: depth for name, depth in zip(index._bits, depths, strict=True) if depth}
