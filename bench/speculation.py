"""Measures what drafts gain: tokens per second of CPU time, with each kind of draft and without.

    python -m bench.speculation [--model demo-large] [--sizes 1 8 32 256] [--rounds 2] [--tiny]
        [--config '{"method": "draft_model", "model": "demo-small"}']

`--config` is a `--speculative-config` of a method that has a model or layers draft. All kinds run
on one engine in turns, on one thread, with the same prompts and seeds, and give the same answers
but for rounding.

- tokens: the mean of a step and a sequence.
- gain: tokens per second of CPU time of the engine's thread, over those without. Other processes
  disturb it little, but by some percent.
- counted: the same, where steps are counted: each takes what the time model says of its rows. Only
  the CPU time of drafting itself is measured.

- copy: a text is repeated. code, prose: a text goes on. random: random tokens are continued with
  temperature 1, where no draft should pay.
- json: an object of a schema. Without drafts, forced tokens are left out as well.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

from bench.report import finish, print_table, take_turns
from disagg.blocks import hash_root
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
from disagg.messages import GenerateRequest, Grammar, SamplingParams
from disagg.models.description import describe_model
from disagg.time_model import StepFeatures, StepTimeFit
from disagg.worker.first_steps import first_steps

NUM_TOKENS = 64  # of an answer
WARM_UP = 2
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
    """What a kind of drafts has done in all turns.

    Attributes:
        num_sequences: the sum of the sequences of all steps.
        drafting_s: seconds of CPU time beside those of the model's steps.
    """

    num_tokens: int = 0
    num_sequences: int = 0
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

    def run(self, work: Work, kind: str, text: str, num_seqs: int) -> float:
        """Output tokens per second of CPU time. Adds to what the kind has done."""
        engine = self.engine
        engine.scheduler.drafting = self.kinds[kind]
        if is_model := self.kinds[kind].proposer is self._model_drafts:
            self._decoder.kept = self._kept
        drafting.MAX_FORCED = 0 if kind == "without" else 15
        made = [self._sequence(text, seed) for seed in range(num_seqs)]
        for each in made:
            engine.submit(each)
        while any(each.num_output_tokens < 1 for each in made):
            self._step()
        began_s, work.drafting_s = time.thread_time(), work.drafting_s - self.kinds[kind].spent_s
        num_before = sum(each.num_output_tokens for each in made)
        while engine.has_work:
            work.num_sequences += len(engine.scheduler.running)
            self._step()
            work.steps.append(engine.last_plan.features)
        seconds = time.thread_time() - began_s
        if is_model:
            self._kept, self._decoder.kept = self._decoder.kept, None
        num_tokens = sum(each.num_output_tokens for each in made) - num_before
        work.num_tokens += num_tokens
        work.drafting_s += self.kinds[kind].spent_s
        return num_tokens / seconds

    def counted(self, work: Work) -> float:
        """Tokens per second, where steps take what the time model says now."""
        steps_s = sum(map(self._fit.model.step_s, work.steps))
        return work.num_tokens / (steps_s + work.drafting_s)

    def _step(self) -> None:
        began_s = time.thread_time()
        self.engine.step()
        seconds = time.thread_time() - began_s - self.engine.scheduler.drafting.take_spent_s()
        self._fit.observe(self.engine.last_plan.features, seconds)

    def _sequence(self, text: str, seed: int) -> Sequence:
        model, rng = self._model, random.Random(seed)
        most = min(4000, model.config.vocab_size)
        tokens = [rng.randrange(3, most) for _ in range(48)]
        if text != "random":
            tokens = self._tokenizer.encode(TEXTS[text]).ids
        sampling: dict[str, Any] = {"temperature": 1.0 if text == "random" else 0.0, "seed": seed}
        if text == "json":
            sampling["grammar"] = Grammar("json", json.dumps(SCHEMA))
            sampling["stop_token_ids"] = tuple(model.eos_token_ids)
        request = GenerateRequest(
            request_id=str(next(self._numbers)),
            model="bench",
            token_ids=tuple(tokens),
            num_prompt_tokens=len(tokens),
            hash_root=hash_root("bench", self.engine.pool.block_size),
            block_hashes=(),
            sampling=SamplingParams(max_tokens=NUM_TOKENS, **sampling),
            deadline_unix_s=1e12,
        )
        return Sequence(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-large")
    parser.add_argument("--config", default='{"method": "draft_model", "model": "demo-small"}')
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    sizes, rounds = ([1], 1) if asked.tiny else (asked.sizes, asked.rounds)
    drafts = msgspec.json.decode(asked.config, type=SpeculativeConfig)
    bench = Bench(asked.model, drafts, sizes)
    for kind in WARM_UP * [*bench.kinds]:  # so that each knows how often its drafts are right
        bench.run(Work(), kind, "prose", max(sizes))
    rows = []
    for num_seqs in sizes:
        for text in (*TEXTS, "random"):
            works = {kind: Work() for kind in bench.kinds}
            speeds = take_turns(
                {kind: partial(bench.run, works[kind], kind, text, num_seqs) for kind in works},
                rounds,
            )
            counted = {kind: bench.counted(work) for kind, work in works.items()}
            row: dict[str, Any] = {"text": text, "sequences": num_seqs}
            row["without"] = round(speeds["without"], 1)
            for kind, work in list(works.items())[1:]:
                row[f"{kind} tokens"] = round(work.num_tokens / work.num_sequences, 2)
                row[f"{kind} gain"] = round(speeds[kind] / speeds["without"], 2)
                row[f"{kind} counted"] = round(counted[kind] / counted["without"], 2)
            rows.append(row)
    print_table(rows)
    finish("speculation", rows, drafts=f"{asked.config} for {Path(asked.model).name}")


if __name__ == "__main__":
    main()
