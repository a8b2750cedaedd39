"""Measures transformers' `generate` on the same GPU: Llama-3-8B's shape with a static cache.

    python -m bench.gpu_generate [--out build/gpu]
    python -m bench.gpu_generate --device cpu [--tiny]      # a rehearsal

Weights are random, decoding is greedy, attention is torch's. TPOT is the time for many new tokens
minus the time for one, divided by the difference. In rows named "compiled" transformers compiles
its decode step, as it does by default for such a cache. They come last because that takes a minute.
"""

from __future__ import annotations

import argparse
import time
from functools import cached_property, partial
from typing import Any

import torch

from bench.gpu_device import synchronize
from bench.gpu_rows import Row, parser_of, run_part
from bench.shapes import transformers_config

BATCHES = [(32, 1024), (1, 1024), (128, 1024)]
PROMPTS = [1024, 4096]
NUM_DECODES = 24
BUILD_S = 90.0
COMPILE_S = 180.0


class Peer:
    """`transformers.LlamaForCausalLM`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self._shape = "llama-3-8b" if self.device.type == "cuda" else "tiny"

    @cached_property
    def _model(self) -> Any:
        import transformers

        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.device):
                return transformers.LlamaForCausalLM(transformers_config(self._shape)).eval()
        finally:
            torch.set_default_dtype(torch.float32)

    def ttft(self, num_tokens: int) -> dict[str, Any]:
        self._seconds(1, num_tokens, 1, is_compiled=False)
        return {"ms": min(self._seconds(1, num_tokens, 1, False) for _ in range(2)) * 1e3}

    def tpot(self, num_seqs: int, context: int, is_compiled: bool) -> dict[str, Any]:
        one_s = self._seconds(num_seqs, context, 1, is_compiled)
        first_s = self._seconds(num_seqs, context, NUM_DECODES, is_compiled)
        all_s = min(self._seconds(num_seqs, context, NUM_DECODES, is_compiled) for _ in range(2))
        one_s = min(one_s, self._seconds(num_seqs, context, 1, is_compiled))
        ms = (all_s - one_s) / (NUM_DECODES - 1) * 1e3
        return {"ms": ms, "tokens/s": num_seqs / ms * 1e3, "first time s": first_s}

    def _seconds(self, num_seqs: int, num_tokens: int, num_new: int, is_compiled: bool) -> float:
        vocab_size = self._model.config.vocab_size
        prompts = torch.randint(1, vocab_size, (num_seqs, num_tokens), device=self.device)
        synchronize(self.device)
        begin_s = time.perf_counter()
        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            cache_implementation="static",
            disable_compile=not is_compiled,
        )
        synchronize(self.device)
        return time.perf_counter() - begin_s


def rows_of(peer: Peer, is_tiny: bool) -> list[Row]:
    is_cpu = peer.device.type == "cpu"
    batches = [(2, 40)] if is_cpu else BATCHES
    prompts = [48] if is_cpu else PROMPTS
    names = {False: "generate", True: "generate, compiled"}

    def tpot(batch: tuple[int, int], is_compiled: bool) -> Row:
        name = f"{names[is_compiled]}: TPOT {batch[0]} x {batch[1]}"
        limit_s = COMPILE_S if is_compiled else BUILD_S
        return Row(name, partial(peer.tpot, *batch, is_compiled), limit_s)

    rows = [tpot(batch, False) for batch in batches]
    rows += [Row(f"generate: TTFT {n}", partial(peer.ttft, n), BUILD_S) for n in prompts]
    # A CPU compiles with a C++ compiler, if there is one: that would rehearse nothing.
    return rows if is_cpu else [*rows, *(tpot(batch, True) for batch in batches[:2])]


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    run_part("gpu_generate", rows_of(Peer(arguments), arguments.tiny), arguments)


if __name__ == "__main__":
    main()
