"""Measures TTFT of a prompt whose KV was evicted, by where the KV comes from.

    python -m bench.tiers [--shape 160m] [--prompt 1040] [--threads 1] [--rounds 5] [--tiny]
    python -m bench.tiers --device cuda --shape llama-3-8b --prompt 8192    # without Redis

The workers have equal random weights in bf16 and take turns. Each has its core, engine and real
copy threads, and no links. Without a KV tier a worker computes the prompt again. With host memory
or Redis it loads what the time model says is faster to load. In `another worker`, that worker
caches the prompt, and its KV is pulled over NIXL. Before each turn, every block of the cache is
used for other tokens.

`first time` is a prompt that is cached nowhere, computed while its blocks are copied to host
memory. The same without a tier shows what copying costs.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from bench.gpu_models import new_engine
from bench.report import finish, print_table, take_turns
from bench.requests import greedy, new_request
from bench.shapes import SHAPES, model_config
from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.config import EngineConfig, ServeConfig, TierConfig
from disagg.engine.engine_thread import IN_FLIGHT_WAIT_S, StepResult
from disagg.ingress.request_state import RequestState
from disagg.kvtransfer.local_transport import LocalFleet
from disagg.kvtransfer.slab import Slab
from disagg.kvtransfer.stamps import Stamps
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, Start, TokenDelta
from disagg.store.host_tier import HostTier
from disagg.time_model import StepTimeModel
from disagg.worker.core import WorkerCore
from disagg.worker.first_steps import first_steps
from disagg.worker.parts import Parts, new_cold_tier, new_copier, new_transport, store_of

LINK = 1
HOST_NBYTES = 4 << 30  # more than all prompts take
FROM_WORKER = "another worker"


class Contender:
    """A worker in the thread of its caller.

    Args:
        host_nbytes: of host memory; 0: none.
        redis_url: None: no store.
    """

    def __init__(
        self,
        shape: str,
        device: torch.device,
        num_prompt_tokens: int,
        host_nbytes: int,
        redis_url: str | None,
        transport: Literal["local", "nixl"] = "local",
    ) -> None:
        torch.manual_seed(0)
        config = model_config(shape)
        made: list[Stamps] = []
        name = f"worker-{id(self)}"

        def new_generations(num_blocks: int) -> Any:
            made.append(Stamps(num_blocks, name, 1))
            return made[0].generations

        num_blocks = num_prompt_tokens // (64 if device.type == "cuda" else 16) + 8
        self.engine, cache = new_engine(
            config,
            device,
            num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            new_generations=new_generations,
        )
        nbytes = cache.block_nbytes
        slab = Slab(
            cache.base_address, num_blocks, nbytes, cache.layout, cache.device_id, owner=cache
        )
        serve = ServeConfig(
            tiers=(TierConfig(model=shape, engine=EngineConfig()),),
            transport=transport,
            redis_url=redis_url,
            cluster_key="bench",
        )
        store = store_of(serve, EngineConfig(), cache)
        self.cold = new_cold_tier(store, slab)
        self.host: HostTier | None = None
        if host_nbytes:
            num_slots = host_nbytes // nbytes
            copier = new_copier(cache, slab, num_slots)
            self.host = HostTier(copier, num_slots, nbytes, made[0].generations)
        self.transport = new_transport(serve, name, 1, slab, made[0], LocalFleet())
        times = first_steps(self.engine, time.perf_counter, StepTimeModel())
        self.core = WorkerCore(
            Parts(
                self.engine,
                made[0],
                self.transport,
                self.cold,
                cache.read_blocks,
                cache.write_block,
                times,
                host_tier=self.host,
            )
        )
        self._num_requests = 0
        self.num_cached: list[int] = []

    def first_token_s(self, prompt: list[int], prefix_source: Contender | None = None) -> float:
        """Ask for one token, after pulling the cached prefix. Afterwards nothing is under way."""
        self._num_requests += 1
        block_size = self.engine.pool.block_size
        request = new_request(self._num_requests, prompt, greedy(1), block_size)
        began_s = time.perf_counter()
        ticket = None if prefix_source is None else prefix_source.prefix_ticket(request)
        start = Start(self._num_requests, request, ticket=ticket)
        self.core.start(LINK, start, time.time())
        while not (deltas := self._turn()):
            pass
        seconds = time.perf_counter() - began_s
        (delta,) = deltas
        self.num_cached.append(delta.num_cached_tokens)
        while self.core.advance(time.time()):
            time.sleep(IN_FLIGHT_WAIT_S)
        return seconds

    def prefix_ticket(self, request: GenerateRequest) -> KVTicket:
        """What a router asks for before it sends the request to somebody else."""
        self._num_requests += 1
        request = RequestState(request).prefix_request(self.engine.pool.block_size)
        start = Start(self._num_requests, request, hand_over=True)
        delta = self.core.prefix_ticket(LINK, start, time.time())
        assert delta.ticket is not None, delta.error
        return delta.ticket

    def evict(self) -> None:
        """Give every block to somebody else, and wait until what is stored is stored."""
        blocks = self.engine.reserve(self.engine.pool.num_blocks)
        assert blocks is not None, "something is under way"
        self.engine.pool.release(blocks)
        while self.cold is not None and self.cold.stats.queued_nbytes:
            self.cold.poll()
            time.sleep(IN_FLIGHT_WAIT_S)

    def _turn(self) -> list[TokenDelta]:
        """What an engine's thread does in a turn."""
        in_flight = self.core.advance(time.time())
        began_s = time.perf_counter()
        events = self.engine.step()
        seconds = time.perf_counter() - began_s
        features = self.engine.last_plan.features
        has_stepped = bool(features.num_new_tokens or features.num_decoding)
        if in_flight and not has_stepped:
            time.sleep(IN_FLIGHT_WAIT_S)
        result = StepResult(
            tuple(events),
            self.engine.pool.take_events(),
            self.engine.status(),
            features if has_stepped else None,
            seconds,
        )
        return self.core.take(result, time.time()).get(LINK, [])


