"""KV with scales, from one engine's text to two workers': the same text, wherever it is decoded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from disagg import local
from disagg.config import (
    ASSETS,
    SCALED_KV_BITS,
    EngineConfig,
    KVCacheDType,
    PoolConfig,
    ServeConfig,
    TierConfig,
)
from disagg.engine.device.build import build_engine
from disagg.engine.device.kv_shape import choose_format
from disagg.engine.engine import Engine
from disagg.errors import StartupError, TransferFailed
from disagg.kernels.kv_pages import FORMATS as FORMATS_BY_NAME
from disagg.kernels.kv_pages import SCALE_NBYTES, new_pages
from disagg.kernels.torch import attention as torch_attention
from disagg.kvtransfer.pulls import PullBook, describe
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.models.decoder import load_model
from disagg.models.description import describe_model
from tests.e2e.single_engine import SingleEngine
from tests.engine.device.test_runner import config, new_sequence, prompts, run
from tests.grids import some
from tests.held_out import NUM_PER_LEVEL, held_out
from tests.models.paging import Tokens, make_batch
from tests.poison import poison_new_blocks
from tests.tiny_model import tiny_parts

ENGINE = EngineConfig(
    dtype="float32", num_threads=1, num_gpu_blocks_override=96, max_model_len=512, max_num_seqs=8
)
PROMPTS = ("a prompt with so many blocks that it is prefilled elsewhere: " * 4, "short", "x" * 96)
FORMATS: tuple[Any, ...] = ("float32", "int8", "int4", "fp8")


def engine_with(kv_cache_dtype: Any, **changes: Any) -> EngineConfig:
    return msgspec.structs.replace(ENGINE, kv_cache_dtype=kv_cache_dtype, **changes)


@pytest.fixture(scope="module")
def reference(model: Path) -> Callable[[str], SingleEngine]:
    """By the format of its KV, made once."""
    return functools.cache(lambda name: SingleEngine(model, engine_with(name)))


@pytest.mark.parametrize(
    ("kv_cache_dtype", "transport"),
    some([("int8", "nixl"), ("int4", "local")], product(FORMATS[1:], ("nixl", "local"))),
)
async def test_pulled_blocks_give_the_text_of_one_engine(
    model: Path,
    reference: Callable[[str], SingleEngine],
    kv_cache_dtype: Any,
    transport: Literal["local", "nixl"],
) -> None:
    engine = engine_with(kv_cache_dtype)
    tier = TierConfig(
        model=str(model),
        engine=engine,
        prefill=PoolConfig(num_replicas=1),
        decode=PoolConfig(num_replicas=1),
    )
    whole = ServeConfig(tiers=(tier,), transport=transport, cluster_key="key")
    async with local.running(whole, tiny_parts()) as running:
        for prompt in PROMPTS:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 24,
                "temperature": 0,
            }
            status, _, answer = await running.post(
                "/v1/chat/completions", msgspec.json.encode(body)
            )
            assert status == 200, answer
            said = msgspec.json.decode(answer)["choices"][0]["message"]["content"]
            assert said == reference(kv_cache_dtype).chat(prompt, 24)
        cores = [worker._core for worker in running.workers]
        assert sum(len(core.status().transfers) for core in cores), "nothing was pulled"


def test_formats_never_mix(model: Path) -> None:
    """Blocks of int8 and of e4m3 have as many bytes, and are refused all the same, in words."""
    sides = {}
    for worker_id, name in enumerate(FORMATS):
        _, kv_cache = build_engine(engine_with(name), describe_model(model))
        assert name in kv_cache.layout
        slab = Slab(
            kv_cache.base_address,
            kv_cache.num_blocks,
            kv_cache.block_nbytes,
            kv_cache.layout,
            owner=kv_cache,
        )
        stamps = Stamps(kv_cache.num_blocks, f"worker-{worker_id}", 1)
        sides[name] = (slab, describe("local", slab, stamps))
    assert sides["int8"][0].block_nbytes == sides["fp8"][0].block_nbytes
    assert sides["int4"][0].block_nbytes == 0.6 * sides["int8"][0].block_nbytes  # heads of 16
    for mine, theirs in permutations(FORMATS, 2):
        book = PullBook(sides[mine][0], "local")
        with pytest.raises(TransferFailed, match=f":{theirs}.*:{mine}"):
            book.add_peer(sides[theirs][1])


def greedy(engine: Engine) -> list[list[int]]:
    return run(engine, [new_sequence(str(i), p, temperature=0.0) for i, p in enumerate(prompts())])


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_chunks_hits_and_preemption_change_nothing(
    model: Path, kv_cache_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every new block was NaN before it was written, its scales included."""
    poisoned = poison_new_blocks(monkeypatch)
    tight, _ = build_engine(config(kv_cache_dtype=kv_cache_dtype), describe_model(model))
    roomy, _ = build_engine(
        config(
            kv_cache_dtype=kv_cache_dtype,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=200,
            enable_prefix_caching=False,
        ),
        describe_model(model),
    )
    assert greedy(tight) == greedy(roomy)
    assert tight.scheduler.num_preempted > 0 and poisoned.num_blocks > 100


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_poison_finds_what_was_never_written(
    model: Path, kv_cache_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_blocks(monkeypatch)
    monkeypatch.setattr(torch_attention, "store", lambda *given: None)
    engine, _ = build_engine(config(kv_cache_dtype=kv_cache_dtype), describe_model(model))
    with pytest.raises(AssertionError, match="nobody had written"):
        greedy(engine)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "device", "capability", "possible"),
    [
        ("float32", "bfloat16", "cpu", None, "auto, float32, int8, int4, fp8"),
        ("bfloat16", "float16", "cpu", None, "auto, bfloat16, int8, int4, fp8"),
        ("bfloat16", "fp8", "cuda", (8, 0), "auto, bfloat16, int8, int4"),
        ("float16", "bfloat16", "cuda", (9, 0), "auto, float16, int8, int4, fp8"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(
    dtype: str,
    kv_cache_dtype: Any,
    device: Literal["cpu", "cuda"],
    capability: tuple[int, int] | None,
    possible: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    asked = engine_with(kv_cache_dtype)
    with pytest.raises(StartupError, match=f"Possible here: {possible}\\.") as caught:
        choose_format(asked, dtype, device)
    assert caught.value.param == "kv_cache_dtype"
    if capability == (8, 0):
        assert "sm_80" in caught.value.message and "sm_89" in caught.value.message


def test_latents_are_kept_as_they_are() -> None:
    assert choose_format(engine_with("auto"), "bfloat16", "cpu", is_latent=True).name == "bfloat16"
    with pytest.raises(StartupError, match=r"latent attention.*Possible here: auto, bfl"):
        choose_format(engine_with("int8"), "bfloat16", "cpu", is_latent=True)


def test_settings_and_planner_know_every_format() -> None:
    assert set(get_args(KVCacheDType)) == {"auto", *FORMATS_BY_NAME}
    for each in FORMATS_BY_NAME.values():
        assert each.itemsize == each.dtype.itemsize
    assert {
        each.name: (8 * each.itemsize // each.packed, 8 * SCALE_NBYTES)
        for each in FORMATS_BY_NAME.values()
        if each.has_scales
    } == SCALED_KV_BITS


DEMO = ASSETS / "demo-large"
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def conversations() -> list[tuple[list[int], list[int]]]:
    """Tokens of prompts and of their answers: two of each task, one where prompts are long."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rows = []
    for place, turn in enumerate(held_out()):
        number = place % NUM_PER_LEVEL
        text = f"<|im_start|>user\n{turn.prompt}<|im_end|>\n<|im_start|>assistant\n"
        asked = tokenizer.encode(text).ids
        if number == 1 or (number == 0 and len(asked) < 700):
            rows.append((asked, tokenizer.encode(f"{turn.label}<|im_end|>").ids))
    return rows


def quality(
    kv_cache_dtype: str, conversations: list[tuple[list[int], list[int]]]
) -> tuple[float, float]:
    """Perplexity of the answers' tokens, and the share of answers that greedy decoding gets right.

    One forward pass tells, because it reads what it has just stored, as decoding does.
    """
    described, cpu = describe_model(DEMO), torch.device("cpu")
    config, decoder = described.config, load_model(described, torch.float32, cpu)
    num_blocks = config.max_model_len // BLOCK_SIZE
    heads = (config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pages = new_pages(FORMATS_BY_NAME[kv_cache_dtype], num_blocks, *heads, cpu)
    loss, num_tokens, num_right = 0.0, 0, 0
    for asked, answer in conversations:
        tokens = Tokens(asked + answer, list(range(num_blocks)))
        batch = make_batch([(tokens, len(tokens.ids))], BLOCK_SIZE, every_row=True)
        predicted = decoder.forward(batch, pages)[len(asked) - 1 : -1]
        wanted = torch.tensor(answer)
        loss += float(cross_entropy(predicted, wanted, reduction="sum"))
        num_tokens += len(answer)
        num_right += bool((predicted.argmax(-1) == wanted).all())
    return math.exp(loss / num_tokens), num_right / len(conversations)


@pytest.fixture(scope="module")
def exact(conversations: list[tuple[list[int], list[int]]]) -> tuple[float, float]:
    return quality("float32", conversations)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "percent", "num_lost"),
    some([("int4", 2.0, 3)], [("int8", 0.1, 1), ("fp8", 0.2, 1)]),
)
def test_a_bundled_model_keeps_its_quality(
    conversations: list[tuple[list[int], list[int]]],
    exact: tuple[float, float],
    kv_cache_dtype: str,
    percent: float,
    num_lost: int,
) -> None:
    """Perplexity, by how much at most, and answers: what docs/notebook/kv.md states."""
    stored = quality(kv_cache_dtype, conversations)
    assert 0 < abs(stored[0] / exact[0] - 1) <= percent / 100
    assert stored[1] >= exact[1] - num_lost / len(conversations), "answers right"
