"""Measures what layers with a sliding window save: KV in the pool, on the wire, and sequences held.

    python -m bench.groups

The real scheduler, pool and KV export play prompts of each length in the chunks of a GPU, with the
sizes of published models in bfloat16; nothing is computed. They stand beside the same model with
one group, each of whose layers keeps the KV of all positions.

- `peak`: most bytes of a prompt while it is computed; `decode`: once its answer has begun.
- `wire`: bytes that its ticket names, those of early tickets included once.
- `held`: sequences that decode at the same time in `POOL_NBYTES`, and before.
- `padding`: share of a full row's bytes that belongs to no layer.
- `hits`: share of the agents' prompt tokens that were found cached, in a pool of `AGENTS_NBYTES`
  with groups, and before.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.report import finish, print_table
from bench.requests import new_request
from disagg.engine.device.kv_shape import KVShape
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Sampled, StepPlan
from disagg.kernels.kv_pages import FORMATS
from disagg.kv_groups import group_layers, one_group
from disagg.kvtransfer.pulls import describe
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.messages import SamplingParams
from disagg.models.model_config import ModelConfig
from disagg.worker.kv_export import KVExport

BLOCK_SIZE = 64
CHUNK_TOKENS = 8192
LENGTHS = 1024, 8192, 32768
POOL_NBYTES, AGENTS_NBYTES = 40 << 30, 8 << 30
GEMMA3 = {"sliding_window": 1024, "sliding_window_pattern": 6}


def _config(
    family: str, num_layers: int, num_kv_heads: int, head_dim: int, **more: Any
) -> ModelConfig:
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": 64 * num_kv_heads,
        "intermediate_size": 256,
        "num_attention_heads": 2 * num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": 1 << 18,
        "max_position_embeddings": 1 << 17,
    }
    return ModelConfig.from_hf({"architectures": [f"{family}ForCausalLM"], **sizes, **more}, family)


# Layers, KV heads and head sizes of their config.json on Hugging Face; other sizes do not matter.
MODELS = {
    "gpt-oss-120b": _config("GptOss", 36, 8, 64, num_local_experts=4, sliding_window=128),
    "gemma-3-12b": _config("Gemma3", 48, 8, 256, **GEMMA3),
    "gemma-3-27b": _config("Gemma3", 62, 16, 128, **GEMMA3),
    "gemma-3n-e4b": _config("Gemma3n", 35, 2, 256),
    "gemma-2-9b": _config("Gemma2", 42, 8, 256, sliding_window=4096),
    "olmo-3-7b": _config("Olmo3", 32, 32, 128, sliding_window=4096),
    "mistral-7b-v0.1": _config("Mistral", 32, 8, 128, sliding_window=4096),
    "llama-3-8b": _config("Llama", 32, 8, 128),
}


class NoDevice:
    """A runner that computes nothing, and answers every token with 7."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.most_held = 0  # blocks

    def run(self, plan: StepPlan) -> list[Sampled]:
        self.most_held = max(self.most_held, self._pool.num_blocks - self._pool.num_free)
        lens = zip(plan.sequences, plan.query_lens, strict=True)
        return [7 if each.num_uncomputed == query_len else None for each, query_len in lens]


class Served(NamedTuple):
    """A model's engine without a device, and how many bytes a block would have."""

    engine: Engine
    runner: NoDevice
    stamps: Stamps
    block_nbytes: int


