"""KV that a request gives up when it moves: the answer is that of transformers without these keys.

The prompt is computed on one worker with all of its KV, and the answer on another with the first
and the last blocks. Both dtypes: in bfloat16 a compiled program computes steps of other requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from disagg import local
from disagg.config import EngineConfig, ServeConfig, TierConfig
from disagg.engine.device.build import build_engine
from disagg.models.description import describe_model
from tests.generate_requests import new_sequence
from tests.test_local_experts import SHAPE
from tests.tiny_model import tiny_parts, write_tiny_tokenizer

SIZE = 16
PROMPT = "A preamble of several blocks, of which the middle is of no use. " * 3 + "The end:"
NUM_TOKENS = 40
EVICTION = {"sinks": 5, "window": 50}
KEPT_ROWS = 1, (len(PROMPT) - 50) // SIZE  # those before the first and from the last are kept


def _write(directory: Path) -> Any:
    config = transformers.LlamaConfig(**SHAPE, eos_token_id=write_tiny_tokenizer(directory))
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def _gaps(model: Any, prompt: list[int], answer: list[int], evicted: range) -> list[float]:
    """How far the logits of the answer's tokens are below the largest ones, if none of them sees
    the evicted positions of the prompt."""
    ids, first = [*prompt, *answer], len(prompt)
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    seen[first:, evicted.start : evicted.stop] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), attention_mask=mask).logits[0, first - 1 : -1]
    own = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    gaps: list[float] = (logits.max(1).values - own).tolist()
    return gaps


def _gap(*of_answer: Any) -> float:
    return max(_gaps(*of_answer))


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), ("bfloat16", 0.5)])
async def test_what_was_given_up_is_not_seen_and_nothing_else(
    dtype: Any, within: float, tmp_path: Path
) -> None:
    model = _write(tmp_path)
    coded = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = coded.encode(PROMPT).ids
    assert len(prompt) == len(PROMPT)
    evicted = range(*(row * SIZE for row in KEPT_ROWS))
    engine = EngineConfig(dtype=dtype, num_threads=1, max_model_len=400, block_size=SIZE)
    tier = TierConfig(model=str(tmp_path), engine=engine)
    config = ServeConfig(tiers=(tier,), transport="local", cluster_key="key")
    async with local.running(config, tiny_parts()) as running:
        app = httpx.ASGITransport(running.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:

            async def complete(ids: list[int], **fields: Any) -> list[int]:
                body = {"model": tmp_path.name, "prompt": ids, "max_tokens": NUM_TOKENS}
                body |= {"temperature": 0, "return_token_ids": True, **fields}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
                return token_ids

            def pulled() -> int:
                cores = [worker._core for worker in running.workers]
                return sum(each.nbytes for core in cores for each in core.status().pulls)

            less = await complete(prompt, kv_eviction=EVICTION)
            nbytes = pulled()
            # The blocks of this answer are those of no prompt, though its tokens are.
            longer = [*prompt, *less, *coded.encode(" And then:").ids]
            after = await complete(longer)
            full = await complete(prompt)
            for worker in running.workers:
                await worker.check()
    assert _gap(model, prompt, less, evicted) <= within < _gap(model, prompt, less, range(0))
    assert _gap(model, prompt, full, range(0)) <= within < _gap(model, prompt, full, evicted)
    assert _gap(model, longer, after, range(0)) <= within
    num_rows = -(-len(prompt) // SIZE) - len(evicted) // SIZE
    values = SIZE * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    assert nbytes == num_rows * 2 * values * (4 if dtype == "float32" else 2)


def test_after_a_preemption_an_answer_sees_all(tmp_path: Path) -> None:
    """Up to there it sees what was kept, also with a draft, some of whose tokens are right."""
    model, prompt = _write(tmp_path), [*range(30, 230)]
    config = EngineConfig(dtype="float32", num_threads=1, max_model_len=400, block_size=SIZE)
    engine, _ = build_engine(config, describe_model(tmp_path))
    evicted, right = range(SIZE, 9 * SIZE), tuple[int, ...]()
    for num_preempted in (0, 1):
        asked: dict[str, Any] = {"block_size": SIZE, "max_tokens": NUM_TOKENS, "temperature": 0.0}
        leaving = new_sequence(prompt, hand_over=True, **asked)
        engine.submit(leaving)
        while engine.has_work:
            engine.step()
        draft = (*right[1:4], 9, 9)
        sequence = new_sequence(prompt, leaving.tokens[-1:], draft_token_ids=draft, **asked)
        table = leaving.block_ids
        sequence.block_ids, given_up = [*table[:1], *table[9:]], table[1:9]
        sequence.num_computed, sequence.num_evicted = len(prompt), len(evicted)
        engine.release(given_up)
        engine.join(sequence)
        while engine.has_work:
            if num_preempted and sequence.num_output_tokens == 16:
                engine.scheduler.begin_again()
            engine.step()
            engine.check(())
        answer = sequence.tokens[len(prompt) :]
        less, full = (_gaps(model, prompt, answer, each) for each in (evicted, range(0)))
        num_before = 16 if num_preempted else NUM_TOKENS
        assert max(less[1:num_before]) <= 1e-4 < max(full[1:num_before])
        assert max(full[num_before:], default=0.0) <= 1e-4
        right = tuple(answer)
    assert engine.scheduler.num_preempted == 1
    assert engine.scheduler.num_accepted == 3 < engine.scheduler.num_drafted
    assert engine.pool.num_free == engine.pool.num_blocks
