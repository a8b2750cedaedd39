"""Calibrate a cascade: find the confidence above which a small model's answer is kept."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from disagg import local
from disagg.config import (
    CascadeConfig,
    EngineConfig,
    PromptJudge,
    ServeConfig,
    Signal,
    TierConfig,
)
from disagg.errors import DisaggError, RequestError, StartupError
from disagg.host import usable_cores
from disagg.messages import TokenLogprobs
from disagg.tools.calibrate.calibration import (
    Compared,
    Curve,
    ModelSizes,
    Point,
    certify_lead,
    make_judge,
)
from disagg.tools.calibrate.report import as_yaml, console, report_curves, report_wait
from disagg.tools.prompt_lines import PromptLine, prompt_lines
from disagg.tools.server import Server, Usage, add_api_key

DEFAULTS = CascadeConfig()
CHAT = "/v1/chat/completions"
LABEL_HINT = (
    ' A line looks like {"prompt": "2 + 3 =", "label": "5"}; the label is the right answer, to'
    " which the answers of both models are compared."
)
PATIENCE_S = 3600.0  # TTFT SLO of local models, so that no prompt is refused while others wait

Ask: TypeAlias = Callable[[dict[str, Any]], Awaitable[bytes]]  # sends one chat request


class Question(PromptLine, kw_only=True, forbid_unknown_fields=True):
    """A line of the prompts file. `label`: the right answer."""

    label: str


class _Top(msgspec.Struct):
    logprob: float


class _Token(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Message(msgspec.Struct):
    content: str


class _ScoredChoice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs | None = None


class ScoredAnswer(msgspec.Struct):
    """The fields of a chat completion that calibration reads."""

    model: str
    choices: list[_ScoredChoice]
    usage: Usage
    prompt_token_ids: list[int] = []

    def is_right(self, label: str) -> bool:
        return self.choices[0].message.content.strip() == label.strip()

    @property
    def scores(self) -> tuple[TokenLogprobs, ...]:
        logprobs = self.choices[0].logprobs
        return tuple(
            TokenLogprobs(each.logprob, tuple((0, top.logprob) for top in each.top_logprobs))
            for each in (logprobs.content if logprobs is not None else ())
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    calibrate = verbs.add_parser("calibrate", help="find a threshold from labelled prompts")
    add = calibrate.add_argument
    add("models", nargs=2, metavar="MODEL", help="the small model and the large model")
    add(
        "--prompts",
        type=Path,
        required=True,
        help="JSONL file; each line has a prompt (or messages) and a label, the right answer",
    )
    add("--url", help="URL of a server that serves both models (default: load both here)")
    add_api_key(calibrate)
    add(
        "--quality",
        type=float,
        default=0.95,
        help="share of the large model's accuracy to keep (default: 0.95)",
    )
    add(
        "--risk",
        type=float,
        default=0.005,
        help="share of prompts that may lose a right answer because small answers are released"
        " before all judged tokens are there; 0 disables early release (default: 0.005)",
    )
    add(
        "--signal",
        choices=get_args(Signal),
        help="confidence signal (default: the one with the lowest cost)",
    )
    add("--threshold", type=float, help="use this threshold of --signal instead of searching one")
    add(
        "--num-judged-tokens",
        type=int,
        default=DEFAULTS.num_judged_tokens,
        help=f"number of tokens that are judged (default: {DEFAULTS.num_judged_tokens})",
    )
    add("--max-tokens", type=int, default=256, help="largest length of an answer (default: 256)")
    add("--parallel", type=int, default=16, help="number of prompts sent at once (default: 16)")
    add("--write", type=Path, help="write the result to a file for `disagg serve --cascade`")


def run(arguments: argparse.Namespace) -> int:
    """Raises `DisaggError` for invalid arguments, and for prompts or models that cannot be used."""
    if not 0.0 < arguments.quality <= 1.0:
        raise RequestError("The quality must be above 0 and at most 1.", param="quality")
    if not 0.0 <= arguments.risk < 1.0:
        raise RequestError("The risk must be at least 0 and below 1.", param="risk")
    if arguments.threshold is not None and arguments.signal is None:
        raise RequestError("A threshold needs a signal: give --signal too.", param="threshold")
    if arguments.num_judged_tokens < 1:
        raise RequestError(
            "The number of judged tokens must be at least 1.", param="num_judged_tokens"
        )
    prompts = [*prompt_lines(arguments.prompts, Question, "prompts", LABEL_HINT)]
    gather = _from_server if arguments.url else _from_here
    answers, parameters = asyncio.run(gather(arguments, prompts))
    signals: Sequence[Signal] = (arguments.signal,) if arguments.signal else get_args(Signal)
    curves = [Curve(answers, signal, arguments.num_judged_tokens, parameters) for signal in signals]
    best = min(curves, key=lambda each: each.cheapest(arguments.quality).cost)
    chosen = best.cheapest(arguments.quality)
    if arguments.threshold is not None:
        chosen = best.at(arguments.threshold)
    report_curves(arguments, curves, best, chosen, parameters)
    config = shorten_wait(answers, best, chosen, arguments.risk, parameters)
    report_wait(arguments, answers, config, parameters)
    written = as_yaml(config)
    if arguments.write is None:
        console.print(f"\n{written}", end="", markup=False)
    else:
        arguments.write.write_text(written, encoding="utf-8")
        console.print(
            f"Wrote {arguments.write}. Use it with: disagg serve {' '.join(arguments.models)}"
            f" --cascade {arguments.write}"
        )
    return 0


async def _from_server(
    arguments: argparse.Namespace, prompts: Sequence[Question]
) -> tuple[list[Compared], ModelSizes]:
    server = Server(arguments.url, api_key=arguments.api_key)
    served = {each.id: each.num_parameters for each in server.models()}
    for model in arguments.models:
        if not served.get(model):
            known = ", ".join(name for name, size in served.items() if size)
            raise StartupError(
                f"The server at {arguments.url} does not serve {model!r}, or does not report its"
                f" number of parameters; it serves {known or 'no model with that number'}.",
                param="url",
            )

    async def ask(body: dict[str, Any]) -> bytes:
        return await asyncio.to_thread(server.ask, CHAT, body)

    answers = await compare(
        ask, arguments.models, prompts, arguments.max_tokens, arguments.parallel
    )
    return answers, ModelSizes(*(served[model] for model in arguments.models))


async def _from_here(
    arguments: argparse.Namespace, prompts: Sequence[Question]
) -> tuple[list[Compared], ModelSizes]:
    engine = EngineConfig(num_threads=max(1, usable_cores() // len(arguments.models)))
    tiers = tuple(
        TierConfig(model=model, engine=engine, ttft_slo_s=PATIENCE_S) for model in arguments.models
    )
    config = ServeConfig(tiers=tiers, transport="local", cluster_key="calibration")
    with console.status("loading both models"):
        async with local.running(config) as cluster:
            names = [tier.name for tier in tiers]

            async def ask(body: dict[str, Any]) -> bytes:
                status, _, answer = await cluster.post(CHAT, msgspec.json.encode(body))
                if status != 200:
                    raise DisaggError(f"A prompt failed: {answer.decode(errors='replace')[:500]}")
                return answer

            answers = await compare(ask, names, prompts, arguments.max_tokens, arguments.parallel)
            models = cluster.ingress.service.models
            return answers, ModelSizes(*(models[name].num_parameters for name in names))


async def compare(
    ask: Ask,
    models: Sequence[str],
    prompts: Sequence[Question],
    max_tokens: int,
    num_parallel: int,
) -> list[Compared]:
    """Greedy answers of both models to all prompts. `models`: the small one, then the large one."""
    places = asyncio.Semaphore(num_parallel)

    async def one(model: str, question: Question) -> ScoredAnswer:
        body = {
            "model": model,
            "messages": question.conversation,
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        }
        async with places:
            return msgspec.json.decode(await ask(body), type=ScoredAnswer)

    async def both(question: Question) -> Compared:
        small, large = await asyncio.gather(*(one(model, question) for model in models))
        return Compared(
            small.usage.prompt_tokens,
            small.scores,
            large.usage.completion_tokens,
            small.is_right(question.label),
            large.is_right(question.label),
            tuple(small.prompt_token_ids),
        )

    return list(await asyncio.gather(*map(both, prompts)))


def shorten_wait(
    answers: Sequence[Compared],
    best: Curve,
    chosen: Point,
    risk: float,
    parameters: ModelSizes,
) -> CascadeConfig:
    """The chosen threshold, plus early releases and a prompt judge that shorten the wait."""
    config = CascadeConfig(
        signal=best.signal,
        num_judged_tokens=best.num_judged_tokens,
        thresholds=(float(f"{chosen.threshold:.6g}"),),
    )
    if risk:
        lead = certify_lead(answers, config, risk)
        if lead != math.inf:
            config = replace(config, leads=(lead,))
    judge = make_judge(answers, config, parameters)
    if judge is None:
        return config
    return replace(config, prompt_judges=(round_judge(judge),))


def round_judge(judge: PromptJudge) -> PromptJudge:
    """The judge with rounded weights; tokens whose weight rounds to 0 are left out."""
    weights = ((token, round(weight, 2)) for token, weight in judge.weights)
    assert judge.start_above is not None
    return PromptJudge(
        round(judge.bias, 3),
        tuple((token, weight) for token, weight in weights if weight),
        round(judge.start_above, 3),
    )
