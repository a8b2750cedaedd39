"""What is served is what one engine answers, by way of both pools; adapters come and go."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.command import Command
from tests.e2e.served.operate import num_pulls, until_pulled
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import PROMPTS, assert_same_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.mark.parametrize("model", ["tiny", "red", "green", "experts"])
def test_text_is_one_engines(
    server: Command, client: openai.OpenAI, engines: Mapping[str, SingleEngine], model: str
) -> None:
    """Also of KV that NIXL pulls: from two ranks to one process, or from one to two ranks."""
    num_bad = num_pulls(server, "failed") + num_pulls(server, "torn")
    for prompt, temperature in itertools.product(PROMPTS, (0.0, 1.0)):
        assert_same_text(client, model, engines[model], prompt, temperature)
    numbers = itertools.count()

    def ask_new() -> None:
        """What nobody has asked, so that its prompt is computed elsewhere."""
        prompt = f"{next(numbers)}: " + PROMPTS[-1]
        assert_same_text(client, model, engines[model], prompt)

    until_pulled(server, ask_new)
    assert num_pulls(server, "failed") + num_pulls(server, "torn") <= num_bad


def test_streamed_text_is_the_same(
    client: openai.OpenAI, engines: Mapping[str, SingleEngine]
) -> None:
    prompt = "streamed " * 20
    chunks = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == engines["tiny"].chat(prompt, 24)
    assert usage is not None
    assert usage.prompt_tokens == len(engines["tiny"].prompt(prompt))


def test_prefix_hits_are_counted(
    client: openai.OpenAI, engines: Mapping[str, SingleEngine]
) -> None:
    prompt, reference = "the same words again and again, told twice; " * 6, engines["tiny"]
    cached = []
    for _ in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=4,
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        assert answer.choices[0].message.content == reference.chat(prompt, 4)
    num_full_block_tokens = (len(reference.prompt(prompt)) - 1) // 16 * 16
    assert cached == [0, num_full_block_tokens, num_full_block_tokens]


def test_many_choices_and_logprobs(
    client: openai.OpenAI, engines: Mapping[str, SingleEngine]
) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPTS[1]}],
        temperature=0,
        max_tokens=6,
        n=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.message.content == engines["tiny"].chat(PROMPTS[1], 6)
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 6
        for position in choice.logprobs.content:
            assert position.top_logprobs[0].logprob == position.logprob  # greedy: the likeliest


def test_an_answer_follows_a_schema_through_both_pools(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3, "maxItems": 5}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPTS[2]}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        seed=3,
    )
    assert answer.choices[0].finish_reason == "stop"
    colors = json.loads(answer.choices[0].message.content or "")
    assert 3 <= len(colors) <= 5 and set(colors) <= {"red", "blue"}


def test_errors_are_sentences(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as too_long:
        client.completions.create(model="tiny", prompt="x" * 5000, max_tokens=4)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="huge", prompt="x", max_tokens=4)


def test_adapters_are_loaded_replaced_and_unloaded(
    client: openai.OpenAI, engines: Mapping[str, SingleEngine], place: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(place / "blue", tmp_path / "mine")
    of_it = {"lora_name": "mine", "lora_path": str(path)}
    with httpx.Client(base_url=str(client.base_url), timeout=60) as raw:
        loaded = raw.post("load_lora_adapter", json=of_it)
        assert loaded.status_code == 200, loaded.text
        assert {each.id for each in client.models.list()} == {
            *("tiny", "experts", "red", "green", "mine")
        }
        for _ in range(4):  # by either ingress
            assert_same_text(client, "mine", engines["blue"], PROMPTS[-1], 0.0)
        shutil.copytree(place / "red", path, dirs_exist_ok=True)
        again = raw.post("load_lora_adapter", json={**of_it, "load_inplace": True})
        assert again.status_code == 200, again.text
        for _ in range(4):
            assert_same_text(client, "mine", engines["red"], PROMPTS[-1], 0.0)
        gone = raw.post("unload_lora_adapter", json={"lora_name": "mine"})
        assert gone.status_code == 200, gone.text
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="mine", prompt="x", max_tokens=1)
        refused = raw.post("load_lora_adapter", json={**of_it, "lora_path": str(tmp_path)})
        assert refused.status_code == 400 and "is no LoRA adapter" in refused.text
