"""Measures the CPU time of one routing decision, for one prompt and N workers.

    python -m bench.routing [--workers 64 256 1024] [--tiny]

Fleet, prefix index and policy are real. Half of the workers prefill. Every worker caches some of
the prompt's prefix and is busy. With a TPOT SLO every worker may prefill and decode. Cases:

- `quiet`: no worker has reported since the last decision.
- `all spoke`: every worker has reported another load since the last decision; `report us` is the
  time to take in one of these reports, before the decision.
- `rerouted`: quiet, and one worker must not get the request.

Figures are CPU time of the thread, because a shared machine stops the thread now and then.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from itertools import product
from typing import Any

from bench.report import finish, print_table
from disagg.blocks import hash_blocks, hash_root
from disagg.kvtransfer.ticket import Peer
from disagg.messages import GenerateRequest, SamplingParams, StepCosts, WorkerRecord, WorkerStatus
from disagg.router.fleet import Fleet
from disagg.router.policy import choose_route

BLOCK_SIZE, NUM_BLOCKS, MODEL = 16, 1 << 14, "bench"
NUM_WORKERS, NUM_TOKENS, NUM_DECISIONS = (64, 256, 1024), 8192, 2000
CASES = ("quiet", "all spoke", "rerouted")
GOAL_US = {"p50": 300, "p99": 1000}
SLO_S, TPOT_SLO_S = 30.0, 0.05


def new_fleet(
    num_workers: int, request: GenerateRequest, rng: random.Random, tpot_slo_s: float
) -> Fleet:
    fleet = Fleet(now=lambda: 0.0, tpot_slo_s={MODEL: tpot_slo_s})
    for number in range(num_workers):
        name = f"w{number}"
        record = WorkerRecord(
            worker_id=name,
            role="decode" if number % 2 else "prefill",
            model=MODEL,
            host="",
            port=0,
            epoch=1,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=1 << 15,
            peer=Peer(name, 1, "local", "bench", NUM_BLOCKS, 1 << 18, 0, 0, -1, b""),
            pid=0,
            max_num_seqs=64,
        )
        num_held = int(rng.random() ** 2 * len(request.block_hashes))
        fleet.worker_synced(record, request.block_hashes[:num_held], new_status(rng))
    return fleet


def new_status(rng: random.Random) -> WorkerStatus:
    return WorkerStatus(
        num_running=rng.randrange(32),
        num_waiting=rng.randrange(4),
        num_uncomputed_tokens=rng.randrange(8192),
        num_context_tokens=rng.randrange(1 << 15),
        num_free_blocks=rng.randrange(NUM_BLOCKS),
        num_blocks=NUM_BLOCKS,
        step_costs=StepCosts(
            (8e-3, 5e-5 * rng.uniform(0.9, 1.1), 1e-9, 1e-4, 1e-8, 2e-3), 100, 0.05
        ),
    )


def new_request(num_tokens: int) -> GenerateRequest:
    root, tokens = hash_root(MODEL, BLOCK_SIZE), tuple(range(num_tokens))
    return GenerateRequest(
        request_id="bench",
        model=MODEL,
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        hash_root=root,
        block_hashes=tuple(hash_blocks(root, tokens, BLOCK_SIZE)),
        sampling=SamplingParams(max_tokens=256),
        deadline_unix_s=600.0,
    )


def decide(
    num_workers: int, num_tokens: int, num_decisions: int, case: str, tpot_slo_s: float
) -> dict[str, Any]:
    rng = random.Random(1)
    request = new_request(num_tokens)
    fleet = new_fleet(num_workers, request, rng, tpot_slo_s)
    statuses = [new_status(rng) for _ in range(num_workers)]
    names = list(fleet.view().workers)
    all_speak, exclude = case == "all spoke", names[:1] if case == "rerouted" else []
    took_us, heard_s = [], 0.0
    for turn in range(num_decisions):
        began_s = time.thread_time()
        if all_speak:
            for number, name in enumerate(names):
                fleet.worker_stepped(name, (), statuses[(turn + number) % num_workers])
            heard_s += time.thread_time() - began_s
        began_s = time.thread_time()
        choose_route(request, fleet.view(), fleet.index, 1e-3, rng, exclude, SLO_S)
        took_us.append((time.thread_time() - began_s) * 1e6)
    took_us.sort()
    return {
        "case": case,
        "TPOT SLO s": None if tpot_slo_s == math.inf else tpot_slo_s,
        "workers": num_workers,
        "tokens": num_tokens,
        "p50 us": took_us[num_decisions // 2],
        "p99 us": took_us[num_decisions * 99 // 100],
        "report us": heard_s * 1e6 / (num_decisions * num_workers) if all_speak else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=NUM_WORKERS)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    arguments = parser.parse_args()
    nums_workers, size = arguments.workers, (NUM_TOKENS, NUM_DECISIONS)
    if arguments.tiny:
        nums_workers, size = (4, 40), (64, 100)
    cases = product((math.inf, TPOT_SLO_S), nums_workers, CASES)
    rows = [decide(num_workers, *size, case, tpot_slo_s) for tpot_slo_s, num_workers, case in cases]
    print_table(rows)
    finish("routing", rows, goal_us=GOAL_US)


if __name__ == "__main__":
    main()
