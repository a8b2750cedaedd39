"""Measures tokens/s of a whole engine (scheduler, block pool, model, sampler), without a network.

    python -m bench.engine [--shape 15m 160m] [--threads 2] [--rounds 3] [--cpu-time] [--tiny]

Checkpoints are Llama shapes with random weights in bf16. Decoding is greedy and ignores the end of
a sequence. transformers' `generate` (one static batch) and its continuous batching take turns with
disagg in one process on equal weights. `prefill` is one prompt of 1,024 tokens and one token of
output. `N at once` is N requests with 128 tokens in and 128 out: their output tokens divided by the
whole time, prefill included. With `--cpu-time` and one thread, ratios are fair on a busy machine.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.report import ENOUGH_S, finish, print_table, take_turns
from bench.requests import greedy, new_request
from bench.shapes import SHAPES, transformers_config
from disagg.config import DType, EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.sched.sequence import Sequence
from disagg.models.description import describe_model

MAX_MODEL_LEN = 2048
PAGE_SIZE, NUM_PAGES = 128, 96  # of continuous batching: room for every case
CACHE_NBYTES = 512 << 20

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
Clock = Callable[[], float]


def write_checkpoint(shape: str, directory: Path) -> Path:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers_config(shape, MAX_MODEL_LEN)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


class Ours:
    """The engine of a worker, without the worker."""

    def __init__(self, directory: Path, threads: int, dtype: DType = "bfloat16") -> None:
        config = EngineConfig(
            dtype=dtype,
            device="cpu",
            num_threads=threads,
            kv_cache_memory_bytes=CACHE_NBYTES,
        )
        self.engine, _ = build_engine(config, describe_model(directory))
        self._threads = threads
        self._num_requests = 0

    def __call__(self, prompts: Prompts, num_new: int) -> list[list[int]]:
        sequences = [self._sequence(prompt, num_new) for prompt in prompts]
        for sequence in sequences:
            self.engine.submit(sequence)
        while self.engine.has_work:
            self.engine.step()
        torch.set_num_threads(self._threads)  # small steps lower it, and others come next
        return [sequence.tokens[sequence.num_prompt_tokens :] for sequence in sequences]

    def _sequence(self, prompt: list[int], num_new: int) -> Sequence:
        self._num_requests += 1
        block_size = self.engine.pool.block_size
        return Sequence(new_request(self._num_requests, prompt, greedy(num_new), block_size))


def static_batch(directory: Path) -> Generate:
    model = _load_peer(directory)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        batch = torch.tensor(prompts)
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
        )
        rows: list[list[int]] = out[:, batch.shape[1] :].tolist()
        return rows

    return run


class ContinuousBatching:
    """Started once and idle in between (which costs nothing), as in a server."""

    def __init__(self, directory: Path) -> None:
        import transformers

        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        paging = transformers.generation.configuration_utils.ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=NUM_PAGES, max_batch_tokens=1024
        )
        self._loop = _load_peer(directory).init_continuous_batching(
            generation_config=greedy, continuous_batching_config=paging
        )
        self._loop.start()

    def __call__(self, prompts: Prompts, num_new: int) -> list[list[int]]:
        request_ids = self._loop.add_requests(prompts, max_new_tokens=num_new)
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(request_ids):
            result = self._loop.get_result(timeout=1)
            if result is not None and result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
            elif not self._loop.is_running():
                raise SystemExit("transformers' continuous batching stopped")
        return [outputs[request_id] for request_id in request_ids]

    def close(self) -> None:
        self._loop.stop(block=True, timeout=10)


def _load_peer(directory: Path) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


def measure(
    shape: str, threads: int, rounds: int, scale: int, clock: Clock
) -> list[dict[str, Any]]:
    """A row for each case. `scale` divides lengths and batches, for a rehearsal."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = write_checkpoint(shape, Path(scratch))
        continuous = ContinuousBatching(directory)
        contenders: dict[str, Generate] = {
            "disagg": Ours(directory, threads),
            "generate": static_batch(directory),
            "continuous": continuous,
        }
        try:
            return [_row(shape, case, contenders, rounds, clock) for case in cases(scale).items()]
        finally:
            continuous.close()


def cases(scale: int) -> dict[str, tuple[int, int, int]]:
    """Requests at once, tokens in and tokens out."""
    cases = {"prefill": (1, 1024 // scale, 1)}
    for num_seqs in (1, 8, 32):
        cases[f"{num_seqs} at once"] = (max(num_seqs // scale, 1), 128 // scale, 128 // scale)
    return cases


def _row(
    shape: str,
    case: tuple[str, tuple[int, int, int]],
    contenders: dict[str, Generate],
    rounds: int,
    clock: Clock,
) -> dict[str, Any]:
    name, (num_seqs, num_in, num_out) = case
    timed = {
        contender: _timed(generate, clock, SHAPES[shape][0], num_seqs, num_in, num_out)
        for contender, generate in contenders.items()
    }
    num_counted = num_in if num_out == 1 else num_seqs * num_out
    seconds = take_turns(timed, rounds, ENOUGH_S)
    rates = {contender: num_counted / s for contender, s in seconds.items()}
    return {
        "shape": shape,
        "case": name,
        **rates,
        "of generate": rates["disagg"] / rates["generate"],
        "of continuous": rates["disagg"] / rates["continuous"],
    }


def _timed(
    generate: Generate, clock: Clock, vocab: int, num_seqs: int, num_in: int, num_out: int
) -> Callable[[], float]:
    """Seconds of one run; new prompts each time, so that no prefix is ever cached."""

    def run() -> float:
        prompts = torch.randint(1, vocab, (num_seqs, num_in)).tolist()
        began_s = clock()
        outputs = generate(prompts, num_out)
        seconds = clock() - began_s
        if [len(output) for output in outputs] != [num_out] * num_seqs:
            raise SystemExit(f"outputs of wrong lengths: {[len(output) for output in outputs]}")
        return seconds

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["15m", "160m"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    arguments = parser.parse_args()
    shapes, rounds, scale = arguments.shape, arguments.rounds, 1
    if arguments.tiny:
        shapes, rounds, scale = ["tiny"], 1, 8
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    rows = [
        row for shape in shapes for row in measure(shape, arguments.threads, rounds, scale, clock)
    ]
    print_table(rows)
    finish("engine", rows, unit="tokens/s", threads=arguments.threads, rounds=rounds)


if __name__ == "__main__":
    main()
