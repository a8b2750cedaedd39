"""Compares ways to answer with a small and a large model: quality, cost and times of each.

    python -m bench.cascade [--prompts prompts.jsonl] [--deferrals 0 0.3 0.6 0.9 0.99] [--tiny]

`prompts.jsonl` is as for `disagg cascade calibrate`; by default what the demo models were not
trained on. One greedy request at a time.

- small, large: one of the models alone. auto: the judged cascade (docs/cascade.md), replayed from
  these two.
- deferral: speculative cascades. The small model drafts 4 tokens at a time, and those stand that
  the large one finds less likely than its likeliest by at most this share; 0 is exact.
- right: percent of the answers. tokens x parameters: of all tokens that went through a model,
  drafts also where they are wrong, in percent of large. steps: of the large model, in percent of
  large alone.
- TTFT and answer: mean milliseconds, counted: each step takes what the time model of its model
  says of its tokens, as measured here at the start.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import msgspec

from bench.report import finish, print_table
from bench.requests import new_request
from disagg.api.served_model import ServedModel
from disagg.cli.serve_config import bundled_cascade
from disagg.config import CascadeConfig, EngineConfig, SpeculativeConfig, model_path
from disagg.engine.device.build import build_engine
from disagg.engine.device.deferral import Deferral
from disagg.engine.device.draft_model import DraftModel
from disagg.engine.device.runner import ModelRunner
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Sampled, StepPlan
from disagg.messages import SamplingParams, TokenLogprobs
from disagg.models.description import describe_model
from disagg.router.cascade import first_verdict, is_poor, lead_to_release
from disagg.time_model import StepFeatures, StepTimeModel
from disagg.tools.calibrate.command import LABEL_HINT, Question
from disagg.tools.prompt_lines import prompt_lines
from disagg.worker.first_steps import first_steps

ROOT = Path(__file__).parent.parent
SMALL, LARGE = "demo-small", "demo-large"
DRAFTS = SpeculativeConfig(method="draft_model", model=SMALL)
MAX_TOKENS = 128


@dataclass
class Work:
    """What one or both models have done for an answer.

    cost: tokens times parameters. num_steps: of the large model.
    """

    is_right: bool = False
    cost: float = 0.0
    num_steps: int = 0
    ttft_s: float = 0.0
    took_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)

    def add(self, features: StepFeatures, times: StepTimeModel, parameters: int) -> None:
        self.took_s += times.step_s(features)
        self.cost += parameters * (features.num_new_tokens + features.num_decoding)


class Model:
    """A model's engine, and perhaps the draft model that it has."""

    def __init__(self, name: str, drafts: SpeculativeConfig | None = None) -> None:
        description = describe_model(model_path(name, None))
        config = EngineConfig(
            device="cpu",
            num_threads=1,
            max_model_len=2048,
            max_num_seqs=1,
            max_num_batched_tokens=2048,
            num_gpu_blocks_override=256,
            enable_prefix_caching=False,
            speculative_config=drafts,
        )
        self.engine = build_engine(config, description)[0]
        self.served = ServedModel.from_description(description, name=name, block_size=16)
        self.times = first_steps(self.engine, time.thread_time)
        self.is_large = name == LARGE
        self.drafter: Model | None = None
        self._work = Work()

    def draft_with(self, small: Model) -> None:
        """Count the steps of the draft model as those of `small`, which is the same."""
        self.drafter = small
        proposer = self.engine.scheduler.drafting.proposer
        assert isinstance(proposer, DraftModel)
        run = proposer._runner.run

        def counting(plan: StepPlan) -> list[Sampled]:
            self._work.add(plan.features, small.times, small.served.num_parameters)
            return run(plan)

        proposer._runner.run = counting  # type: ignore[method-assign]

    def defer(self, share: float) -> None:
        assert isinstance(self.engine.runner, ModelRunner)
        self.engine.runner.sampler._deferral = Deferral(share) if share else None

    def answer(self, prompt: list[int], label: str) -> Work:
        self._work = work = Work()
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            stop_token_ids=self.served.eos_token_ids,
            logprobs=0,
        )
        request = new_request("bench", prompt, sampling, self.engine.pool.block_size)
        self.engine.submit(Sequence(request))
        while self.engine.has_work:
            for event in self.engine.step():
                work.tokens += event.token_ids
                work.scores += event.logprobs or ()
            work.add(self.engine.last_plan.features, self.times, self.served.num_parameters)
            work.num_steps += self.is_large
            work.ttft_s = work.ttft_s or work.took_s
        said = self.served.tokenizer.decode(work.tokens)
        work.is_right = said.strip() == label.strip()
        return work


def auto(small: Work, large: Work, prompt: list[int], model: Model) -> Work:
    """What the bundled cascade would have done with these answers, of which `model` gave one."""
    config = msgspec.convert(bundled_cascade(), CascadeConfig)
    (judge,) = config.prompt_judges
    if is_poor(judge, dict(judge.weights), prompt):
        return large
    lead = lead_to_release(config, 0)
    verdict = first_verdict(config, config.thresholds[0], small.scores, 0, True, lead)
    assert verdict is not None
    judged = Work()
    judged.cost = model.served.num_parameters * (len(prompt) + verdict.num_tokens - 1)
    decode_s = model.times.decode_step_s(1, len(prompt))
    judged.took_s = small.ttft_s + (verdict.num_tokens - 1) * decode_s
    if verdict.is_sure:
        return Work(small.is_right, small.cost, 0, judged.took_s, small.took_s)
    return Work(
        large.is_right,
        judged.cost + large.cost,
        large.num_steps,
        judged.took_s + large.ttft_s,
        judged.took_s + large.took_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, default=ROOT / "tests" / "held_out.jsonl")
    parser.add_argument("--deferrals", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.9, 0.99])
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    questions = [*prompt_lines(asked.prompts, Question, "prompts", LABEL_HINT)]
    if asked.tiny:
        questions, asked.deferrals = questions[60::60], [0.0, 0.9]
    small, large = Model(SMALL), Model(LARGE)
    both = Model(LARGE, DRAFTS)
    both.times = large.times
    both.draft_with(small)
    ways: dict[str, list[Work]] = {}
    template, tokenizer = large.served.template, large.served.tokenizer
    assert template is not None
    for question in questions:
        prompt = tokenizer.encode_chat(template.render(question.conversation))
        alone = small.answer(prompt, question.label)
        whole = large.answer(prompt, question.label)
        named = {"small": alone, "large": whole, "auto": auto(alone, whole, prompt, small)}
        for share in asked.deferrals:
            both.defer(share)
            named[f"deferral {share:g}"] = both.answer(prompt, question.label)
            assert share or named["deferral 0"].tokens == whole.tokens, question
        for name, work in named.items():
            ways.setdefault(name, []).append(work)
    rows = []
    cost = fmean(each.cost for each in ways["large"])
    num_steps = fmean(each.num_steps for each in ways["large"])
    for name, works in ways.items():
        rows.append(
            {
                "way": name,
                "right": round(100 * fmean(each.is_right for each in works), 1),
                "tokens x parameters": round(100 * fmean(each.cost for each in works) / cost, 1),
                "steps": round(100 * fmean(each.num_steps for each in works) / num_steps, 1),
                "TTFT ms": round(1e3 * fmean(each.ttft_s for each in works), 2),
                "answer ms": round(1e3 * fmean(each.took_s for each in works), 2),
            }
        )
    print_table(rows)
    finish("cascade", rows, prompts=len(questions))


if __name__ == "__main__":
    main()
