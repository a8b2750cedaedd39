"""Measures the gain and the cost of prompt-lookup drafts: `python -m bench.drafts [--tiny]`.

demo-large (float32, one thread) gives greedy answers to held-out questions of its tasks, in turns
without drafts and with `--speculative-config '{"method": "ngram"}'`. `copy` repeats its prompt,
`sort` repeats its words in another order, `arithmetic` repeats nothing. tokens/s are those of the
whole engine per second of CPU time, because machines are shared. Prompts are in the prefix cache,
so the figures compare decoding. `right` is the share of drafted tokens that were accepted.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.gpu_models import new_sequence
from bench.report import finish, print_table, take_turns
from disagg.config import ASSETS, EngineConfig, SpeculativeConfig
from disagg.engine.device.build import build_engine
from disagg.models.description import describe_model
from scripts.demo_tasks import Turn, arithmetic_turn, copy_turn, render, sort_turn

MODEL = ASSETS / "demo-large"
TASKS: dict[str, Callable[[random.Random], Turn]] = {
    "copy": lambda rng: copy_turn(rng, 16),
    "sort": lambda rng: sort_turn(rng, 10),
    "arithmetic": lambda rng: arithmetic_turn(rng, "+", 3),
}
DRAFTS = {"off": None, "on": SpeculativeConfig(method="ngram")}


class Asked:
    """An engine, and questions for it."""

    def __init__(self, drafts: SpeculativeConfig | None) -> None:
        config = EngineConfig(
            dtype="float32",
            num_threads=1,
            max_num_seqs=8,
            max_model_len=512,
            kv_cache_memory_bytes=64 << 20,
            speculative_config=drafts,
        )
        model = describe_model(MODEL)
        self.engine, _ = build_engine(config, model)
        self.stop_ids = frozenset(model.eos_token_ids)
        self.answers: dict[str, list[list[int]]] = {}

    def seconds_a_token(self, task: str, prompts: list[list[int]], num_at_once: int) -> float:
        """CPU time of all answers, divided by their tokens."""
        engine, answers = self.engine, []
        begin_s = time.process_time()
        for first in range(0, len(prompts), num_at_once):
            some = [
                new_sequence(str(place), tokens, len(tokens), 64, engine.pool.block_size)
                for place, tokens in enumerate(prompts[first : first + num_at_once])
            ]
            for sequence in some:
                sequence.stop_ids = self.stop_ids
                engine.submit(sequence)
            while engine.has_work:
                engine.step()
            answers += [sequence.tokens[sequence.num_prompt_tokens :] for sequence in some]
        seconds = time.process_time() - begin_s
        self.answers[task] = answers
        return seconds / sum(map(len, answers))


def row(
    engines: dict[str, Asked], task: str, prompts: list[list[int]], num_at_once: int, rounds: int
) -> dict[str, Any]:
    scheduler = engines["on"].engine.scheduler
    drafted, accepted = scheduler.num_drafted, scheduler.num_accepted
    contenders = {
        name: partial(asked.seconds_a_token, task, prompts, num_at_once)
        for name, asked in engines.items()
    }
    seconds = take_turns(contenders, rounds)
    drafted, accepted = scheduler.num_drafted - drafted, scheduler.num_accepted - accepted
    if engines["on"].answers[task] != engines["off"].answers[task]:
        raise SystemExit(f"drafts changed an answer of {task}")
    return {
        "task": task,
        "at once": num_at_once,
        "tokens/s off": 1 / seconds["off"],
        "tokens/s on": 1 / seconds["on"],
        "of off": seconds["off"] / seconds["on"],
        "drafted": drafted,
        "right": accepted / drafted if drafted else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    rounds, num_questions = (1, 3) if arguments.tiny else (arguments.rounds, arguments.questions)
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    engines = {name: Asked(drafts) for name, drafts in DRAFTS.items()}
    rows = []
    for task, make in TASKS.items():
        rng = random.Random(f"bench {task}")
        asked = [render(make(rng))[0] for _ in range(num_questions)]
        prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in asked]
        rows += [row(engines, task, prompts, num, rounds) for num in (1, 8)]
    print_table(rows)
    finish("drafts", rows)


if __name__ == "__main__":
    main()
