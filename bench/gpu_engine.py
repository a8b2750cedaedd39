"""A whole engine on a GPU beside the roofline and transformers, with random Llama-3-8B weights.

    python -m bench.gpu_engine [--out build/gpu]
    python -m bench.gpu_engine --device cpu --tiny      # a rehearsal

TTFT: from submitting one prompt to its first token, nothing cached. TPOT: one step of a batch
that decodes, as a captured graph and launched kernel by kernel. Host time is included, sampling
too. The floor of a TPOT is the time to read weights
and KV once at the measured bandwidth, that of a TTFT its FLOPs at the measured speed of a matrix
product. transformers runs `generate` with a static cache, attention by torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from bench.gpu_device import (
    attempt,
    ceilings,
    describe,
    parse_arguments,
    synchronize,
    write_json,
)
from bench.gpu_models import new_engine, new_sequence, num_parameters
from bench.report import print_table
from bench.shapes import model_config, transformers_config
from disagg.engine.engine import Engine
from disagg.engine.runner import ModelRunner
from disagg.engine.sequence import Sequence
from disagg.models.model_config import ModelConfig

PROMPTS = [512, 1024, 4096, 16384]
BATCHES = [(1, 1024), (1, 16384), (8, 1024), (8, 4096), (32, 1024), (32, 4096), (128, 1024)]
TINY_PROMPTS, TINY_BATCHES = [16, 48], [(1, 16), (3, 32)]
NUM_DECODES, NUM_ROUNDS = 24, 3


class Timed:
    """Our engine, with a fresh random prompt each time."""

    def __init__(self, engine: Engine, vocab_size: int, device: torch.device) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._device = device
        self._num_requests = 0

    def ttft_s(self, num_tokens: int) -> float:
        sequence = self._sequence(num_tokens, 1)
        synchronize(self._device)
        begin_s = time.perf_counter()
        self._engine.submit(sequence)
        while self._engine.has_work:
            self._engine.step()
        return time.perf_counter() - begin_s

    def tpot_s(self, num_seqs: int, num_tokens: int) -> float:
        """Median of the steps in which all of them decode."""
        for _ in range(num_seqs):
            self._engine.submit(self._sequence(num_tokens, NUM_DECODES))
        steps = []
        while self._engine.has_work:
            synchronize(self._device)
            begin_s = time.perf_counter()
            self._engine.step()
            seconds = time.perf_counter() - begin_s
            if self._engine.last_plan.num_decodes == num_seqs:
                steps.append(seconds)
        return statistics.median(steps)

    def _sequence(self, num_tokens: int, max_tokens: int) -> Sequence:
        self._num_requests += 1
        tokens = torch.randint(0, self._vocab_size, (num_tokens,)).tolist()
        block_size = self._engine.pool.block_size
        return new_sequence(str(self._num_requests), tokens, num_tokens, max_tokens, block_size)


class Peer:
    """transformers with equal shapes and its own random weights."""

    def __init__(self, shape: str, device: torch.device) -> None:
        import transformers

        config = transformers_config(shape)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            self._model: Any = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        self._vocab, self._device = config.vocab_size, device

    def seconds(self, num_seqs: int, num_tokens: int, num_new: int) -> float:
        prompts = torch.randint(1, self._vocab, (num_seqs, num_tokens), device=self._device)
        synchronize(self._device)
        begin_s = time.perf_counter()
        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
        )
        synchronize(self._device)
        return time.perf_counter() - begin_s

    def ttft_s(self, num_tokens: int) -> float:
        return self.seconds(1, num_tokens, 1)

    def tpot_s(self, num_seqs: int, num_tokens: int) -> float:
        both = [self.seconds(num_seqs, num_tokens, new) for new in (NUM_DECODES, 1)]
        return (both[0] - both[1]) / (NUM_DECODES - 1)


def median(run: Callable[[], float]) -> float:
    run()
    return statistics.median(run() for _ in range(NUM_ROUNDS))


def ttft_floor_s(config: ModelConfig, num_tokens: int, rates: dict[str, float]) -> float:
    pairs = num_tokens * (num_tokens + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    lm_head = config.hidden_size * config.vocab_size  # for the last token only
    dense = 2 * num_tokens * (num_parameters(config) - lm_head) + 2 * lm_head
    return (dense + attention) / rates["matmul_flops_per_s"]


def tpot_floor_s(
    config: ModelConfig, num_seqs: int, num_tokens: int, rates: dict[str, float]
) -> float:
    token_nbytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    nbytes = 2 * num_parameters(config) + num_seqs * num_tokens * token_nbytes
    return nbytes / rates["read_bytes_per_s"]


class Comparison:
    """Rows of one shape: ours, the floor, and the peer where it can run."""

    def __init__(self, shape: str, device: torch.device, tiny: bool) -> None:
        self.config = model_config(shape)
        self.rates = ceilings(device, tiny)
        self.batches = TINY_BATCHES if tiny else BATCHES
        self.prompts = TINY_PROMPTS if tiny else PROMPTS
        self.capture_s: float | None = None
        block_size = 64 if device.type == "cuda" else 16
        num_blocks = max(
            num_seqs * (-(-(length + NUM_DECODES) // block_size) + 1)
            for num_seqs, length in [*self.batches, *((1, length) for length in self.prompts)]
        )
        max_num_seqs = max(num_seqs for num_seqs, _ in self.batches)
        engine, _ = new_engine(self.config, device, num_blocks, max_num_seqs=max_num_seqs)
        self._ours = Timed(engine, self.config.vocab_size, device)
        self._runner = cast(ModelRunner, engine.runner)
        if device.type == "cuda":
            self.capture_s = attempt("graphs", lambda: self._capture(max_num_seqs))
        self._peer: Peer | None = None
        try:
            self._peer = Peer(shape, device)
        except Exception as error:  # not installed, or its memory does not fit beside ours
            print(f"transformers: {type(error).__name__}: {error}", flush=True)

    def _capture(self, max_num_seqs: int) -> float:
        begin_s = time.perf_counter()
        self._runner.capture(max_num_seqs, self.config.max_model_len)
        return time.perf_counter() - begin_s

    def ttft(self, length: int) -> dict[str, Any]:
        ours = median(lambda: self._ours.ttft_s(length))
        floor = ttft_floor_s(self.config, length, self.rates)
        return {"prompt": length, **self._row(ours, floor, lambda peer: peer.ttft_s(length))}

    def tpot(self, num_seqs: int, length: int) -> dict[str, Any]:
        graphs, self._runner.graphs = self._runner.graphs, None
        eager = median(lambda: self._ours.tpot_s(num_seqs, length))
        self._runner.graphs = graphs
        ours = eager if graphs is None else median(lambda: self._ours.tpot_s(num_seqs, length))
        floor = tpot_floor_s(self.config, num_seqs, length, self.rates)
        row = self._row(ours, floor, lambda peer: peer.tpot_s(num_seqs, length))
        return {"at once": num_seqs, "context": length, **row, "eager ms": eager * 1e3}

    def _row(self, ours: float, floor: float, ask: Callable[[Peer], float]) -> dict[str, Any]:
        peer, theirs = self._peer, None
        if peer is not None:
            theirs = attempt("transformers", lambda: min(ask(peer) for _ in range(2)))
        return {
            "ms": ours * 1e3,
            "floor ms": floor * 1e3,
            "over floor": ours / floor,
            "transformers ms": None if theirs is None else theirs * 1e3,
        }


def main() -> None:
    arguments = parse_arguments(__doc__)
    device = torch.device(arguments.device)
    shape = "tiny" if arguments.tiny else "llama-3-8b"
    comparison = Comparison(shape, device, arguments.tiny)
    found: dict[str, Any] = {
        "machine": describe(device),
        "shape": shape,
        "ceilings": comparison.rates,
        "capture_s": comparison.capture_s,
        "ttft": [],
        "tpot": [],
    }
    for length in comparison.prompts:
        found["ttft"].append(comparison.ttft(length))
        print_table(found["ttft"][-1:])
    for num_seqs, length in comparison.batches:
        found["tpot"].append(comparison.tpot(num_seqs, length))
        print_table(found["tpot"][-1:])
    write_json(arguments.out, "gpu_engine", found)


if __name__ == "__main__":
    main()
