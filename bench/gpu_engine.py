"""Measures TTFT and TPOT of a whole engine on a GPU, with random weights of Llama-3-8B's shape.

    python -m bench.gpu_engine [--out build/gpu] [--ceilings JSON]
    python -m bench.gpu_engine --device cpu [--tiny]      # a rehearsal

The engine comes from `build_engine` with its defaults: sizes of the device, graphs, async
scheduling. Decoding sequences join with their KV in place, as on a decode worker. TPOT is the time
from one step's results to the next step's. TTFT is the time from submitting a prompt, of which
nothing is cached, to its first token. Host time and sampling are included.

`plan ms` is what `disagg plan` predicts. `floor ms` is its roofline at the measured ceilings (to
read weights and KV once, or to multiply), and `datasheet ms` the same at the stated ones. `goal ms`
is the goal of docs/notebook/gpu.md.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec.structs import replace

from bench.gpu_device import synchronize
from bench.gpu_models import (
    join_sequences,
    new_sequence,
    placement_of,
    write_shape,
)
from bench.gpu_rows import Absent, Row, parser_of, run_part
from bench.gpu_timeline import device_timeline, host_timeline
from bench.random_models import random_decoder
from bench.requests import FAMILIES
from disagg.capacity.efficiency import DATASHEET
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import shape_of
from disagg.capacity.worker_steps import step_sizes
from disagg.config import EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.kernels.dispatch import device_name
from disagg.messages import SamplingParams, StartStep
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder
from disagg.models.description import ModelDescription, describe_model
from disagg.models.weights import Progress

if TYPE_CHECKING:  # a CPU captures nothing
    from disagg.engine.device.step_graphs import StepGraphs

# Sequences and tokens of each, the most telling ones first.
BATCHES = [(32, 1024), (1, 1024), (256, 1024), (128, 1024), (8, 4096), (32, 4096), (1, 30000)]
SAMPLED = [(32, 1024), (256, 1024)]
PROMPTS = [1024, 4096, 512, 16384]
TINY_BATCHES, TINY_PROMPTS = [(1, 40), (8, 40)], [48]
GREEDY: dict[str, Any] = {"temperature": 0.0}
# As structured output: whether its last token may come depends on the token before.
NEEDS_HOST: dict[str, Any] = {**GREEDY, "bad_words_token_ids": ((1, 2),)}
NUM_DECODES, NUM_SKIPPED, NUM_ROUNDS = 64, 8, 2
# A rehearsal's steps take longer: a CPU samples 256 sequences in seconds.
CPU_SAMPLED = [(32, 1024), (64, 1024)]
CPU_DECODES, CPU_SKIPPED, CPU_ROUNDS = 6, 2, 1
NUM_TIMELINE_STEPS = 16
# Prompts that come together: each step's rows must not be those of the one before.
COMPARED_PROMPTS = [(60, 60, 60), (20,), (1, 250), (7,) * 30, (130, 3), (33,) * 7]
COMPARED_OUTPUT = 4
MOST_DIFFERENT = 3e-2  # of bf16 logits: products of more rows are added up in another order
BUILD_S = 120.0  # weights, compilation, graphs


class Compared:
    """Captured graphs of a runner, each of whose steps is then computed without them.

    Attributes:
        differences: of each step's logits, as a part of the largest; of decodes, and of others.
    """

    def __init__(self, graphs: StepGraphs, runner: ModelRunner) -> None:
        self._graphs, self._runner = graphs, runner
        self.differences: dict[str, list[float]] = {"decodes": [], "mixed": []}

    def forward(self, batch: Batch) -> torch.Tensor | None:
        logits = self._graphs.forward(batch)
        if logits is not None:
            plain = self._runner.decoder.forward(batch, self._runner.kv_cache.pages)
            difference = (logits - plain).abs().max() / plain.abs().max()
            kind = "decodes" if batch.max_query_len == 1 else "mixed"
            self.differences[kind].append(float(difference.nan_to_num(nan=float("inf"))))
        return logits


class Served:
    """The engine, and what is known of it beforehand."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.ceilings: dict[str, float] = arguments.ceilings
        self.is_tiny: bool = arguments.tiny
        on_cpu = "tiny" if arguments.tiny else "rehearsal"
        self.shape = "llama-3-8b" if self.device.type == "cuda" else on_cpu
        is_cuda = self.device.type == "cuda"
        self.num_decodes = NUM_DECODES if is_cuda else CPU_DECODES
        self.num_skipped = NUM_SKIPPED if is_cuda else CPU_SKIPPED
        self.num_rounds = NUM_ROUNDS if is_cuda else CPU_ROUNDS
        self.start: dict[str, Any] = {}
        self._broken = ""

    @property
    def engine(self) -> Engine:
        """Built once: who comes later hears that it could not be."""
        if self._broken:
            raise Absent(self._broken)
        try:
            return self._engine
        except Exception as error:
            self._broken = f"there is no engine: {error}"
            raise

    @cached_property
    def _engine(self) -> Engine:
        """As the product builds it on a GPU; a rehearsal has a GPU's sizes."""
        began_s = time.perf_counter()
        steps: list[tuple[str, float]] = [("weights", began_s)]

        def progress(step: StartStep) -> None:
            steps.append((step.phase, time.perf_counter()))

        config = EngineConfig(device="cuda")
        if self.device.type == "cpu":
            config = EngineConfig(
                device="cpu",
                dtype="bfloat16",
                block_size=64,
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                kv_cache_memory_bytes=1 << 30,
            )
        with tempfile.TemporaryDirectory() as folder:
            model = describe_model(write_shape(Path(folder), self.shape))
            self.placement = placement_of(model, self.device)
            called = device_name(-1 if self.device.type == "cpu" else 0)
            sizes = step_sizes(shape_of(model), called)
            engine, kv_cache = build_engine(
                config, model, progress, load=_random_weights, largest_step=sizes
            )
        synchronize(self.device)
        if self.device.type == "cpu":
            engine.launcher = cast(ModelRunner, engine.runner)  # as on a GPU, one step ahead
        self.model = model.config
        values = kv_cache.pages.values
        values[0].normal_()  # zeros would multiply faster
        values[1:].copy_(values[:1].expand_as(values[1:]))
        ends = [at_s for _, at_s in steps[1:]] + [time.perf_counter()]
        self.start = {
            "build s": time.perf_counter() - began_s,
            **{f"{name} s": end - at_s for (name, at_s), end in zip(steps, ends, strict=True)},
            "max_num_seqs": engine.scheduler.max_num_seqs,
            "max_num_batched_tokens": engine.scheduler.max_num_batched_tokens,
            "KV tokens": engine.pool.num_blocks * engine.pool.block_size,
            "KV GB": kv_cache.num_blocks * kv_cache.block_nbytes / 1e9,
        }
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            of_torch = torch.cuda.memory_reserved(self.device)
            self.start |= {
                "free GB": free / 1e9,
                "torch's GB": of_torch / 1e9,
                "own stream": torch.cuda.current_stream() != torch.cuda.default_stream(),
                # CUDA's context, kernels, and what it makes of captured graphs
                "beside torch's GB": (total - free - of_torch) / 1e9,
            }
        return engine

    # Rows.

    def started(self) -> dict[str, Any]:
        assert self.engine.pool.num_blocks
        return self.start

    def tpot(
        self,
        num_seqs: int,
        context: int,
        sampling: dict[str, Any],
        of_one: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Of several rounds the fastest; `ms` is the mean of its steps.

        Args:
            of_one: the sampling parameters of one of the sequences, if it has others.
        """
        rounds = [self._decode(num_seqs, context, sampling, of_one) for _ in range(self.num_rounds)]
        best = min(rounds, key=lambda each: float(each["ms"]))
        allowed = 1.25 if num_seqs == 1 else 1.15
        spread = max(each["ms"] for each in rounds) / best["ms"]
        return {
            **best,
            "spread": spread,
            "tokens/s": num_seqs / best["ms"] * 1e3,
            **self._beside(
                best["ms"],
                allowed,
                lambda it: it.decode_step_s(num_seqs, context),
                is_of_reads=True,
            ),
        }

    def tpot_beside_one(self, num_seqs: int, context: int) -> dict[str, Any]:
        """One of the sequences needs the host for each token. The goal: 0.98 of the step rate."""
        plain = self.tpot(num_seqs, context, GREEDY)
        beside = self.tpot(num_seqs, context, GREEDY, NEEDS_HOST)
        return {**beside, "of plain step rate": plain["ms"] / beside["ms"]}

    def _decode(
        self,
        num_seqs: int,
        context: int,
        sampling: dict[str, Any],
        of_one: dict[str, Any] | None,
    ) -> dict[str, Any]:
        engine = self.engine
        self._join(num_seqs - (of_one is not None), context, sampling, self.num_decodes)
        if of_one is not None:
            self._join(1, context, of_one, self.num_decodes)
        ends, num_ahead, num_steps = [], 0, 0
        while engine.has_work:
            engine.step()
            plan = engine.last_plan
            if plan.num_decodes == plan.num_new_tokens == num_seqs:
                ends.append(time.perf_counter())
                num_ahead += engine.is_under_way
                num_steps += 1
        gaps = [b - a for a, b in pairwise(ends[self.num_skipped :])]
        return {
            "ms": statistics.mean(gaps) * 1e3,
            "median ms": statistics.median(gaps) * 1e3,
            "longest ms": max(gaps) * 1e3,
            "launched ahead": num_ahead / num_steps,
        }

    def _join(self, num_seqs: int, context: int, sampling: dict[str, Any], num_tokens: int) -> None:
        engine, most = self.engine, self.engine.scheduler.max_num_seqs
        if num_seqs > most:
            raise Absent(f"this engine runs {most} sequences at once by default")
        wanted = SamplingParams(max_tokens=num_tokens, **sampling)
        join_sequences(engine, num_seqs, context, wanted)

    def compare_graphs(self) -> dict[str, Any]:
        """Steps that graphs replay, each computed once more without them."""
        engine, runner = self.engine, cast(ModelRunner, self.engine.runner)
        if runner.graphs is None:
            raise Absent("a CPU captures no graphs")
        compared = Compared(runner.graphs, runner)
        graphs, runner.graphs = runner.graphs, compared  # type: ignore[assignment]
        try:
            for lens in COMPARED_PROMPTS:
                for num_tokens in lens:
                    engine.submit(self._prompt(num_tokens, COMPARED_OUTPUT))
                while engine.has_work:
                    engine.step()
        finally:
            runner.graphs = graphs
        found: dict[str, Any] = {}
        for name, differences in compared.differences.items():
            if not differences:
                raise RuntimeError(f"no step was one of {name}")
            found |= {f"{name} steps": len(differences), name: max(differences)}
        if not max(found["decodes"], found["mixed"]) <= MOST_DIFFERENT:
            raise ArithmeticError(f"logits differ, as a part of the largest: {found}")
        return found

    def tpot_by_hand(self, num_seqs: int, context: int) -> dict[str, Any]:
        """Without captured graphs, so with every kernel launched by the host."""
        with self._without_graphs():
            return self.tpot(num_seqs, context, GREEDY)

    @contextmanager
    def _without_graphs(self) -> Iterator[None]:
        runner = cast(ModelRunner, self.engine.runner)
        graphs, runner.graphs = runner.graphs, None
        try:
            yield
        finally:
            runner.graphs = graphs

    def ttft(self, num_tokens: int) -> dict[str, Any]:
        engine = self.engine
        times = []
        for _ in range(self.num_rounds + 1):
            sequence = self._prompt(num_tokens)
            synchronize(self.device)
            begin_s = time.perf_counter()
            engine.submit(sequence)
            while engine.has_work:
                engine.step()
            times.append(time.perf_counter() - begin_s)
        taken_s = min(times[1:])
        allowed = 1.2 if num_tokens >= 4096 else 1.5
        return {
            "ms": taken_s * 1e3,
            "spread": max(times[1:]) / taken_s,
            **self._beside(taken_s * 1e3, allowed, lambda it: it.prefill_s(num_tokens)),
        }

    def prompt_among_decodes(self, num_tokens: int, num_seqs: int, context: int) -> dict[str, Any]:
        """What both feel: the prompt its TTFT, the others their longest gap."""
        engine = self.engine
        self._join(num_seqs, context, GREEDY, NUM_DECODES)
        for _ in range(5):
            engine.step()
        sequence = self._prompt(num_tokens)
        begin_s = previous_s = time.perf_counter()
        engine.submit(sequence)
        gaps, first_s = [], None
        while engine.has_work:
            engine.step()
            now_s = time.perf_counter()
            gaps.append(now_s - previous_s)
            previous_s = now_s
            if first_s is None and sequence.num_output_tokens:
                first_s = now_s - begin_s
        return {
            "TTFT ms": first_s and first_s * 1e3,
            "longest gap ms": max(gaps) * 1e3,
            "median gap ms": statistics.median(gaps) * 1e3,
        }

    def _prompt(self, num_tokens: int, max_tokens: int = 1) -> Any:
        tokens = random.choices(range(self.model.vocab_size), k=num_tokens)
        name = f"prompt-{random.random()}"  # a request's name is used once
        return new_sequence(name, tokens, num_tokens, max_tokens, self.engine.pool.block_size)

    def timeline(self, num_seqs: int, context: int, sampling: dict[str, Any]) -> dict[str, Any]:
        """Where one step's time goes, on the host and on the device."""

        def decode() -> Iterator[None]:
            self._join(num_seqs, context, sampling, NUM_TIMELINE_STEPS)
            while self.engine.has_work:
                self.engine.step()
                yield

        def is_full() -> bool:
            return self.engine.last_plan.num_decodes == num_seqs

        return {
            **host_timeline(self.engine, decode(), is_full),
            **device_timeline(self.device, decode(), is_full),
        }

    def _beside(
        self,
        taken_ms: float,
        allowed: float,
        ask: Callable[[Placement], float],
        *,
        is_of_reads: bool = False,
    ) -> dict[str, float | None]:
        """What was to be expected.

        Args:
            allowed: the goal as a multiple of the floor.
            is_of_reads: whether the floor counts what is read, and no products.
        """
        planned, floor_ms = self.placement, None
        if planned is None:
            return {"floor ms": None, "plan ms": None}
        read, matmul = map(self.ceilings.get, ("read_bytes_per_s", "matmul_flops_per_s"))
        if read and matmul:
            flops = math.inf if is_of_reads else matmul
            seen = replace(planned.gpu, memory_bytes_per_s=read, bf16_flops=flops)
            floor_ms = ask(Placement(planned.shape, seen, efficiency=DATASHEET)) * 1e3
        stated = Placement(planned.shape, planned.gpu, efficiency=DATASHEET)
        return {
            "floor ms": floor_ms,
            "over floor": floor_ms and taken_ms / floor_ms,
            "goal ms": floor_ms and floor_ms * allowed,
            "plan ms": ask(planned) * 1e3,
            "datasheet ms": ask(stated) * 1e3,
        }


def _random_weights(
    model: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> Decoder:
    decoder = random_decoder(model.config, dtype, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what drawing took is for KV
    return decoder


def rows_of(served: Served) -> list[Row]:
    batches = TINY_BATCHES if served.is_tiny else BATCHES
    sampled = TINY_BATCHES[1:] if served.is_tiny else SAMPLED
    prompts = TINY_PROMPTS if served.is_tiny else PROMPTS
    is_cpu = served.device.type == "cpu"
    if is_cpu:
        sampled = sampled if served.is_tiny else CPU_SAMPLED
        prompts = prompts[:3]  # longer ones are kernels' work
    main = sampled[0]

    def tpot(batch: tuple[int, int], name: str, sampling: dict[str, Any]) -> Row:
        title = f"TPOT {batch[0]} x {batch[1]}, {name}"
        return Row(title, partial(served.tpot, *batch, sampling), BUILD_S)

    def title(what: str, batch: tuple[int, int]) -> str:
        return f"{what} {batch[0]} x {batch[1]}"

    families = [(name, sampling) for name, (_, sampling) in FAMILIES.items()]
    drawn = [tpot(main, *each) for each in families]
    for batch in sampled[1:]:  # on a CPU one of them takes long enough
        drawn += [tpot(batch, *each) for each in families[: 1 if is_cpu else None]]
    greedy = [tpot(batch, "greedy", GREEDY) for batch in batches]
    ttfts = [Row(f"TTFT {size}", partial(served.ttft, size), BUILD_S) for size in prompts]
    timelines = [
        Row(title("step", batch), partial(served.timeline, *batch, GREEDY), BUILD_S)
        for batch in sampled
    ]
    _, qwen3 = FAMILIES["Qwen3"]
    return [
        Row("start", served.started, BUILD_S),
        *greedy[:3],
        drawn[0],
        Row("graphs equal plain steps", served.compare_graphs, BUILD_S),
        *ttfts[:2],
        *drawn[1:],
        *greedy[3:],
        *ttfts[2:],
        Row(
            f"TTFT {prompts[0]} among {main[0]} x {main[1]}",
            partial(served.prompt_among_decodes, prompts[0], *main),
            BUILD_S,
        ),
        Row(
            title("TPOT beside one that needs the host,", sampled[-1]),
            partial(served.tpot_beside_one, *sampled[-1]),
            BUILD_S,
        ),
        Row(title("TPOT by hand,", main), partial(served.tpot_by_hand, *main), BUILD_S),
        # Behind all that is timed: the profiler stays attached.
        *timelines,
        Row(title("step, Qwen3,", main), partial(served.timeline, *main, qwen3), BUILD_S),
    ]


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    run_part("gpu_engine", rows_of(Served(arguments)), arguments)


if __name__ == "__main__":
    main()
