"""Requests of generated fields, many at once, at an engine of a real (tiny) model.

The first 1,000 of 10,000, all of which `make test-bench` has. Its tokenizer has tokens more than
the model has rows. Each request is answered or refused, and the engines live.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.grids import IS_WHOLE
from tests.test_local import chat, cluster, text
from tests.test_local_vocabulary import AT_LIMITS, BASES, BEYOND, changes, with_tokens

NUM_REQUESTS = 10_000 if IS_WHOLE else 1_000
NUM_AT_ONCE = 24
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"anyOf": [{}, True]}}}
SCHEMAS: list[Any] = [
    {"type": "string", "format": "password", "maxLength": 3},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": False},
    {"patternProperties": {"^a": {"type": "null"}, "^ab": {}}},
    {"oneOf": [{"$ref": "#/x"}, {"required": ["a"]}]},
    {"allOf": [{"type": "object", "properties": {"a": {"enum": [1, BEYOND]}}}], "not": {}},
    {"type": ["integer", "null"], "minimum": 1e308},
    {},
]
# Values at, below and beyond limits, and of other types, for fields of all APIs.
VALUES: dict[str, list[Any]] = {
    "n": [1, 2, 0, 129, "1"],
    "temperature": [0, 1e-9, 2, 2.1, -1, None, "1"],
    "top_p": [1e-9, 1, 0, 1.1],
    "top_k": [-1, 0, 1, 259, 260, 261, 2**31],
    "min_p": [0, 1, 1.1],
    "seed": [0, -(2**63), 2**63 - 1, 2**63],
    "repetition_penalty": [1e-3, 1, 2, 0],
    "presence_penalty": [-2, 2, 3],
    "frequency_penalty": [-2, 2, 3],
    "min_tokens": [0, 1, 3, 600],
    "max_tokens": [1, 2, 3, 0, 512, 2**31],
    "logprobs": [True, 0, 1, 20, 21],
    "top_logprobs": [0, 20, 21],
    "prompt_logprobs": [0, 20, 21],
    "logit_bias": [{str(each): bias} for each in AT_LIMITS for bias in (-100, 100, 101)],
    "allowed_token_ids": [[each] for each in AT_LIMITS] + [[], [0, 1]],
    "stop_token_ids": [[each] for each in AT_LIMITS],
    "bad_words": [["a"], [BEYOND], [""], ["a", "b" * 256]],
    "stop": ["a", [BEYOND], "", ["a"] * 17],
    "ignore_eos": [True, False, 1],
    "stream": [True, False],
    "echo": [True],
    "truncate_prompt_tokens": [-1, 1, 511, 512],
    "cache_salt": ["a b", "é" * 512, ""],
    "guided_regex": ["a{1,2}", "(", f"[ab]{BEYOND}"],
    "guided_json": SCHEMAS,
    "guided_choice": [["a", BEYOND], []],
    "response_format": [
        {"type": "json_object"},
        *({"type": "json_object", "schema": each} for each in SCHEMAS),
    ],
    "tools": [[TOOL], [TOOL, TOOL], []],
    "tool_choice": ["required", "auto", "none", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [True, False],
    "thinking_token_budget": [-1, 0, 1, 2**31],
    "reasoning_effort": ["none", "low", "high"],
    "timeout": [3600, 1e-6, -1],
    "priority": [0, 1000, -1],
    "return_token_ids": [True],
    "continue_final_message": [True],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
}


def generated(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """A path and fields each: those at limits alone, and then any of them together."""
    rng, single = random.Random(seed), list(changes())
    made = []
    for _ in range(NUM_REQUESTS):
        path, fields = rng.choice(single) if rng.random() < 0.3 else (rng.choice([*BASES]), {})
        names = rng.sample([*VALUES], rng.randint(0, 4))
        made.append((path, {name: rng.choice(VALUES[name]) for name in names} | fields))
    return made


@pytest.mark.timeout(900)
async def test_each_is_answered_or_refused_and_the_engines_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, statuses = iter(generated(1)), Counter[int]()
    async with cluster(with_tokens(tmp_path, "<last>", BEYOND, "</think>")) as (running, client):
        before = text(await chat(client, "hi", 3))

        async def send() -> None:
            for path, fields in requests:
                answer = await client.post(path, json=BASES[path] | fields)
                # Only the time limit of a millionth of a second can end a request that is right.
                allowed = (200, 400, 504) if fields.get("timeout") == 1e-6 else (200, 400)
                assert answer.status_code in allowed, (path, fields, answer.text[:500])
                assert "engine_failed" not in answer.text, (path, fields, answer.text[-500:])
                assert "request_failed" not in answer.text, (path, fields, answer.text[-500:])
                statuses[answer.status_code] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_AT_ONCE):
                tasks.create_task(send())
        assert text(await chat(client, "hi", 3)) == before
        for worker in running.workers:
            await worker.check()
    assert sum(statuses.values()) == NUM_REQUESTS and statuses[200] > NUM_REQUESTS / 20
    with capsys.disabled():
        print(f"\nAnswers: {dict(statuses)}")