def measure(arguments: argparse.Namespace, redis_url: str | None) -> list[dict[str, Any]]:
    shape, length, device = arguments.shape, arguments.prompt, torch.device(arguments.device)
    rng = random.Random(0)

    def new_prompt() -> list[int]:
        return [rng.randrange(SHAPES[shape][0]) for _ in range(length)]

    contenders = {
        "computed again": Contender(shape, device, length, 0, None),
        "host memory": Contender(shape, device, length, HOST_NBYTES, None),
    }
    known = new_prompt()
    prefix_source: Contender | None = None
    if redis_url is not None:
        contenders["Redis"] = Contender(shape, device, length, 0, redis_url)
        contenders[FROM_WORKER] = Contender(shape, device, length, 0, None, "nixl")
        prefix_source = Contender(shape, device, length, 0, None, "nixl")
        prefix_source.first_token_s(known)
        contenders[FROM_WORKER].core.add_peers([prefix_source.transport.peer])

    def ask(contender: Contender) -> float:
        if contender is not contenders.get(FROM_WORKER):
            return contender.first_token_s(known)
        assert prefix_source is not None
        seconds = contender.first_token_s(known, prefix_source)
        while not prefix_source.core.is_idle:  # until it has heard that its blocks were read
            prefix_source.core.advance(time.time())
        return seconds

    for contender in contenders.values():
        for _ in range(3):  # the first teach the time model
            ask(contender)
            contender.evict()
        contender.num_cached.clear()

    def again(contender: Contender) -> Callable[[], float]:
        def turn() -> float:
            contender.evict()
            return ask(contender)

        return turn

    def first_time(contender: Contender) -> Callable[[], float]:
        def turn() -> float:
            contender.evict()
            seconds = contender.first_token_s(new_prompt())
            contender.num_cached.pop()
            return seconds

        return turn

    turns = {name: again(contender) for name, contender in contenders.items()}
    turns["first time, no tier"] = first_time(contenders["computed again"])
    turns["first time, copied to host memory"] = first_time(contenders["host memory"])
    seconds = take_turns(turns, arguments.rounds)
    rows = []
    for name, ttft_s in seconds.items():
        cached = contenders[name].num_cached if name in contenders else [0]
        rows.append(
            {
                "KV from": name,
                "TTFT ms": 1e3 * ttft_s,
                "of computed again": ttft_s / seconds["computed again"],
                "cached tokens, least": min(cached),
            }
        )
    for contender in (*contenders.values(), *([prefix_source] if prefix_source else [])):
        contender.core.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="160m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompt", type=int, default=1040, help="tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.shape, arguments.prompt, arguments.rounds = "tiny", 80, 1
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        rows = measure(arguments, None)
    else:
        with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis(Path(scratch)) as redis:
            rows = measure(arguments, redis.url)
    print_table(rows)
    finish("tiers", rows, shape=arguments.shape, prompt=arguments.prompt)


if __name__ == "__main__":
    main()
