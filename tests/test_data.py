"""The callable that answers rows of Ray Data, without Ray: from Arrow tables it makes columns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest

from disagg import AsyncLLM, SamplingParams
from disagg.batch.ask import Patience
from disagg.batch.lines import BatchReply
from disagg.data import ERROR, AnswerBatches, DisaggProcessorConfig, build_processor
from disagg.errors import StartupError
from tests.behind_uvicorn import served_port
from tests.llm.test_llm import SMALL
from tests.tiny_model import tiny_parts
from tests.tools.test_batch import KEY, config_of

ROWS: list[dict[str, Any]] = [
    {"id": 1, "messages": [{"role": "user", "content": "hello"}], "sampling_params": None},
    {"id": 2, "messages": [{"role": "user", "content": "bye"}], "sampling_params": {"seed": 3}},
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


@asynccontextmanager
async def answering(**config: Any) -> AsyncIterator[AnswerBatches]:
    answers = AnswerBatches(DisaggProcessorConfig(**config))
    try:
        yield answers
    finally:
        await answers.close()


async def answered(answers: AnswerBatches, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (columns,) = [each async for each in answers(pyarrow.Table.from_pylist(rows))]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


async def test_own_workers_and_a_fleet_answer_as_in_this_process(model: Path) -> None:
    rows = [row | {"sampling_params": GREEDY} for row in ROWS]
    async with answering(model_source=str(model), engine_kwargs=SMALL) as answers:
        own = await answered(answers, rows)
    async with (
        served_port(config_of(model), tiny_parts()) as port,
        answering(url=f"http://127.0.0.1:{port}", api_key=KEY) as answers,
    ):
        assert await answered(answers, rows) == own
    async with AsyncLLM(str(model), **SMALL) as llm:
        outputs = await llm.chat([row["messages"] for row in rows], SamplingParams(**GREEDY))
    for row, output in zip(own, outputs, strict=True):
        (expected,) = output.outputs
        assert row["generated_text"] == expected.text
        assert row["generated_tokens"] == expected.token_ids
        assert row["num_input_tokens"] == len(output.prompt_token_ids)
        assert row["num_generated_tokens"] == len(expected.token_ids)
        assert row["finish_reason"] == expected.finish_reason
    assert [row["id"] for row in own] == [1, 2]


class FakeFleet:
    """Is full for each first try, and refuses prompts that say so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def __call__(self, path: str, body: bytes) -> BatchReply:
        asked = path, json.loads(body)
        self.asked.append(asked)
        if self.asked.count(asked) == 1:
            return BatchReply(429, {"retry-after": "5"}, b"")
        if "no" in str(asked[1]):
            return BatchReply(400, {}, b'{"error": {"message": "It says no."}}')
        choice = {"text": "yes", "token_ids": [7], "finish_reason": "stop"}
        usage = {"prompt_tokens": 2, "completion_tokens": 1}
        return BatchReply(200, {}, json.dumps({"choices": [choice], "usage": usage}).encode())


async def fake_start(answers: AnswerBatches, fleet: FakeFleet) -> None:
    async def sleep(pause_s: float) -> None:
        assert pause_s >= 5

    async def start() -> Patience:
        return Patience(fleet, sleep=sleep)

    answers._started = asyncio.create_task(start())


async def test_rows_wait_for_a_full_fleet_and_what_is_none_is_left_out() -> None:
    fleet = FakeFleet()
    async with answering(url="http://fleet", model="m") as answers:
        await fake_start(answers, fleet)
        first, second = await answered(
            answers,
            [
                {"prompt": "a", "messages": None, "sampling_params": {"seed": 1, "stop": None}},
                {"prompt": "b", "messages": None, "sampling_params": {"seed": None, "stop": "x"}},
            ],
        )
    assert first["generated_text"] == second["generated_text"] == "yes"
    common = {"model": "m", "return_token_ids": True}
    asked = [
        ("/v1/completions", {"prompt": "a", "seed": 1, **common}),
        ("/v1/completions", {"prompt": "b", "stop": "x", **common}),
    ]
    assert fleet.asked == [asked[0]] * 2 + [asked[1]] * 2


async def test_a_row_that_is_refused_ends_the_job_or_says_why() -> None:
    rows: list[dict[str, Any]] = [{"prompt": "no"}, {"prompt": "a"}, {"prompt": None}]
    async with answering(url="http://fleet", should_continue_on_error=True) as answers:
        await fake_start(answers, FakeFleet())
        refused, fine, empty = await answered(answers, rows)
    assert "It says no." in refused[ERROR] and refused["generated_text"] == ""
    assert (fine["generated_text"], fine[ERROR]) == ("yes", "")
    assert "preprocess" in empty[ERROR]
    async with answering(url="http://fleet") as answers:
        await fake_start(answers, FakeFleet())
        with pytest.raises(RuntimeError, match=r"It says no\..*'prompt': 'no'"):
            await answered(answers, rows)


@pytest.mark.parametrize("config", [{}, {"url": "a", "model_source": "b"}])
def test_who_answers_must_be_said(config: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="either model_source"):
        build_processor(DisaggProcessorConfig(**config))
