"""Measures the quality, memory and speed of KV cache formats on a bundled model.

    python -m bench.kv_formats [--model demo-large] [--samples 25] [--threads 1] [--tiny]

The conversations are held out and come from every task of the model's training
(`scripts/demo_evaluate.py`).

- `perplexity`: of the answers' tokens, which are all that the model learned to predict.
- `answers right`: the share of conversations whose whole answer greedy decoding gets right; one
  forward pass tells, because it reads what it has just stored, as decoding does.
- `tokens/s`: decoding N sequences at once after 512 tokens each, with the formats in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from bench.kernels_decoder import BLOCK_SIZE, NUM_BLOCKS, generate, uniform_batch
from bench.report import finish, print_table, take_turns
from disagg.config import ASSETS
from disagg.kernels.kv_pages import FORMATS, KVPages, new_pages
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import describe_model
from scripts.demo_batches import IGNORE
from scripts.demo_evaluate import all_levels, encode_turn

CPU = torch.device("cpu")
# The model's type and the cache's; the first one is what the others are compared with.
COMBINATIONS = [
    ("float32", "float32"),
    ("float32", "int8"),
    ("float32", "fp8"),
    ("float32", "int4"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
    ("bfloat16", "fp8"),
    ("bfloat16", "int4"),
]
PROMPT, OUTPUT = 512, 32

Row = tuple[list[int], list[int]]  # tokens, and for each the next one where it is an answer's


class Contender:
    """A model and its cache."""

    def __init__(self, directory: Path, dtype: str, kv: str) -> None:
        model = describe_model(directory)
        config = model.config
        self.decoder: Decoder = load_model(model, FORMATS[dtype].dtype, CPU)
        self.pages: KVPages = new_pages(
            FORMATS[kv],
            NUM_BLOCKS,
            config.num_layers,
            config.num_kv_heads,
            BLOCK_SIZE,
            config.head_dim,
            CPU,
        )
        self.vocab_size = config.vocab_size

    @property
    def token_nbytes(self) -> float:
        return self.pages.blocks[0].nbytes / BLOCK_SIZE

    def logits(self, ids: list[int]) -> torch.Tensor:
        """After each token of one conversation: [len(ids), vocab_size]."""
        tables = torch.arange(-(-len(ids) // BLOCK_SIZE), dtype=torch.int32)[None]
        batch = uniform_batch(torch.tensor([ids]), 0, tables)
        every = torch.arange(len(ids))
        return self.decoder.forward(dataclasses.replace(batch, logits_rows=every), self.pages)

    def decode_s(self, num_seqs: int) -> float:
        """Seconds of decoding; what its prompts take is measured and taken off."""
        prompts = torch.randint(0, self.vocab_size, (num_seqs, PROMPT))
        seconds = []
        for num_new in (1, 1 + OUTPUT):
            begin_s = time.perf_counter()
            generate(self.decoder, self.pages, prompts, num_new)
            seconds.append(time.perf_counter() - begin_s)
        return seconds[1] - seconds[0]


def conversations(tokenizer: Tokenizer, num_samples: int, seed: int = 0) -> list[Row]:
    rows = []
    for level in all_levels():
        rng = random.Random(f"held out {seed} {level.name}")
        rows += [encode_turn(level.make(rng, tokenizer), tokenizer) for _ in range(num_samples)]
    return rows


def quality(contender: Contender, rows: list[Row]) -> tuple[float, float]:
    """Perplexity of the answers' tokens, and the share of answers that are right."""
    loss, num_tokens, num_right = 0.0, 0, 0
    for ids, labels in rows:
        logits = contender.logits(ids)
        answer = torch.tensor(labels) != IGNORE
        predicted, wanted = logits[answer], torch.tensor(labels)[answer]
        loss += float(cross_entropy(predicted, wanted, reduction="sum"))
        num_tokens += len(wanted)
        num_right += bool((predicted.argmax(-1) == wanted).all())
    return math.exp(loss / num_tokens), num_right / len(rows)


def speeds(contenders: list[Contender], num_seqs: int, rounds: int) -> list[float]:
    """Tokens a second of each."""

    def timed(contender: Contender) -> Callable[[], float]:
        return lambda: contender.decode_s(num_seqs)

    seconds = take_turns({i: timed(each) for i, each in enumerate(contenders)}, rounds)
    return [num_seqs * OUTPUT / seconds[i] for i in range(len(contenders))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-large")
    parser.add_argument("--samples", type=int, default=25, help="conversations of each task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    arguments = parser.parse_args()
    samples, rounds, batches = arguments.samples, arguments.rounds, [1, 8]
    if arguments.tiny:
        arguments.model, samples, rounds, batches = "demo-small", 1, 1, [1]
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    directory = ASSETS / arguments.model
    rows = conversations(Tokenizer.from_file(str(directory / "tokenizer.json")), samples)
    contenders = [Contender(directory, *types) for types in COMBINATIONS]
    measured = {n: speeds(contenders, n, rounds) for n in batches}
    table: list[dict[str, Any]] = []
    for index, ((dtype, kv), contender) in enumerate(zip(COMBINATIONS, contenders, strict=True)):
        perplexity, share_right = quality(contender, rows)
        row = {
            "model": dtype,
            "KV": kv,
            "bytes/token": contender.token_nbytes,
            "perplexity": perplexity,
            "delta %": 0.0,
            "answers right": share_right,
            **{f"tokens/s, {n}": measured[n][index] for n in batches},
        }
        table.append(row)
        exact = next(each for each in table if each["model"] == dtype)
        row["delta %"] = 100 * (perplexity / exact["perplexity"] - 1)
    print_table([{**row, "perplexity": f"{row['perplexity']:.5f}"} for row in table])
    num_tokens = sum(label != IGNORE for _, labels in rows for label in labels)
    finish(
        "kv_formats",
        table,
        model=arguments.model,
        threads=arguments.threads,
        conversations=len(rows),
        answer_tokens=num_tokens,
    )


if __name__ == "__main__":
    main()
