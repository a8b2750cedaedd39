"""Requests that are over leave nothing behind: counted in objects, not in resident memory.

What is bounded anyway (the latest decisions, names known to be in the store, cached blocks) is made
small here, so that it is full after the first rounds, as it is in a soak after some minutes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg import local
from disagg.config import EngineConfig, PoolConfig, ServeConfig, TierConfig
from disagg.kvtransfer import pulls
from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.local import LocalCluster
from disagg.models.description import describe_model
from disagg.store import cold_tier
from disagg.store.cold_tier import ColdTier, StoreThread
from disagg.text.tokenizer import Tokenizer
from disagg.time_model import TransferTimeModel
from disagg.worker.parts import Parts
from tests.faults import fake_model
from tests.faults.clients import Questions
from tests.faults.fake_model import BLOCK_SIZE, fake_parts, to_text, write_fake_model
from tests.links.fakes import until
from tests.store.fake_store import FakeStore

NUM_REQUESTS = 42  # in a round
NUM_TOKENS = 8  # of an answer: what each token leaves shows as well, eight times
NUM_FIRST_ROUNDS = 10  # that fill what is bounded
NUM_ROUNDS = 12  # that count: the first half is compared with the second
SPARE = 100  # objects that come and go; one for each request that is answered would be 210
MOST_WINDOWS = 4  # what a rare event keeps once does not grow in all of them


def small(model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ServeConfig, Callable[..., Parts]]:
    """A prefill and a decode worker with little room for anything, over a store."""
    fleet = LocalFleet()

    def new_transport(config: ServeConfig, slab: Slab, stamps: Stamps, _: None) -> LocalTransport:
        return LocalTransport(fleet, slab, stamps, clock=time.monotonic)

    monkeypatch.setattr(pulls, "MAX_USED_TICKETS", 16)
    monkeypatch.setattr(cold_tier, "_MAX_KNOWN", 64)
    monkeypatch.setattr(fake_model, "new_transport", new_transport)
    monkeypatch.setattr(
        fake_model,
        "new_cold_tier",
        lambda store, slab: ColdTier(
            StoreThread(FakeStore(64 * slab.block_nbytes), slab.block_nbytes), TransferTimeModel()
        ),
    )
    tier = TierConfig(
        model=str(model),
        served_model_name="toy",
        prefill=PoolConfig(num_replicas=1),
        decode=PoolConfig(num_replicas=1),
        engine=EngineConfig(num_gpu_blocks_override=1024 // BLOCK_SIZE),
    )
    return ServeConfig(tiers=(tier,), transport="local", cluster_key="key"), fake_parts


async def one_round(cluster: LocalCluster, client: httpx.AsyncClient, questions: Questions) -> None:
    """Prompts that nobody sent before: answered, refused, and left in the middle."""
    for _ in range(NUM_REQUESTS // 6):
        asked = [questions.next(NUM_TOKENS) for _ in range(6)]
        bodies: list[dict[str, Any]] = [
            {
                "model": "toy",
                "messages": [{"role": "user", "content": to_text(each.prompt)}],
                "max_tokens": each.max_tokens,
                "stream": number % 2 == 0,
            }
            for number, each in enumerate(asked)
        ]
        bodies[4]["temperature"] = -1
        leaving = asyncio.create_task(left(cluster, to_text(asked[5].prompt)))
        replies = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=body) for body in bodies[:5])
        )
        assert [each.status_code for each in replies] == [200] * 4 + [400]
        await leaving
    await client.get("/metrics")
    await until(lambda: all(worker._core.is_idle for worker in cluster.workers))


async def left(cluster: LocalCluster, text: str) -> None:
    """A client that has seen enough after its first token."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "toy", "messages": messages, "max_tokens": 50, "stream": True}
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    await sent.put({"type": "http.request", "body": json.dumps(body).encode()})
    headers = [(b"host", b"x"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}

    async def send(message: Any) -> None:
        await sent.put({"type": "http.disconnect"})

    await cluster.ingress.app(scope, sent.get, send)


async def test_requests_leave_no_objects_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, build = small(write_fake_model(tmp_path / "toy", step_s=0.0), monkeypatch)
    questions = Questions(random.Random(0), "toy", num_prefixes=0)
    nums: list[int] = []
    async with local.running(config, build) as cluster:
        cluster.ingress.dispatcher._decisions.max_num = 16
        app = httpx.ASGITransport(cluster.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            for _ in range(NUM_FIRST_ROUNDS):
                await one_round(cluster, client, questions)
            for _ in range(MOST_WINDOWS):
                for _ in range(NUM_ROUNDS):
                    await one_round(cluster, client, questions)
                    gc.collect()
                    nums.append(sys.getallocatedblocks())
                before, after = nums[-NUM_ROUNDS : -NUM_ROUNDS // 2], nums[-NUM_ROUNDS // 2 :]
                if min(after) - min(before) < SPARE:
                    return
    pytest.fail(f"objects are left in every window of {NUM_ROUNDS} rounds: {nums}")


class _HeapFigures(ctypes.Structure):
    """`struct mallinfo2` of glibc: of the main arena, where this thread allocates."""

    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]

    @property
    def used_nbytes(self) -> int:
        return int(self.field_4 + self.field_7)  # mapped blocks, others


def test_prompts_leave_nothing_in_the_tokenizer(tmp_path: Path) -> None:
    """One that knows no words takes each short prompt for a word, and would keep them all."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _HeapFigures
    tokenizer = Tokenizer.from_json(
        describe_model(write_fake_model(tmp_path / "toy", step_s=0.0)).read_tokenizer(), "toy"
    )
    questions = Questions(random.Random(0), "toy", num_prefixes=0)
    used: list[int] = []
    for _ in range(2):
        for _ in range(5000):
            tokenizer.encode(to_text(questions.next().prompt[:80]), add_special_tokens=False)
        gc.collect()
        used.append(mallinfo().used_nbytes)
    assert used[1] - used[0] < 5000 * 20, used
