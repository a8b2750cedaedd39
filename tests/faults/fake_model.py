"""A fake model for the real system: its KV can be checked, and steps take as long as it says.

A directory that looks like a checkpoint to the API (tokenizer, limits), and the parts that a
worker makes of it. Everything else is real: scheduler, KV import, transport, links, store.
Token i is the character `letter(i)`, so text shows tokens one to one, and `expected_text` knows
every answer without any engine. Greedy requests ignore their seed, as greedy requests must.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from disagg.config import ServeConfig, TierConfig
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Sampled, StepPlan
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.worker.parts import Parts, new_cold_tier, new_store, new_transport
from tests.engine.fake_runner import VOCAB_SIZE, FakeKV, FakeRunner, expected_tokens

FIRST_LETTER = 0x4E00  # a range in which every code point is one printable character
NUM_BLOCKS, BLOCK_SIZE = 2048, 16
MAX_MODEL_LEN = 4096
# What a decoder has and this one does not.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")  # fmt: skip
BACK_DOORS = "workers"  # folder of a model's directory, for `fake_replica`


def letter(token_id: int) -> str:
    return chr(FIRST_LETTER + token_id)


def to_text(token_ids: Iterable[int]) -> str:
    return "".join(map(letter, token_ids))


def expected_text(
    prompt: SequenceOf[int], max_tokens: int, *, temperature: float, seed: int
) -> str:
    """What any worker must answer, whatever happened to it and its blocks."""
    return to_text(expected_tokens(prompt, max_tokens, seed=seed if temperature else 0))


def write_fake_model(directory: Path, *, step_s: float, token_s: float = 0.0) -> Path:
    """A model directory.

    Args:
        step_s, token_s: a step takes `step_s`, and `token_s` more for each token in it.
    """
    from tokenizers import Tokenizer, decoders, models

    directory.mkdir(parents=True, exist_ok=True)
    vocab = {letter(token_id): token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = {
        "architectures": ["Qwen3ForCausalLM"],  # by name only: it ends no answer by itself
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        **dict.fromkeys(SIZES, 2),
        "fake_step_s": step_s,
        "fake_token_s": token_s,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class FakePacedRunner(FakeRunner):
    """Computes checkable KV, no faster than its pace."""

    def __init__(self, kv: FakeKV, step_s: float, token_s: float) -> None:
        super().__init__(kv)
        self._step_s = step_s
        self._token_s = token_s

    def run(self, plan: StepPlan) -> list[Sampled]:
        ends_at = time.monotonic() + self._step_s + self._token_s * plan.num_new_tokens
        sampled = super().run(plan)
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return sampled

    def seed_of(self, sequence: Sequence) -> int:
        return sequence.sampling.seed if sequence.sampling.temperature else 0


def fake_parts(config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int) -> Parts:
    """In the place of `worker.parts.build_parts`."""
    pace: dict[str, Any] = json.loads((tier.directory / "config.json").read_text())
    num_blocks = tier.engine.num_gpu_blocks_override or NUM_BLOCKS
    block_size = tier.engine.block_size or BLOCK_SIZE
    kv = FakeKV(num_blocks, block_size)
    stamps = Stamps(num_blocks, worker_id, epoch)
    scheduler = Scheduler(
        BlockPool(
            num_blocks,
            block_size,
            stamps.generations,
            enable_prefix_caching=tier.engine.enable_prefix_caching,
        ),
        max_num_seqs=tier.engine.max_num_seqs or 64,
        max_num_batched_tokens=tier.engine.max_num_batched_tokens or 1024,
        max_model_len=tier.engine.max_model_len or MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
    )
    slab = Slab(kv.base_address, num_blocks, kv.block_nbytes, kv.layout, owner=kv)
    store = new_store(config, tier.engine, kv.layout)
    runner = FakePacedRunner(kv, pace["fake_step_s"], pace["fake_token_s"])
    return Parts(
        Engine(scheduler, runner),
        stamps,
        new_transport(config, slab, stamps, None),
        new_cold_tier(store, slab),
        kv.read_blocks,
        kv.write_block,
    )
