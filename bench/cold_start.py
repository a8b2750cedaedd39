"""Measures how long a new worker takes from the decision to start it to its first token, by phases.

    python -m bench.cold_start [--model demo-large] [--rounds 3] [--tiny]

The decision is made when the process of the worker is started; Ray adds what it takes to place and
start an actor (`bench.first_minute` includes it). An ingress of this process links to the worker as
soon as it listens, and routes one prompt of 512 tokens to it. Phases, in seconds:

- `process`: Python and the imports, above all of torch.
- `weights`: the model's description, and its weights in memory.
- `memory`: the KV cache.
- `warm up`: kernels, and the first steps, to which the time model is fitted; then it listens.
- `link`: until the ingress knows the worker.
- `first token`: of the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
import time
from functools import partial
from importlib import import_module
from typing import Any

import msgspec

from bench.report import finish, print_table
from disagg.blocks import hash_blocks, hash_root
from disagg.config import ServeConfig
from disagg.config_checks import parse_config
from disagg.ingress.dispatch import Dispatcher
from disagg.links.fleet_links import FleetLinks
from disagg.messages import GenerateRequest, SamplingParams, StartStep, TokenDelta, WorkerRecord
from disagg.router.fleet import Fleet

PHASES = ("process", "weights", "memory", "warm up", "link", "first token")
NUM_TOKENS, PATIENCE_S = 512, 120.0


def config_for(model: str, key: str) -> ServeConfig:
    return parse_config(
        {
            "tiers": [{"model": model, "prefill": {"num_replicas": 0}}],
            "cold_tier_nbytes": 0,
            "cluster_key": key,
            "link_host": "127.0.0.1",
            "drain_s": 0,
        }
    )


async def be_a_worker(model: str, key: str) -> None:
    """Tell the phases of a start and the record on standard output, and serve until input ends."""
    import_module("disagg.engine.device.build")  # with torch, which a worker imports later
    from disagg.worker.parts import build_parts
    from disagg.worker.start import start_worker

    def tell(phase: str, **fields: Any) -> None:
        print(json.dumps({"phase": phase, "unix_s": time.time(), **fields}), flush=True)

    def progress(step: StartStep) -> None:
        if step.phase != "weights":
            tell({"kv_blocks": "weights", "warm_up": "memory"}[step.phase])

    tell("process")
    config = config_for(model, key)
    worker = await start_worker(
        config,
        config.tiers[0],
        "decode",
        worker_id="new",
        epoch=time.time_ns(),
        host="127.0.0.1",
        build=partial(build_parts, progress=progress),
    )
    tell("warm up", record=msgspec.to_builtins(worker.record))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await worker.close()


async def start_one(model: str) -> dict[str, float]:
    """Seconds of each phase of one start."""
    key, times = secrets.token_hex(16), [time.time()]
    command = (sys.executable, "-m", "bench.cold_start", "--worker", key, "--model", model)
    pipe = asyncio.subprocess.PIPE
    worker = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert worker.stdin is not None and worker.stdout is not None
    fleet, rng = Fleet(now=time.time), random.Random(1)
    links = FleetLinks(key=key.encode(), ingress_id="ingress", observer=fleet, rng=rng)
    try:
        told: dict[str, Any] = {}
        while "record" not in told:
            line = await worker.stdout.readline()
            if not line:
                raise RuntimeError(f"the worker ended with {await worker.wait()}")
            told = json.loads(line)
            times.append(told["unix_s"])
        record = msgspec.convert(told["record"], WorkerRecord)
        linked = asyncio.Event()
        fleet.on_available.append(lambda model: linked.set())
        links.update([record])
        await asyncio.wait_for(linked.wait(), PATIENCE_S)
        times.append(time.time())

        def take(delta: TokenDelta) -> None:
            if delta.token_ids:
                times.append(time.time())

        dispatcher = Dispatcher(links, fleet, now=time.time, rng=rng)
        await dispatcher.generate(new_request(record), take)
    finally:
        await links.close()
        worker.stdin.close()
        await worker.wait()
    ends = zip(PHASES, times[1:], times[:-1], strict=True)
    return {phase: end_s - begin_s for phase, end_s, begin_s in ends}


def new_request(record: WorkerRecord) -> GenerateRequest:
    root, tokens = hash_root(record.model, record.block_size), tuple(range(100, 100 + NUM_TOKENS))
    return GenerateRequest(
        request_id="bench",
        model=record.model,
        token_ids=tokens,
        num_prompt_tokens=NUM_TOKENS,
        hash_root=root,
        block_hashes=tuple(hash_blocks(root, tokens, record.block_size)),
        sampling=SamplingParams(max_tokens=1),
        deadline_unix_s=time.time() + PATIENCE_S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cold_start", description=__doc__)
    parser.add_argument("--model", default="demo-large")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="one start of a small model")
    parser.add_argument("--worker", metavar="KEY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        asyncio.run(be_a_worker(arguments.model, arguments.worker))
        return
    model, rounds = arguments.model, arguments.rounds
    if arguments.tiny:
        model, rounds = "demo-small", 1
    starts = [asyncio.run(start_one(model)) for _ in range(rounds)]
    seconds = {phase: statistics.median(each[phase] for each in starts) for phase in PHASES}
    row: dict[str, Any] = {"model": model, "starts": rounds}
    row |= {f"{phase} s": seconds[phase] for phase in PHASES}
    row["decision to first token s"] = statistics.median(sum(each.values()) for each in starts)
    print_table([row])
    finish("cold_start", [row])


if __name__ == "__main__":
    main()
