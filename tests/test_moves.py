"""A request that moves in mid-answer keeps everything: text, penalties, logprobs, grammar, stops.

The whole system in one process, with a real (tiny) model; only the links lose streams, at chosen
tokens. Each answer is compared with that of the same request when nothing happened.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from msgspec import structs

from disagg.config import SpeculativeConfig
from disagg.engine.sched.drafting import Drafting
from disagg.errors import WorkerLost
from disagg.kvtransfer.ticket import KVTicket
from disagg.local import LocalCluster
from disagg.messages import Prefetch, PutDelta, Start, TokenDelta, WireError
from disagg.worker import kv_export
from tests import test_local
from tests.deltas import pull
from tests.grids import some
from tests.models.heads import write_eagle3
from tests.test_local import ENGINE, LONG, cluster, until_empty

MAX_TOKENS = 36
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
LETTERS = list(range(64, 91))  # tokens that often end an answer that may end with them
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 100, "maximum": 999},
    "minItems": 7,
    "maxItems": 9,
}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {**DRAWN, "seed": 7, "top_k": 80},
    "penalties": {"temperature": 0, "repetition_penalty": 1.4},
    "counts": {**DRAWN, "seed": 3, "presence_penalty": 0.9, "frequency_penalty": 0.6},
    "logprobs": {**DRAWN, "seed": 5, "logprobs": True, "top_logprobs": 3},
    "choices": {**DRAWN, "seed": 9, "n": 3},
    "least": {**DRAWN, "seed": 11, "min_tokens": 20, "stop_token_ids": LETTERS},
    "schema": {
        **DRAWN,
        "seed": 19,
        "max_tokens": 120,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBERS}},
    },
    "expression": {"temperature": 0, "structured_outputs": {"regex": r"([a-z]{4,6}-){4}\d{3}"}},
    "most": {**DRAWN, "seed": 13, "ignore_eos": True, "max_tokens": 17},
}
STOPPED = {**DRAWN, "seed": 15}


@dataclass(frozen=True)
class Trouble:
    """What happens on a visit, at the first worker by that door.

    after: tokens of the visit that still arrive; if `in_all`, of the whole answer so far, and it is
        no matter whether a prefill worker made the first: a router does without a slow one.
    how: "lost" (the link ends), "failed" (the worker says so), "expired" (the ticket names blocks
        that were used again; after `after` tokens the link ends too, unless that is 0).
    """

    door: str
    after: int = 0
    how: str = "lost"
    in_all: bool = False


TROUBLES: dict[str, list[Trouble]] = {
    "prefill lost": [Trouble("prefill")],
    "ticket lost": [Trouble("prefill", 1)],
    "ticket expired": [Trouble("decode", how="expired")],
    "decode lost before a token": [Trouble("decode")],
    "decode lost": [Trouble("decode", 7)],
    "device failed": [Trouble("decode", 7, "failed")],
    "all of it": [
        Trouble("prefill"),
        Trouble("decode", 2, "expired"),
        Trouble("decode", 3, "failed"),
        Trouble("decode", 4),
        Trouble("decode"),
    ],
}


class TroubledWorkers:
    """The links of a cluster, in trouble. `router.dispatch.Workers`"""

    def __init__(self, running: LocalCluster, troubles: list[Trouble]) -> None:
        self.met: Counter[str] = Counter()
        self._links = running.ingress.links
        self._troubles = troubles
        self._left: dict[str, list[Trouble]] = {}
        running.ingress.dispatcher._workers = self

    def release(self, ticket: KVTicket) -> None:
        self._links.release(ticket)

    def prefetch(self, worker_id: str, asked: Prefetch) -> None:
        self._links.prefetch(worker_id, asked)

    def introduce(self, worker_id: str, source_id: str) -> None:
        self._links.introduce(worker_id, source_id)

    def _next(self, request_id: str, door: str, ticket: KVTicket | None) -> Trouble | None:
        """The first one left for this request that can happen here."""
        left = self._left.setdefault(request_id, list(self._troubles))
        for trouble in left:
            if trouble.door in ("any", door) and (trouble.how != "expired" or ticket is not None):
                left.remove(trouble)
                return trouble
        return None

    async def run(self, worker_id: str, start: Start, put: PutDelta, *, timeout_s: float) -> None:
        request, ticket = start.request, start.ticket
        door = "prefill" if start.hand_over else "decode"
        trouble = self._next(request.request_id, door, ticket)
        if trouble is not None and trouble.how == "expired":
            assert ticket is not None
            old = tuple(generation - 1 for generation in ticket.generations)
            start = structs.replace(start, ticket=replace(ticket, generations=old))
            trouble = replace(trouble, how="lost") if trouble.after else None
            self.met["expired"] += 1
        if trouble is not None and trouble.in_all:
            num_before = len(request.token_ids) - request.num_prompt_tokens
            trouble = replace(trouble, after=trouble.after - num_before)
        stream = pull(lambda take: self._links.run(worker_id, start, take, timeout_s=timeout_s))
        async with aclosing(stream):
            async for delta in _up_to(stream, trouble):
                put(delta)
        if trouble is None:
            return
        self.met[trouble.how] += 1
        if trouble.how == "lost":
            raise WorkerLost(f"Worker {worker_id} was lost.")
        put(
            TokenDelta(
                0, (), error=WireError.from_error(WorkerLost("The device fell off the bus."))
            )
        )


async def _up_to(
    stream: AsyncGenerator[TokenDelta, None], trouble: Trouble | None
) -> AsyncGenerator[TokenDelta, None]:
    """What arrives before the trouble, to the token."""
    num_left = 1 << 30 if trouble is None else trouble.after
    while num_left > 0:
        delta = await anext(stream, None)
        if delta is None:
            return
        if len(delta.token_ids) < num_left or trouble is None:
            num_left -= len(delta.token_ids)
            yield delta
            if delta.is_last:
                return
            continue
        scores = delta.logprobs
        yield TokenDelta(
            delta.stream_id,
            delta.token_ids[:num_left],
            None,
            None if scores is None else scores[:num_left],
            delta.num_cached_tokens,
        )
        return


@pytest.fixture(autouse=True)
def _short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a ticket is lost on its way, only time gives its blocks back."""
    monkeypatch.setattr(kv_export, "HOLD_TTL_S", 2.0)


