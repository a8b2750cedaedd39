"""Measures tokens/s of the decoder alone: no engine, no network, greedy, random weights.

    python -m bench.kernels_decoder --shape 15m --threads 2 [--peer]

Where decode steps are compiled, torch's steps are timed, too. `--peer` times transformers'
`generate` with a static batch on equal shapes. All take turns, so they see the same machine.
Prefill is one prompt of 1,024 tokens. The other figures are output tokens divided by the whole time
of requests with 128 tokens in and 128 out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from bench.shapes import SHAPES, model_config, transformers_config
from disagg.kernels.kv_pages import FORMATS, KVPages, new_pages
from disagg.models.batch import Batch
from disagg.models.decoder import CpuDecoder, Decoder, random_decoder
from disagg.models.weights import random_weights

PROMPT, OUTPUT, LONG_PROMPT, BLOCK_SIZE, NUM_BLOCKS = 128, 128, 1024, 16, 1024


def uniform_batch(token_ids: torch.Tensor, num_computed: int, tables: torch.Tensor) -> Batch:
    """Batch the same number of new tokens of every sequence: `token_ids` is [seqs, new]."""
    num_seqs, new = token_ids.shape
    total = num_computed + new
    positions = torch.arange(num_computed, total)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(0, num_seqs * new + 1, new, dtype=torch.int32)
    return Batch(
        token_ids=token_ids.flatten(),
        positions=positions.repeat(num_seqs),
        slots=slots.flatten(),
        query_start=starts,
        context_lens=torch.full((num_seqs,), total, dtype=torch.int32),
        block_tables=tables,
        logits_rows=starts[1:].long() - 1,
        num_decodes=num_seqs if new == 1 else 0,
        max_query_len=new,
        query_lens=(new,) * num_seqs,
        context_lens_host=(total,) * num_seqs,
    )


def generate(decoder: Decoder, slab: KVPages, prompts: torch.Tensor, num_new: int) -> None:
    """Decode greedily; blocks are scattered over the slab as after a while of serving."""
    num_seqs, length = prompts.shape
    num_blocks = -(-(length + num_new) // BLOCK_SIZE)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
    tables = order[: num_seqs * num_blocks].view(num_seqs, num_blocks).int()
    new = prompts
    computed = 0
    for _ in range(num_new):
        logits = decoder.forward(uniform_batch(new, computed, tables), slab)
        computed += new.shape[1]
        new = logits.argmax(-1, keepdim=True)


def _rounds(
    timed: Mapping[str, Callable[[], object]], num_rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each, the contenders taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(num_rounds + 1):
        for name, run in timed.items():
            start = clock()
            run()
            if turn > 0:  # the first round warms up
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _peer(shape: str) -> Callable[[torch.Tensor, int], None]:
    import transformers

    config = transformers_config(shape)
    model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()

    def run(prompts: torch.Tensor, num_new: int) -> None:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
        )

    return run


def _ours(decoder: Decoder, slab: KVPages) -> dict[str, Callable[[torch.Tensor, int], None]]:
    """As it starts, and where that is a compiled program with torch's decode steps."""
    print(f"decode steps: {decoder.step_sentence}")
    contenders: dict[str, Callable[[torch.Tensor, int], None]] = {
        "disagg": partial(generate, decoder, slab)
    }
    if isinstance(decoder, CpuDecoder):
        decoder.step.use_huge_pages()
        weights = random_weights(decoder.config, torch.bfloat16, torch.device("cpu"), seed=0)
        contenders["disagg, torch"] = partial(generate, Decoder(decoder.config, weights), slab)
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="15m")
    parser.add_argument("--threads", type=int, default=2)
    formats = ["bfloat16", "fp8", "int8", "int4"]
    parser.add_argument("--kv-cache-dtype", choices=formats, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count processor time: for one thread on a machine that others use too",
    )
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    config = model_config(arguments.shape)
    decoder = random_decoder(config, torch.bfloat16, torch.device("cpu"))
    slab = new_pages(
        FORMATS[arguments.kv_cache_dtype],
        NUM_BLOCKS,
        config.num_layers,
        config.num_kv_heads,
        BLOCK_SIZE,
        config.head_dim,
        torch.device("cpu"),
    )
    contenders = _ours(decoder, slab)
    if arguments.peer:
        contenders["transformers"] = _peer(arguments.shape)
    cases = {f"prefill {LONG_PROMPT}": (1, LONG_PROMPT, 1, LONG_PROMPT)}
    cases |= {f"{n} at once": (n, PROMPT, OUTPUT, n * OUTPUT) for n in (1, 8, 32)}
    for case, (num_seqs, length, num_new, num_counted) in cases.items():
        prompts = torch.randint(0, config.vocab_size, (num_seqs, length))
        timed = {
            name: (lambda run=run, p=prompts, n=num_new: run(p, n))
            for name, run in contenders.items()
        }
        for name, seconds in _rounds(timed, arguments.rounds, clock).items():
            print(f"{arguments.shape} {case:14s} {name:13s} {num_counted / seconds:9.0f} tok/s")


if __name__ == "__main__":
    main()
