"""Checks that captured graphs compute the same as the same steps without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from bench.gpu_rows import Absent
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.models.batch import Batch

if TYPE_CHECKING:  # a CPU captures nothing
    from disagg.engine.device.step_graphs import StepGraphs

# Prompts that come together: each step's rows must not be those of the one before.
COMPARED_PROMPTS = [(60, 60, 60), (20,), (1, 250), (7,) * 30, (130, 3), (33,) * 7]
COMPARED_OUTPUT = 4
MOST_DIFFERENT = 3e-2  # of bf16 logits: products of more rows are added up in another order


class Compared:
    """Captured graphs of a runner, each of whose steps is then computed without them.

    Attributes:
        differences: of each step's logits, as a part of the largest; of decodes, and of others.
    """

    def __init__(self, graphs: StepGraphs, runner: ModelRunner) -> None:
        self._graphs, self._runner = graphs, runner
        self.differences: dict[str, list[float]] = {"decodes": [], "mixed": []}

    def forward(self, batch: Batch) -> Tensor | None:
        logits = self._graphs.forward(batch)
        if logits is not None:
            plain = self._runner.decoder.forward(batch, self._runner.kv_cache.pages)
            difference = (logits - plain).abs().max() / plain.abs().max()
            kind = "decodes" if batch.max_query_len == 1 else "mixed"
            self.differences[kind].append(float(difference.nan_to_num(nan=float("inf"))))
        return logits


def compare_graphs(engine: Engine, new_prompt: Callable[[int], Sequence]) -> dict[str, Any]:
    """Steps of prompts and decodes that graphs replay, each computed once more without them.

    Args:
        new_prompt: a request with a prompt of so many tokens.
    """
    runner = cast(ModelRunner, engine.runner)
    if runner.graphs is None:
        raise Absent("a CPU captures no graphs")
    compared = Compared(runner.graphs, runner)
    graphs, runner.graphs = runner.graphs, compared  # type: ignore[assignment]
    try:
        for lens in COMPARED_PROMPTS:
            for num_tokens in lens:
                engine.submit(new_prompt(num_tokens))
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