def serve(config: ModelConfig, *, in_groups: bool, nbytes: int) -> Served:
    layers = one_group(range(config.num_layers))
    if in_groups:
        layers = group_layers(config.sliding_windows, config.kv_sources)
    shape = KVShape.from_model(config, "bench", BLOCK_SIZE, FORMATS["bfloat16"], layers=layers)
    stamps = Stamps(nbytes // shape.block_nbytes, "bench", 1)
    num_blocks, windows = len(stamps.generations), shape.groups.windows
    pool = BlockPool(num_blocks, BLOCK_SIZE, stamps.generations, windows=windows)
    scheduler = Scheduler(
        pool, max_num_seqs=4096, max_num_batched_tokens=CHUNK_TOKENS, max_model_len=1 << 17
    )
    runner = NoDevice(pool)
    return Served(Engine(scheduler, runner), runner, stamps, shape.block_nbytes)


def new_sequence(
    name: str, tokens: list[int], *, hand_over: bool = False, max_tokens: int = 64
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Sequence(new_request(name, tokens, sampling, BLOCK_SIZE), hand_over=hand_over)


def moved(config: ModelConfig, length: int, *, in_groups: bool) -> tuple[int, int, int]:
    """Bytes at the peak, while decoding, and on the wire, of one prompt of so many tokens."""
    engine, runner, stamps, block_nbytes = serve(config, in_groups=in_groups, nbytes=POOL_NBYTES)
    pool = engine.pool
    slab = Slab(1, pool.num_blocks, 1, "bench")
    export = KVExport(engine, describe("local", slab, stamps), stamps.generations)
    sequence = new_sequence("moved", [4] * length, hand_over=True)
    engine.submit(sequence)
    while engine.has_work:
        engine.step()
        early = export.early_ticket(sequence) if engine.has_work else None
        wire = set() if early is None else {*early.block_ids}
    ticket = export.leave(sequence, 0.0)
    wire |= {*ticket.block_ids}
    held = pool.num_blocks - pool.num_free
    return runner.most_held * block_nbytes, held * block_nbytes, len(wire) * block_nbytes


def num_held(config: ModelConfig, length: int, *, in_groups: bool) -> int:
    """Sequences whose KV arrives and that decode together, until the next one finds no room."""
    engine, *_ = serve(config, in_groups=in_groups, nbytes=POOL_NBYTES)
    groups, num = engine.pool.groups, 0
    while (block_ids := engine.reserve(groups.num_needed(length))) is not None:
        sequence = new_sequence(f"{num}", [4 + num, *[4] * length])
        sequence.block_ids, sequence.num_computed = groups.table(block_ids, length), length
        engine.join(sequence)
        engine.step()
        num += 1
    assert not engine.scheduler.num_preempted
    return num


def agents(seed: int = 3) -> Iterator[tuple[str, list[int]]]:
    """Prompts of conversations in turn: 3,000 tokens that all share, and 200 to 2,000 a turn."""
    rng = random.Random(seed)
    system = [rng.randrange(4, 1000) for _ in range(3000)]
    talks = {f"{i}": [*system] for i in range(24)}
    for turn in range(24 * 8):
        name = rng.choice([*talks])
        talks[name] += [rng.randrange(4, 1000) for _ in range(rng.randrange(200, 2000))]
        yield f"{name}/{turn}", talks[name]
        talks[name] += [7] * 40


def hits(config: ModelConfig, *, in_groups: bool) -> float:
    """Share of the agents' prompt tokens that were cached."""
    engine, *_ = serve(config, in_groups=in_groups, nbytes=AGENTS_NBYTES)
    num_cached = num_tokens = 0
    for name, prompt in agents():
        sequence = new_sequence(name, prompt, max_tokens=40)
        engine.submit(sequence)
        while engine.has_work:
            engine.step()
        num_cached, num_tokens = num_cached + sequence.num_cached_tokens, num_tokens + len(prompt)
    return num_cached / num_tokens


def measure(name: str, config: ModelConfig, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    layers = group_layers(config.sliding_windows, config.kv_sources)
    num_places = layers.num_layers * len(layers.windows)
    both = hits(config, in_groups=True), hits(config, in_groups=False)
    for length in lengths:
        own = moved(config, length, in_groups=True)
        full = moved(config, length, in_groups=False)
        row = {
            "model": name,
            "groups": len(layers.windows),
            "padding": 1 - config.num_kv_layers / num_places,
            "tokens": length,
            **{
                what: mine / all_
                for what, mine, all_ in zip(("peak", "decode", "wire"), own, full, strict=True)
            },
            "held": num_held(config, length, in_groups=True),
            "before": num_held(config, length, in_groups=False),
            "hits": both[0],
            "hits before": both[1],
        }
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--tiny", action="store_true", help="one model and one length")
    args = parser.parse_args()
    models, lengths = (["gpt-oss-120b"], LENGTHS[:1]) if args.tiny else (args.model, LENGTHS)
    rows = [row for name in models for row in measure(name, MODELS[name], lengths)]
    print_table(rows)
    finish("groups", rows, pool_nbytes=POOL_NBYTES, block_size=BLOCK_SIZE)


if __name__ == "__main__":
    main()
