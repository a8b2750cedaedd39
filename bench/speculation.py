"""Measures what drafts gain: tokens per second of CPU time, with each kind of draft and without.

    python -m bench.speculation [--tiny]
        [--model demo-large --config '{"method": "draft_model", "model": "demo-small"}']
        [--sizes 1 8 32 256] [--rounds 2]

`--config` is a `--speculative-config` of a method that has a model or layers draft. Without it, the
cases of `CASES` are measured. All kinds of a case run on one engine in turns, on one thread, with
the same prompts and seeds, and give the same answers but for rounding.

- tokens: the mean of a step and a sequence.
- gain: tokens per second of CPU time of the engine's thread, over those without in the same turn:
  the median of the turns (the least and the largest). Other processes disturb it by some percent.
- counted: the same, where steps are counted: each takes what the time model says of its rows. Only
  the CPU time of drafting itself is measured.
- below: the cells whose counted gain is below 0.98.

- copy: a text is repeated. code, prose: a text goes on. random: random tokens are continued with
  temperature 1, where no draft should pay.
- json: an object of a schema. Without drafts, forced tokens are left out as well.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

from bench.report import finish, print_table
from bench.requests import new_request
from disagg.config import EngineConfig, SpeculativeConfig, model_path
from disagg.engine.device.build import build_engine
from disagg.engine.device.draft_model import DraftModel
from disagg.engine.device.medusa_drafts import MedusaDrafts
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.engine.sched import drafting
from disagg.engine.sched.drafting import Drafting, Proposer
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.engine.sched.sequence import Sequence
from disagg.messages import Grammar, SamplingParams
from disagg.models.description import describe_model
from disagg.time_model import StepFeatures, StepTimeFit
from disagg.worker.first_steps import first_steps

NUM_TOKENS, FEW_TOKENS = 64, 32  # of an answer; few where there are many
MANY, FEW = 64, 8  # sequences; few have three times as many turns
LEAST = 0.98  # of the speed without drafts
WARM_UP = 2
SIZES = (1, 8, 32, 256)
TO_ITSELF = '{"method": "draft_model", "model": "smollm2", "quantization": "int4"}'
CASES: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("demo-large", '{"method": "draft_model", "model": "demo-small"}', SIZES),
    ("demo-large", '{"method": "early_exit", "exit_layer": 2}', SIZES),
    ("smollm2", TO_ITSELF, (1,)),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"enum": ["Ada Lovelace", "Alan Turing"]},
        "age_in_years": {"enum": [31, 45]},
        "is_subscribed": {"type": "boolean"},
        "preferred_language": {"enum": ["english", "german", "french"]},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"enum": ["5 High Street", "12 Mill Lane"]},
                "postal_code": {"enum": ["10115", "75001"]},
            },
            "required": ["street_and_number", "postal_code"],
            "additionalProperties": False,
        },
    },
    "required": [
        "customer_name",
        "age_in_years",
        "is_subscribed",
        "preferred_language",
        "shipping_address",
    ],
    "additionalProperties": False,
}
SENTENCE = "The committee met on {} and decided that the bridge over the river would be rebuilt. "
TEXTS = {
    "copy": "".join(map(SENTENCE.format, ("Monday", "Friday", "Sunday"))) * 2,
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
    "prose": "Once upon a time there was a little girl who lived in a village near the forest. ",
    "json": "A customer of the shop as JSON:\n",
}


@dataclass
class Work:
    """What a kind of drafts has done in a turn.

    Attributes:
        num_sequences: the sum of the sequences of all steps.
        cpu_s: seconds of CPU time.
        drafting_s: those of them beside the model's steps.
    """

    num_tokens: int = 0
    num_sequences: int = 0
    cpu_s: float = 0.0
    drafting_s: float = 0.0
    steps: list[StepFeatures] = field(default_factory=list)


class TimedDrafting(Drafting):
    """Knows how long it took, in seconds of CPU time."""

    spent_s = 0.0

    def propose(self, *args: Any) -> list[Sequence]:
        began_s = time.thread_time()
        waiting = super().propose(*args)
        self.spent_s += time.thread_time() - began_s
        return waiting


class Bench:
    """One engine, and the drafts that it may use."""

    def __init__(self, model: str, drafts: SpeculativeConfig, sizes: list[int]) -> None:
        torch.set_num_threads(1)
        self._model = describe_model(model_path(model, None))
        config = EngineConfig(
            device="cpu",
            num_threads=1,
            max_model_len=512,
            max_num_seqs=max(sizes),
            num_gpu_blocks_override=16 * max(2, *sizes),  # one sequence needs 32
            enable_prefix_caching=False,
            speculative_config=drafts,
        )
        self.engine: Engine = build_engine(config, self._model)[0]
        self._tokenizer = Tokenizer.from_str(self._model.read_tokenizer())
        self._fit = fit = StepTimeFit(first_steps(self.engine, time.thread_time))
        self.engine.scheduler.step_budget.times = lambda: fit.model
        self._model_drafts = model_drafts = self.engine.scheduler.drafting.proposer
        assert isinstance(model_drafts, DraftModel | MedusaDrafts)
        model_drafts._timer = time.thread_time
        model_drafts.measure(max(sizes))
        proposers: dict[str, Proposer | None] = {
            "without": None,
            "ngram": PromptLookup(drafts.num_speculative_tokens, 3),
            drafts.method: model_drafts,
        }
        budget, vocab_size = self.engine.scheduler.step_budget, self._model.config.vocab_size
        assert isinstance(self.engine.runner, ModelRunner)
        self._decoder = self.engine.runner.decoder
        self._kept = self._decoder.kept  # as the kind that drafts from states has left it
        self.kinds = {
            kind: TimedDrafting(budget, vocab_size, proposer)
            for kind, proposer in proposers.items()
        }
        self._numbers = count()

    def run(self, kind: str, text: str, num_seqs: int) -> Work:
        engine, work = self.engine, Work()
        engine.scheduler.drafting = self.kinds[kind]
        if is_model := self.kinds[kind].proposer is self._model_drafts:
            self._decoder.kept = self._kept
        drafting.MAX_FORCED = 0 if kind == "without" else 15
        num_tokens = FEW_TOKENS if num_seqs > MANY else NUM_TOKENS
        made = [self._sequence(text, seed, num_tokens) for seed in range(num_seqs)]
        for each in made:
            engine.submit(each)
        while any(each.num_output_tokens < 1 for each in made):
            self._step()
        work.num_tokens -= sum(each.num_output_tokens for each in made)
        work.cpu_s -= time.thread_time()
        work.drafting_s -= self.kinds[kind].spent_s
        while engine.has_work:
            work.num_sequences += len(engine.scheduler.running)
            self._step()
            work.steps.append(engine.last_plan.features)
        work.cpu_s += time.thread_time()
        work.drafting_s += self.kinds[kind].spent_s
        work.num_tokens += sum(each.num_output_tokens for each in made)
        if is_model:
            self._kept, self._decoder.kept = self._decoder.kept, None
        return work

    def row(self, text: str, num_seqs: int, num_turns: int) -> dict[str, Any]:
        """What each kind gains; the first turn does not count."""
        turns = [
            {kind: self.run(kind, text, num_seqs) for kind in self.kinds}
            for _ in range(1 + num_turns)
        ][1:]
        model = self._fit.model

        def measured(work: Work) -> float:
            return work.num_tokens / work.cpu_s

        def counted(work: Work) -> float:
            return work.num_tokens / (sum(map(model.step_s, work.steps)) + work.drafting_s)

        row: dict[str, Any] = {"text": text, "sequences": num_seqs}
        row["without"] = round(median(measured(turn["without"]) for turn in turns), 1)
        for kind in [*self.kinds][1:]:
            num_tokens = sum(turn[kind].num_tokens for turn in turns)
            num_sequences = sum(turn[kind].num_sequences for turn in turns)
            row[f"{kind} tokens"] = round(num_tokens / num_sequences, 2)
            for name, speed in (("gain", measured), ("counted", counted)):
                gains = [speed(turn[kind]) / speed(turn["without"]) for turn in turns]
                spread = median(gains), min(gains), max(gains)
                row[f"{kind} {name}"] = [round(each, 3) for each in spread]
        return row

    def _step(self) -> None:
        began_s = time.thread_time()
        self.engine.step()
        seconds = time.thread_time() - began_s - self.engine.scheduler.drafting.take_spent_s()
        self._fit.observe(self.engine.last_plan.features, seconds)

    def _sequence(self, text: str, seed: int, num_tokens: int) -> Sequence:
        model, rng = self._model, random.Random(seed)
        most = min(4000, model.config.vocab_size)
        tokens = [rng.randrange(3, most) for _ in range(48)]
        if text != "random":
            tokens = self._tokenizer.encode(TEXTS[text]).ids
        sampling: dict[str, Any] = {"temperature": 1.0 if text == "random" else 0.0, "seed": seed}
        if text == "json":
            sampling["grammar"] = Grammar("json", json.dumps(SCHEMA))
            sampling["stop_token_ids"] = tuple(model.eos_token_ids)
        wanted = SamplingParams(max_tokens=num_tokens, **sampling)
        block_size = self.engine.pool.block_size
        return Sequence(new_request(next(self._numbers), tokens, wanted, block_size))


def measure(model: str, config: str, sizes: SequenceOf[int], rounds: int) -> list[dict[str, Any]]:
    """The rows of a case."""
    print(f"\n{model}, drafts: {config}", flush=True)
    bench = Bench(model, msgspec.json.decode(config, type=SpeculativeConfig), [*sizes])
    for kind in WARM_UP * [*bench.kinds]:  # so that each knows how often its drafts are right
        bench.run(kind, "prose", min(MANY, max(sizes)))
    rows = [
        bench.row(text, num_seqs, 3 * rounds if num_seqs <= FEW else rounds)
        for num_seqs in sizes
        for text in (*TEXTS, "random")
    ]
    print_table([{name: _shown(value) for name, value in row.items()} for row in rows])
    return [{"model": Path(model).name, "drafts": config, **row} for row in rows]


def _shown(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    middle, least, most = value
    return f"{middle:.2f} ({least:.2f}-{most:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-large")
    parser.add_argument("--config")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    cases = CASES if asked.config is None else ((asked.model, asked.config, SIZES),)
    if asked.tiny:
        cases, asked.sizes, asked.rounds = cases[:1], [1], 1
    rows = []
    for model, config, sizes in cases:
        rows += measure(model, config, asked.sizes or sizes, asked.rounds)
    below = [
        f"{row['model']} {name.removesuffix(' counted')}, {row['text']}, {row['sequences']}:"
        f" {_shown(row[name])}"
        for row in rows
        for name in row
        if name.endswith(" counted") and row[name][0] < LEAST
    ]
    print("\nbelow:", "; ".join(below) or "none")
    finish("speculation", rows, below=below)


if __name__ == "__main__":
    main()
