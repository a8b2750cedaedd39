"""Experts, sinks, latents and other norms in the whole system: the text is that of transformers.

Prompts are prefilled on one worker and decoded on another, hit a prefix, and are preempted. One
model has latents and an index of them, one windows in some layers, one sinks, and one recurrent
states; others are compared in `tests/models`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from disagg import local
from disagg.config import EngineConfig, PoolConfig, ServeConfig, TierConfig
from disagg.local import LocalCluster
from tests.grids import some
from tests.models.checkpoints import config_class
from tests.tiny_model import tiny_parts, write_tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # far from uniform, so that a wrong KV block changes the answer
}
DELTA_NETS = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "rms_norm_eps": 1e-3,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3.2": (
        "DeepseekV32",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "index_topk": 48,
            "index_head_dim": 20,
            "index_n_heads": 12,
        },
    ),
    "gemma3": ("Gemma3", {"sliding_window": 30, "sliding_window_pattern": 2}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 30,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            **DELTA_NETS,
        },
    ),
    "qwen3.5": ("Qwen3_5", DELTA_NETS),
}
EACH_RUN = ["deepseek-v3.2", "gemma3", "gpt-oss", "qwen3.5"]
SHARED = "A preamble of several blocks that all of these prompts begin with. " * 3
PROMPTS = [SHARED + end for end in ("The first.", "The second one!", "3", "And a fourth?")]
NUM_TOKENS = 40
MOST_ROUNDS = 20


@functools.cache
def _model_and_texts(directory: Path, name: str) -> tuple[Path, list[str]]:
    """The directory of a model, and what transformers says with it."""
    model = _write(directory / name, name)
    return directory / name, _expected(model, directory / name)


def _write(directory: Path, name: str) -> Any:
    directory.mkdir()
    end_id = write_tiny_tokenizer(directory)
    family, changes = MODELS[name]
    config = config_class(family)(**{**SHAPE, **changes}, eos_token_id=end_id)
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
    model.save_pretrained(directory)
    return model


def _expected(model: Any, directory: Path) -> list[str]:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        texts.append(tokenizer.decode(made[0, ids.shape[1] :].tolist()))
    return texts


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@asynccontextmanager
async def _completing(
    config: ServeConfig, name: str
) -> AsyncIterator[tuple[LocalCluster, Callable[[str | list[int]], Awaitable[Any]]]]:
    """A cluster, and what answers a prompt there: with the body of the reply."""
    async with local.running(config, tiny_parts()) as running:
        app = httpx.ASGITransport(running.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:

            async def complete(prompt: str | list[int]) -> Any:
                answer = await client.post(
                    "/v1/completions",
                    json={
                        "model": name,
                        "prompt": prompt,
                        "max_tokens": NUM_TOKENS,
                        "temperature": 0,
                        "return_token_ids": True,
                    },
                )
                assert answer.status_code == 200, answer.text
                return answer.json()

            yield running, complete


def _engine(num_blocks: int) -> EngineConfig:
    return EngineConfig(
        dtype="float32",
        block_size=16,
        num_threads=1,
        num_gpu_blocks_override=num_blocks,
        max_model_len=288,
        max_num_seqs=8,
        max_num_batched_tokens=96,
    )


@pytest.mark.usefixtures("no_room_to_grow")
@pytest.mark.parametrize("name", some(EACH_RUN, MODELS))
async def test_text_is_that_of_transformers(name: str, directory: Path) -> None:
    model, expected = _model_and_texts(directory, name)
    assert len(set(expected)) == len(expected)
    # 12 that all share and 5 each for two of the four; with windows or states, a little more.
    num_blocks = {"deepseek-v3.2": 24}.get(name, 32)
    tier = TierConfig(model=str(model), engine=_engine(num_blocks), ttft_slo_s=None)
    config = ServeConfig(tiers=(tier,), transport="local", cluster_key="key")
    async with _completing(config, name) as (running, ask):

        async def complete(prompt: str) -> str:
            return str((await ask(prompt))["choices"][0]["text"])

        assert await complete(PROMPTS[0]) == expected[0]
        cores = [worker._core for worker in running.workers]
        for _ in range(MOST_ROUNDS):  # until two answers have met that do not fit together
            assert await asyncio.gather(*map(complete, PROMPTS)) == expected
            if any(core.status().num_preempted for core in cores):
                break
        assert sum(len(core.status().transfers) for core in cores), "nothing was pulled"
        assert sum(core.status().num_preempted for core in cores), "nothing was preempted"


@pytest.mark.usefixtures("no_room_to_grow")
async def test_each_turn_of_a_conversation_goes_on_from_the_last_answer(directory: Path) -> None:
    """Where layers have recurrent states, and the router knows it."""
    model, expected = _model_and_texts(directory, "qwen3.5")
    tier = TierConfig(model=str(model), engine=_engine(200), prefill=PoolConfig(num_replicas=0))
    config = ServeConfig(tiers=(tier,), transport="local", cluster_key="key")
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt, num_cached, num_whole = tokenizer.encode("A first question").ids, [], [0]
    async with _completing(config, "qwen3.5") as (_, ask):
        for _ in range(3):
            body = await ask(prompt)
            num_cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
            prompt += body["choices"][0]["token_ids"]
            num_whole.append((len(prompt) - 1) // 16 * 16)
            prompt += tokenizer.encode(" and one more").ids
        assert (await ask(PROMPTS[0]))["choices"][0]["text"] == expected[0]
    assert num_cached == num_whole[:3] and num_cached[2] > num_cached[1] > 16
