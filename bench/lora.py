"""Measures a step of 32 decoding sequences that have 1, 8 or 32 LoRA adapters, beside none.

    python -m bench.lora [--rank 16] [--device cuda]

The model has the shape of SmolLM2-135M on a CPU and of Llama-3-8B on a GPU, with random weights;
adapters change all matrices of all layers. On a CPU it is the time of one thread. Each round
measures every row once, and a row is the median of its rounds. `none` is a step without adapters
where they are enabled, and `not enabled` the same where they are not. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from bench.random_models import random_decoder
from disagg.kernels.kv_pages import format_of, new_pages
from disagg.models.adapter_weights import AdapterTables
from disagg.models.batch import Batch
from disagg.models.model_config import ModelConfig
from disagg.models.rope import RopeConfig
from disagg.models.share import WHOLE

NUM_SEQS, CONTEXT, BLOCK_SIZE = 32, 128, 16
NUMS_ADAPTERS = (1, 8, 32)
SMOLLM2 = ModelConfig(
    family="LlamaForCausalLM",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
    max_model_len=2048,
    dtype="bfloat16",
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    sliding_windows=(None,) * 30,
    tie_word_embeddings=True,
)
LLAMA = replace(
    SMOLLM2,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    sliding_windows=(None,) * 32,
    tie_word_embeddings=False,
)


def decodes(device: torch.device) -> Batch:
    """The next token of each sequence."""
    blocks = CONTEXT // BLOCK_SIZE
    tables = torch.arange(NUM_SEQS * blocks, dtype=torch.int32, device=device)
    tables = tables.view(NUM_SEQS, blocks)
    rows = torch.arange(NUM_SEQS, device=device)
    last = CONTEXT - 1
    return Batch(
        token_ids=rows + 7,
        positions=torch.full_like(rows, last),
        slots=tables[:, -1].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        query_start=torch.arange(NUM_SEQS + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((NUM_SEQS,), CONTEXT, dtype=torch.int32, device=device),
        block_tables=tables,
        logits_rows=rows,
        num_decodes=NUM_SEQS,
        max_query_len=1,
        query_lens=(1,) * NUM_SEQS,
        context_lens_host=(CONTEXT,) * NUM_SEQS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    clock = time.perf_counter
    if device.type == "cpu":  # one thread's time, which other processes do not change
        torch.set_num_threads(1)
        clock = time.process_time
    config = SMOLLM2 if device.type == "cpu" else LLAMA
    decoder, plain = random_decoder(config, torch.bfloat16, device), decodes(device)
    heads = (config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    num_blocks = NUM_SEQS * CONTEXT // BLOCK_SIZE
    slab = new_pages(format_of(torch.bfloat16), num_blocks, *heads, device, config.num_vectors)
    tables = AdapterTables(
        config, WHOLE, max(NUMS_ADAPTERS), arguments.rank, torch.bfloat16, device
    )
    for matrix in (each for fields in tables.layers for each in fields.values()):
        matrix.a.fill_(0.01)
        matrix.b.fill_(0.01)
        matrix.ranks[:] = [matrix.rank] * tables.num_slots
    slots = torch.arange(NUM_SEQS, dtype=torch.int32, device=device)
    rows: dict[str, tuple[AdapterTables | None, Batch]] = {
        "not enabled": (None, plain),
        "none": (tables, plain),
        **{f"{num}": (tables, replace(plain, adapters=slots % num)) for num in NUMS_ADAPTERS},
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for round in range((1 if arguments.tiny else arguments.rounds) + 2):  # the first two warm up
        for name, (own, batch) in rows.items():
            decoder.adapters = own
            begun_s = clock()
            decoder.forward(batch, slab)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round >= 2:
                times[name].append(clock() - begun_s)
    ms = {name: 1e3 * statistics.median(own) for name, own in times.items()}
    for name, own_ms in ms.items():
        print(f"{name:>12}: {own_ms:7.2f} ms, {own_ms / ms['not enabled']:5.2f} times")
    print(f"an adapter: {tables.nbytes / tables.num_slots / 1e6:.1f} MB")
    print(json.dumps({"bench": "lora", "device": str(device), "rank": arguments.rank, "ms": ms}))


if __name__ == "__main__":
    main()
