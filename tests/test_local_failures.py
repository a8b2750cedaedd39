"""A request that its model or a bug cannot serve ends alone, on the worker that has it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from disagg.engine.device.logit_edits import LogitEdits
from disagg.engine.device.sampler import Chosen, Sampler
from disagg.engine.sched.speculation import Continued
from disagg.local import LocalCluster
from tests.test_local import body, chat, cluster, until_empty

UNLUCKY_SEED = 666


async def fails_alone(
    running: LocalCluster,
    client: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    code: str,
    **unlucky: Any,
) -> str:
    """Other requests have the answers that they had before; returns the message of this one."""
    content = "others go on"
    alone = [await chat(client, content, 40, temperature=1, seed=seed) for seed in range(3)]
    asked = [chat(client, content, 40, temperature=1, seed=seed) for seed in range(3)]
    others = asyncio.gather(*asked)
    failed = await client.post("/v1/chat/completions", json=body("what fails", **unlucky))
    for answer, expected in zip(await others, alone, strict=True):
        assert answer["choices"] == expected["choices"]
    error = failed.json()["error"]
    assert (failed.status_code, error["code"]) == (500, code), failed.text
    request_id = f"chatcmpl-{failed.headers['x-request-id']}"
    logged = [each for each in caplog.records if each.name == "disagg.worker.streams"]
    assert [getattr(each, "request_id", "") for each in logged] == [request_id]
    told = (await client.get(f"/debug/requests/{request_id}")).json()
    assert len(told["routes"]) == 1, "it was sent to a second worker"
    for worker in running.workers:
        assert worker._thread.failed is None
        await until_empty(worker)
    message: str = error["message"]
    return message


@pytest.mark.parametrize("num_before", [0, 3])
async def test_a_request_whose_numbers_break_a_step(
    num_before: int,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With its first step, or in the middle of its answer. Its worker goes on."""
    edits_of = LogitEdits.apply_

    def breaks(self: LogitEdits, logits: Tensor, sequences: SequenceOf[Continued]) -> None:
        for each in sequences:
            if each.sampling.seed == UNLUCKY_SEED and each.num_output_tokens == num_before:
                raise IndexError("planted")
        edits_of(self, logits, sequences)

    monkeypatch.setattr(LogitEdits, "apply_", breaks)
    unlucky = {"seed": UNLUCKY_SEED, "logit_bias": {"5": 1.0}}
    async with cluster(model, num_prefill=0, num_decode=2) as (running, client):
        message = await fails_alone(running, client, caplog, "request_failed", **unlucky)
        assert "planted" in message


def before_samples(
    monkeypatch: pytest.MonkeyPatch, does: Callable[[Tensor, SequenceOf[Continued]], None]
) -> None:
    """Do something with the logits and sequences of each step, before its tokens are chosen."""
    sample = Sampler.sample

    def then_sample(
        self: Sampler, logits: Tensor, sequences: SequenceOf[Continued], *args: Any, **named: Any
    ) -> Chosen:
        does(logits, sequences)
        return sample(self, logits, sequences, *args, **named)

    monkeypatch.setattr(Sampler, "sample", then_sample)


async def test_a_request_whose_logits_are_nan(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of its answer, beside others; and each such request is counted."""

    def spoil(logits: Tensor, sequences: SequenceOf[Continued]) -> None:
        for row, each in enumerate(sequences):
            if each.sampling.seed == UNLUCKY_SEED and each.num_output_tokens == 3:
                logits[row, 5] = math.nan

    before_samples(monkeypatch, spoil)
    async with cluster(model, num_prefill=0, num_decode=2) as (running, client):
        message = await fails_alone(running, client, caplog, "invalid_logits", seed=UNLUCKY_SEED)
        assert "NaN" in message
        counted = [
            line.split()[-1]
            for line in (await client.get("/metrics")).text.splitlines()
            if line.startswith("disagg_worker_corrupted_requests_total{")
        ]
        assert sorted(counted) == ["0.0", "1.0"]


async def test_a_request_that_breaks_an_engine_breaks_no_second_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its numbers are right by themselves, so nobody can tell whose fault the failed step is."""

    def breaks(logits: Tensor, sequences: SequenceOf[Continued]) -> None:
        if logits.any() and any(each.sampling.seed == UNLUCKY_SEED for each in sequences):
            raise RuntimeError("planted")

    before_samples(monkeypatch, breaks)
    async with cluster(model, num_prefill=0, num_decode=2) as (running, client):
        failed = await client.post("/v1/chat/completions", json=body("hi", seed=UNLUCKY_SEED))
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_failed")
        request_id = f"chatcmpl-{failed.headers['x-request-id']}"
        (logged,) = (each for each in caplog.records if each.name == "disagg.worker.streams")
        assert getattr(logged, "request_id", "") == request_id
        told = (await client.get(f"/debug/requests/{request_id}")).json()
        assert len(told["routes"]) == 1, "it was sent to a second worker"
        broken = [worker for worker in running.workers if worker._thread.failed is not None]
        assert len(broken) == 1
        await chat(client, "others go on", 4)