async def ask(client: httpx.AsyncClient, name: str, salt: str, **fields: Any) -> dict[str, Any]:
    """The answer without what differs from one time to the next."""
    body = {"max_tokens": MAX_TOKENS, **FEATURES.get(name, {}), **fields}
    messages = [{"role": "user", "content": f"{name}: {LONG}"}]
    answer = await client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": messages, "cache_salt": f"{salt}-{name}", **body},
    )
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return {"choices": decoded["choices"], "usage": decoded["usage"]}


def without_scores(answer: dict[str, Any]) -> dict[str, Any]:
    choices = [{**choice, "logprobs": None} for choice in answer["choices"]]
    return {**answer, "choices": choices}


def scores(answer: dict[str, Any]) -> list[Any]:
    """All log-probabilities, flat; and with them the tokens that they belong to."""
    found = []
    for choice in answer["choices"]:
        for token in (choice["logprobs"] or {}).get("content", ()):
            for scored in (token, *token["top_logprobs"]):
                found += [scored["bytes"], pytest.approx(scored["logprob"], abs=1e-3)]
    return found


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> dict[str, dict[str, Any]]:
    async def run() -> dict[str, dict[str, Any]]:
        async with cluster(model, "local", 2, 2) as (_, client):
            answers = await asyncio.gather(*(ask(client, name, "calm") for name in FEATURES))
            found = dict(zip(FEATURES, answers, strict=True))
            found["stopped"] = await ask(client, "stopped", "calm", **STOPPED, logprobs=True)
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("name", some(["ticket lost", "ticket expired", "all of it"], TROUBLES))
async def test_an_answer_does_not_show_its_moves(
    name: str, model: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    async with cluster(model, "local", 2, 2) as (running, client):
        workers = TroubledWorkers(running, TROUBLES[name])
        answers = await asyncio.gather(*(ask(client, each, "trouble") for each in FEATURES))
        for how, count in Counter(trouble.how for trouble in TROUBLES[name]).items():
            # Further choices of a prompt need no prefill worker: the prompt is cached by then.
            assert workers.met[how] >= count * len(FEATURES) / 2, workers.met
        for each, answer in zip(FEATURES, answers, strict=True):
            expected = undisturbed[each]
            assert without_scores(answer) == without_scores(expected), each
            assert scores(answer) == scores(expected), each
        for worker in running.workers:
            await until_empty(worker)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
async def test_nor_does_it_with_drafts(
    method: Literal["ngram", "draft_model", "eagle3"],
    model: Path,
    tmp_path: Path,
    undisturbed: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On every worker, and of full length."""
    drafts = {"draft_model": model, "eagle3": write_eagle3(tmp_path / "head", model)}.get(method)
    asked = SpeculativeConfig(
        method=method, model=None if drafts is None else str(drafts), prompt_lookup_max=1
    )
    monkeypatch.setattr(test_local, "ENGINE", structs.replace(ENGINE, speculative_config=asked))
    monkeypatch.setattr(
        Drafting, "_limits", lambda self, proposer, some, *_: dict.fromkeys(some, 4)
    )
    async with cluster(model, "local", 2, 2) as (running, client):
        workers = TroubledWorkers(running, TROUBLES["all of it"])
        answers = await asyncio.gather(*(ask(client, each, "drafts") for each in FEATURES))
        assert workers.met["lost"] > len(FEATURES)
        for each, answer in zip(FEATURES, answers, strict=True):
            assert without_scores(answer) == without_scores(undisturbed[each]), each
            assert scores(answer) == scores(undisturbed[each]), each
        for worker in running.workers:
            await until_empty(worker)
        reports = running.ingress.fleet.reports()
        assert sum(status.num_drafted for _, status in reports) > 50


def test_the_features_are_there(undisturbed: dict[str, dict[str, Any]]) -> None:
    """Or it would say little that moves do not change them."""
    usage = {name: answer["usage"] for name, answer in undisturbed.items()}
    texts = {
        name: [choice["message"]["content"] for choice in answer["choices"]]
        for name, answer in undisturbed.items()
    }
    assert usage["most"]["completion_tokens"] == 17
    assert usage["greedy"]["completion_tokens"] == MAX_TOKENS
    assert 20 <= usage["least"]["completion_tokens"] < MAX_TOKENS
    assert len(set(texts["choices"])) == 3
    assert usage["choices"]["completion_tokens"] > 2 * 20
    assert len(scores(undisturbed["logprobs"])) == 2 * 4 * usage["logprobs"]["completion_tokens"]
    assert 7 <= len(json.loads(texts["schema"][0])) <= 9
    assert re.fullmatch(r"([a-z]{4,6}-){4}\d{3}", texts["expression"][0])
    for answer in usage.values():
        assert answer["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("seam", range(4))
async def test_a_stop_string_is_found_across_the_seam(
    seam: int, model: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    """Of its three tokens, `seam` come from the first worker and the others from the next."""
    (choice,) = undisturbed["stopped"]["choices"]
    tokens = [scored["token"] for scored in choice["logprobs"]["content"]]
    place, stop = next(
        (i, "".join(tokens[i : i + 3]))
        for i in range(4, len(tokens) - 3)
        if all(len(token) == 1 and token.isascii() for token in tokens[i : i + 3])
    )
    async with cluster(model, "local", 1, 2) as (running, client):
        fields = {**STOPPED, "stop": [stop]}
        calm = await ask(client, "stopped", "calm", **fields)
        workers = TroubledWorkers(running, [Trouble("decode", place + seam, in_all=True)])
        moved = await ask(client, "stopped", "trouble", **fields)
        assert workers.met["lost"] == (1 if seam < 3 else 0), "the whole string was there before"
        assert without_scores(moved) == without_scores(calm)
        (choice,) = moved["choices"]
        assert choice["finish_reason"] == "stop" and stop not in choice["message"]["content"]
        assert moved["usage"]["completion_tokens"] == place + 3
        for worker in running.workers:
            await until_empty(worker)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_moves_end_in_one_clear_error(is_stream: bool, model: Path) -> None:
    async with cluster(model, "local", 2, 2) as (running, client):
        workers = TroubledWorkers(running, [Trouble("any", 1)] * 50)
        body = {"model": "tiny", "messages": [{"role": "user", "content": LONG}]}
        answer = await client.post("/v1/chat/completions", json={**body, "stream": is_stream})
        if is_stream:
            lines = [line for line in answer.text.splitlines() if line]
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
            assert sum('"error"' in line for line in lines) == 1
            assert not any('"finish_reason":"' in line for line in lines), "an end and an error"
        else:
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
        assert error["code"] == "worker_lost" and "was lost" in error["message"]
        assert workers.met["lost"] == running.ingress.dispatcher._max_moves + 1
        for worker in running.workers:
            await until_empty(worker)
