"""Measures the CPU time that planning takes in each engine step, without a model.

    python -m bench.scheduler [--tiny]

The engine (scheduler and block pool) is real, and its runner computes nothing. Cases:

- `decode N`: N sequences advance by one token; they get new blocks, and full blocks are published.
- `admit`: from submitting a prompt of 2,048 tokens to its first token; half of it is cached.
- `match`: finding the blocks of a cached prompt of 8,192 tokens, and taking them for a sequence.

`status` is the load report that the router gets after each step. `batch` is making the tensors of
the step, on a CPU. CPU time is also what a step costs where other programs use the same cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from typing import Any

import torch

from bench.report import finish, print_table
from bench.requests import new_request
from disagg.engine.device.batching import Batching
from disagg.engine.device.slots import Slots
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.block_tables import find_prefix
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Sampled, StepPlan
from disagg.messages import SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 16, 1 << 16
PROMPT, LONG_PROMPT, NUM_STEPS, NUM_PROMPTS = 2048, 8192, 256, 64
TOKEN_ID = 7
ONE_TOKEN = SamplingParams(max_tokens=1)


class NoModel:
    def run(self, plan: StepPlan) -> list[Sampled]:
        if not plan.features.num_new_tokens:
            return [TOKEN_ID] * plan.num_decodes
        return [
            TOKEN_ID if num_tokens == sequence.num_uncomputed else None
            for sequence, num_tokens in zip(plan.sequences, plan.query_lens, strict=True)
        ]


def new_engine(block_size: int = BLOCK_SIZE) -> Engine:
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, block_size, array("Q", bytes(8 * NUM_BLOCKS))),
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        max_model_len=1 << 15,
    )
    return Engine(scheduler, NoModel())


def new_sequence(
    number: int, tokens: list[int], sampling: SamplingParams, block_size: int = BLOCK_SIZE
) -> Sequence:
    return Sequence(new_request(number, tokens, sampling, block_size))


def decode(num_seqs: int, num_steps: int) -> dict[str, Any]:
    """Mean, not median: one step in sixteen has blocks to give and to publish."""
    engine = new_engine()
    for number in range(num_seqs):
        sampling = SamplingParams(max_tokens=2 * num_steps + 8)
        engine.submit(new_sequence(number, [number + 8] * 129, sampling))
    while engine.scheduler.waiting or engine.last_plan.num_decodes < num_seqs:
        engine.step()
    began_s = time.process_time()
    for _ in range(num_steps):
        engine.step()
        engine.pool.take_events()
    step_s = (time.process_time() - began_s) / num_steps
    began_s = time.process_time()
    for _ in range(num_steps):
        engine.status()
    status_s = (time.process_time() - began_s) / num_steps
    return {
        "case": f"decode {num_seqs}",
        "us a step": step_s * 1e6,
        "us a token": step_s * 1e6 / num_seqs,
        "status us": status_s * 1e6,
        "batch us": batch_s(engine, num_steps) * 1e6,
    }


def batch_s(engine: Engine, num_steps: int) -> float:
    """Seconds of a step for the batches of those that decode."""
    slots = Slots()
    batching = Batching(slots, BLOCK_SIZE, (1 << 15) // BLOCK_SIZE, torch.device("cpu"))
    seconds = 0.0
    for _ in range(num_steps):
        plan = engine.scheduler.plan()
        began_s = time.process_time()
        step = batching.inputs(plan, slots.enter(plan.sequences))
        batch, rows = batching.batch(step)
        batching.remember(rows, batch.token_ids)
        seconds += time.process_time() - began_s
        engine.scheduler.apply(plan, engine.runner.run(plan))
        engine.pool.take_events()
    return seconds / num_steps


def admit(num_prompts: int) -> dict[str, Any]:
    engine = new_engine()
    seconds = []
    for number in range(num_prompts):
        tokens = [*range(8, 8 + PROMPT // 2), *([number] * (PROMPT // 2))]
        sequence = new_sequence(number, tokens, ONE_TOKEN)
        began_s = time.process_time()
        engine.submit(sequence)
        while engine.has_work:
            engine.step()
        seconds.append(time.process_time() - began_s)
    return row_of("admit", seconds, PROMPT)


def match(num_times: int) -> dict[str, Any]:
    engine = new_engine()
    prompt = [8 + i % 1000 for i in range(LONG_PROMPT)]
    engine.submit(new_sequence(0, prompt, ONE_TOKEN))
    while engine.has_work:
        engine.step()
    pool, sequence = engine.pool, new_sequence(1, prompt, ONE_TOKEN)
    seconds = []
    for _ in range(num_times):
        began_s = time.process_time()
        found = find_prefix(pool, sequence)
        pool.acquire(found)
        seconds.append(time.process_time() - began_s)
        assert len(found) == (LONG_PROMPT - 1) // BLOCK_SIZE
        pool.release(found)
    return row_of("match", seconds, LONG_PROMPT)


def row_of(case: str, seconds: list[float], num_tokens: int) -> dict[str, Any]:
    took_us = statistics.median(seconds) * 1e6
    return {
        "case": case,
        "us a step": took_us,
        "us a token": took_us / num_tokens,
        "status us": None,
        "batch us": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    is_tiny = parser.parse_args().tiny
    num_steps = 16 if is_tiny else NUM_STEPS
    rows = [decode(num_seqs, num_steps) for num_seqs in ((2,) if is_tiny else (1, 8, 32, 128, 256))]
    num_times = 4 if is_tiny else NUM_PROMPTS
    rows += [admit(num_times), match(num_times)]
    print_table(rows)
    finish("scheduler", rows)


if __name__ == "__main__":
    main()
