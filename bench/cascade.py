"""Measures which share of the large model's accuracy and cost a cascade has (bundled models).

    python -m bench.cascade [--num-per-level N] [--tiny]

Prompts are labelled and come from every task and difficulty of the bundled models
(`scripts/demo_evaluate.py`). Their seed was used neither in training nor for the choice of the
default threshold. Each prompt goes to the small model, to the large model and to `auto`, over links
and with KV transfers as in production. `hard` has the levels where the models' card shows a gap.
`easy` has all others except recall, because recall's long prompts would outweigh everything.

Cost is tokens x parameters. It is counted in the engines: all tokens that the steps of a model
computed, prompts included. So it includes discarded answers of the small model, tokens computed
before a cancellation arrived, and rejected draft tokens. Prefix caching is off, because the last
model to be asked would find what the others computed.

The measures of the curve are predicted from the answers of both models alone
(`tools/calibrate/calibration.py`). Accuracy and cost of `auto` are those of the served answers.

TTFT is measured separately, one request at a time, with the three models in turns: from the call of
the HTTP application to its first bytes of text, also in CPU time of this process, which other work
on the machine hardly changes. The last table replays other ways to choose a model
on the same answers. The prompt judge alone is the way of RouteLLM (Ong et al., 2024), at the cost
of `auto`. A judge of whole answers is the way of FrugalGPT (Chen et al., 2023), at the quality of
`auto` if it reaches it. Their own judges are language models; here all ways use the same signals.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer

from bench.report import finish, print_table
from disagg import local
from disagg.cli.serve_config import bundled_cascade
from disagg.config import AUTO, CascadeConfig, EngineConfig, ServeConfig, TierConfig
from disagg.engine.sched.step import StepPlan
from disagg.kvtransfer.local_transport import LocalFleet
from disagg.router.prompt_judge import log_odds
from disagg.tools.calibrate.calibration import CascadeOutcome, Compared, curve, played
from disagg.tools.calibrate.command import CHAT, PATIENCE_S, Question, ScoredAnswer, asker, compared
from disagg.tools.calibrate.report import SHARES
from disagg.worker.parts import Parts, build_parts
from scripts.demo_evaluate import all_levels

SMALL, LARGE = TIERS = ("demo-small", "demo-large")
HARD = ("add-3", "add-4", "add-5", "subtract-3", "subtract-4", "multiply-2", "multiply-3")
GOAL = {"quality": 0.95, "cost": 0.60}  # of the large model's; at least, at most
TTFT_GOAL = 1.3  # times the large model's, at p50 on every task; at most
CONFIG = msgspec.convert(bundled_cascade(), CascadeConfig)
MAX_TOKENS = 256
NUM_PARALLEL = 16
QUIET_S = 0.2


def new_prompts(num_per_level: int) -> dict[str, list[Question]]:
    """By group."""
    tokenizer = Tokenizer.from_file(str(TierConfig(model=SMALL).directory / "tokenizer.json"))
    groups: dict[str, list[Question]] = {"hard": [], "easy": [], "recall": []}
    for level in all_levels():
        rng = random.Random(f"bench {level.name}")
        easy = "recall" if level.name.startswith("recall") else "easy"
        for _ in range(num_per_level):
            turn = level.make(rng, tokenizer)
            asked = Question([{"role": "user", "content": turn.question}], turn.answer)
            groups["hard" if level.name in HARD else easy].append(asked)
    return groups


def counted(counts: Counter[str]) -> Callable[..., Parts]:
    """Makes workers whose engines add the tokens that they compute, by model."""
    build_here = functools.partial(build_parts, local_fleet=LocalFleet())

    def build(config: ServeConfig, tier: TierConfig, *rest: Any) -> Parts:
        parts = build_here(config, tier, *rest)
        run = parts.engine.runner.run

        def counting(plan: StepPlan) -> Any:
            counts[tier.name] += plan.num_new_tokens
            return run(plan)

        parts.engine.runner.run = counting  # type: ignore[method-assign]
        return parts

    return build


async def measure(
    cluster: local.LocalCluster, counts: Counter[str], model: str, prompts: Sequence[Question]
) -> tuple[list[ScoredAnswer], int]:
    """The answers, and what they cost in tokens x parameters."""
    ask, places = asker(cluster), asyncio.Semaphore(NUM_PARALLEL)
    fields = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS}
    if model != AUTO:  # for the curve; scores are no tokens
        fields |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}

    async def one(asked: Question) -> ScoredAnswer:
        async with places:
            answer = await ask(fields | {"messages": asked.messages})
            return msgspec.json.decode(answer, type=ScoredAnswer)

    counts.clear()
    answers = list(await asyncio.gather(*map(one, prompts)))
    before = -1
    while before != counts.total():  # until what was cancelled has ended
        before = counts.total()
        await asyncio.sleep(QUIET_S)
    models = cluster.ingress.service.models
    return answers, sum(counts[tier] * models[tier].num_parameters for tier in TIERS)


def new_row(
    group: str,
    prompts: Sequence[Question],
    answers: dict[str, list[ScoredAnswer]],
    costs: dict[str, int],
) -> dict[str, Any]:
    row: dict[str, Any] = {"tasks": group, "prompts": len(prompts)}
    right = {
        model: sum(map(_is_right, answers[model], prompts)) / len(prompts) for model in answers
    }
    for model, share in right.items():
        row[f"{model} %"] = 100 * share
    row["quality %"] = 100 * right[AUTO] / right[LARGE]  # of the large model's
    row["cost %"] = 100 * costs[AUTO] / costs[LARGE]
    row["small alone cost %"] = 100 * costs[SMALL] / costs[LARGE]
    row["escalated %"] = 100 * sum(a.model == LARGE for a in answers[AUTO]) / len(prompts)
    return row


def _is_right(answer: ScoredAnswer, asked: Question) -> bool:
    return answer.is_right(asked.label)


def new_curve(group: str, answers: Sequence[Compared], parameters: Sequence[int]) -> Any:
    found = curve(answers, CONFIG.signal, CONFIG.num_judged_tokens, *parameters)
    row: dict[str, Any] = {"tasks": group, "signal": found.signal, "APGR": found.area}
    for share in SHARES:
        point = found.at_recovered(share)
        row[f"CPT {100 * share:.0f} %"] = 100 * point.escalated
        row[f"cost at {100 * share:.0f} %"] = 100 * point.cost
    row["cost at quality 95 %"] = 100 * found.cheapest(GOAL["quality"]).cost
    return row


async def first_text_s(
    cluster: local.LocalCluster, model: str, asked: Question
) -> tuple[float, float]:
    """Seconds from a streamed request to its first text, and CPU seconds of this process."""
    body = {"model": model, "messages": asked.messages, "temperature": 0, "stream": True}
    waiting = [{"type": "http.request", "body": msgspec.json.encode(body)}]
    found: list[tuple[float, float]] = []

    def passed() -> tuple[float, float]:
        return time.perf_counter() - began_s, time.process_time() - cpu_s

    async def receive() -> MutableMapping[str, Any]:
        if not waiting:
            await asyncio.Event().wait()  # this client does not go away
        return waiting.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        if not found and has_text(message.get("body", b"")):
            found.append(passed())

    headers = [(b"host", b"local"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
    began_s, cpu_s = time.perf_counter(), time.process_time()
    await cluster.ingress.app(scope, receive, send)
    return found[0] if found else passed()


def has_text(body: bytes) -> bool:
    """Whether server-sent events have some of the answer in them."""
    lines = (line.removeprefix(b"data: ") for line in body.splitlines() if b"data: {" in line)
    chunks = (json.loads(line) for line in lines)
    return any(choice["delta"].get("content") for each in chunks for choice in each["choices"])


async def measure_ttft(cluster: local.LocalCluster, num_per_level: int) -> list[dict[str, Any]]:
    """A row for each task, in milliseconds; prompts are others than those of the other tables."""
    tokenizer = Tokenizer.from_file(str(TierConfig(model=SMALL).directory / "tokenizer.json"))
    rows = []
    for level in all_levels():
        rng = random.Random(f"ttft {level.name}")
        times: dict[str, list[float]] = defaultdict(list)
        cpu_times: dict[str, list[float]] = defaultdict(list)
        for number in range(num_per_level + 1):
            content = level.make(rng, tokenizer).question
            asked = Question([{"role": "user", "content": content}], "")
            for model in (SMALL, LARGE, AUTO):
                seconds, cpu_s = await first_text_s(cluster, model, asked)
                if number:  # the first warms up
                    times[model].append(1e3 * seconds)
                    cpu_times[model].append(cpu_s)
        medians = {model: statistics.median(its) for model, its in times.items()}
        row: dict[str, Any] = {"task": level.name}
        row |= {f"{model} ms": medians[model] for model in medians}
        cpu = statistics.median(cpu_times[AUTO]) / statistics.median(cpu_times[LARGE])
        rows.append(row | {"auto / large": medians[AUTO] / medians[LARGE], "in CPU time": cpu})
    return rows


def other_ways(answers: Sequence[Compared], parameters: Sequence[int]) -> list[dict[str, Any]]:
    """Rows: what each way to choose a model makes of the same answers."""
    large_accuracy = sum(each.large_is_right for each in answers) / len(answers)
    rows = []

    def add(way: str, outcome: CascadeOutcome) -> CascadeOutcome:
        row: dict[str, Any] = {"way": way, "quality %": 100 * outcome.accuracy / large_accuracy}
        row |= {"cost %": 100 * outcome.cost, "start large %": 100 * outcome.started}
        rows.append(row | {"escalated %": 100 * outcome.escalated, "held": outcome.num_held})
        return outcome

    auto = add("auto", played(answers, CONFIG, *parameters))
    slow = replace(CONFIG, leads=(), prompt_judges=())
    add("all judged tokens", played(answers, slow, *parameters))
    never = replace(CONFIG, thresholds=(-math.inf,), leads=(0.0,))
    (judge,) = CONFIG.prompt_judges
    weights = dict(judge.weights)
    bars = sorted({log_odds(judge.bias, weights, each.prompt_token_ids) for each in answers})
    routed = [
        replace(never, prompt_judges=(replace(judge, start_above=bar),))
        for bar in bars[:: max(1, len(bars) // 100)]
    ]
    outcomes = [played(answers, each, *parameters) for each in routed]
    affordable = [each for each in outcomes if each.cost <= auto.cost] or outcomes[-1:]
    add("prompt judge alone", max(affordable, key=lambda each: each.accuracy))
    whole = curve(answers, "mean", MAX_TOKENS, *parameters)
    chosen = whole.cheapest(min(1.0, auto.accuracy / whole.large_accuracy))
    frugal = CascadeConfig(
        signal="mean", num_judged_tokens=MAX_TOKENS, thresholds=(chosen.threshold,)
    )
    add("judge of whole answers", played(answers, frugal, *parameters))
    return rows


async def run(num_per_level: int, num_timed: int) -> tuple[list[Any], list[Any], list[Any]]:
    engine = EngineConfig(num_threads=1, enable_prefix_caching=False)
    tiers = tuple(TierConfig(model=model, engine=engine, ttft_slo_s=PATIENCE_S) for model in TIERS)
    config = ServeConfig(tiers=tiers, transport="local", cluster_key="bench", cascade=CONFIG)
    counts: Counter[str] = Counter()
    groups = new_prompts(num_per_level)
    prompts: list[Question] = []
    answers: dict[str, list[ScoredAnswer]] = {model: [] for model in (*TIERS, AUTO)}
    costs: Counter[str] = Counter()
    rows = []
    async with local.running(config, counted(counts)) as cluster:
        timed = await measure_ttft(cluster, num_timed)
        parameters = [cluster.ingress.service.models[model].num_parameters for model in TIERS]
        for group, asked in groups.items():
            found = {m: await measure(cluster, counts, m, asked) for m in (*TIERS, AUTO)}
            its_answers = {model: its for model, (its, _) in found.items()}
            its_costs = {model: cost for model, (_, cost) in found.items()}
            rows.append(new_row(group, asked, its_answers, its_costs))
            prompts += asked
            for model in answers:
                answers[model] += its_answers[model]
            costs.update(its_costs)
    rows.append(new_row("all", prompts, answers, costs))
    both = [
        compared(small, large, asked.label)
        for small, large, asked in zip(answers[SMALL], answers[LARGE], prompts, strict=True)
    ]
    hard = both[: len(groups["hard"])]
    print_table(rows)
    print_table([new_curve("hard", hard, parameters), new_curve("all", both, parameters)])
    print_table(timed)
    ways = [{"tasks": "hard"} | row for row in other_ways(hard, parameters)]
    ways += [{"tasks": "all"} | row for row in other_ways(both, parameters)]
    print_table(ways)
    return rows, timed, ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-per-level", type=int, default=60)
    parser.add_argument("--num-timed", type=int, default=25, help="of each level, for TTFT")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.num_per_level, arguments.num_timed = 2, 1
    rows, timed, ways = asyncio.run(run(arguments.num_per_level, arguments.num_timed))
    goal = {f"goal_{name}": value for name, value in GOAL.items()}
    worst = max(row["auto / large"] for row in timed)
    finish("cascade", rows, ttft=timed, worst_ttft=worst, goal_ttft=TTFT_GOAL, ways=ways, **goal)


if __name__ == "__main__":
    main()
