"""Measures what sampling costs a step: calls of torch, launches of kernels, and microseconds.

    python -m bench.sampler [--rows 32 256] [--context 1000]

Sampling parameters are the defaults of three model families (`generation_config.json`). Two
samplers take turns: "before" is `sampler_before`, and "after" is what a CPU does now, with compiled
loops, or with plain torch if there was no compiler. "calls" are the operations that torch
dispatches, without views; each is one launch or more on a GPU. "device calls" are those of the
path that a GPU takes, kernel launches included. They are counted without a GPU, and kernels do
nothing here, so only their number and the host's time for them mean anything.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench import sampler_before
from bench.report import finish, print_table, take_turns
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.kernels.sampling_rows import SamplingOps
from disagg.messages import GenerateRequest, SamplingParams

# vocabulary, and what `generation_config.json` sets
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3": (128_256, {"temperature": 0.6, "top_p": 0.9}),
    "Qwen2.5": (
        152_064,
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    ),
    "Qwen3": (151_936, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
}
ENOUGH_S = 10.0
VIEWS = {"view", "slice", "select", "unsqueeze", "squeeze", "t", "split", "split_with_sizes"}
VIEWS |= {"unbind", "expand", "as_strided", "detach", "alias", "_unsafe_view", "lift_fresh"}


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def num_calls(self) -> int:
        return sum(count for name, count in self.names.items() if name not in VIEWS)


def new_sequences(
    num: int, vocab_size: int, context: int, sampling: dict[str, Any]
) -> list[Sequence]:
    rng = random.Random(0)
    sequences = []
    for seed in range(num):
        tokens = tuple(rng.choices(range(vocab_size), k=context))
        request = GenerateRequest(
            request_id=f"{seed}",
            model="",
            token_ids=tokens,
            num_prompt_tokens=context,
            hash_root=b"",
            block_hashes=(),
            sampling=SamplingParams(max_tokens=10_000, seed=seed, **sampling),
            deadline_unix_s=0.0,
        )
        sequences.append(Sequence(request))
    return sequences


class Stepping:
    """A sampler in the middle of its sequences' answers."""

    def __init__(
        self, sequences: list[Sequence], vocab_size: int, ops: SamplingOps | None = None
    ) -> None:
        slots = Slots()
        cpu = torch.device("cpu")
        self.sequences = sequences
        self.sampler = Sampler(slots, vocab_size, cpu, ops)
        self.sampler.enter([sequence.slot for sequence in slots.enter(sequences)])

    def step(self, logits: Tensor) -> list[int]:
        positions = torch.tensor([len(each.tokens) - 1 for each in self.sequences])
        return self.launch(logits, positions)

    def launch(self, logits: Tensor, positions: Tensor) -> list[int]:
        """As a step whose batch is on the device already."""
        chosen = self.sampler.sample(logits, self.sequences, positions)
        token_ids = [token.token_id for token in chosen.read()]
        for sequence, token_id in zip(self.sequences, token_ids, strict=True):
            sequence.tokens.append(token_id)
        return token_ids


@contextmanager
def kernels_that_do_nothing() -> Iterator[list[str]]:
    """What the GPU's path launches, by name; results are whatever memory holds, and token 0."""
    from disagg.kernels.gpu import decode_inputs
    from disagg.kernels.gpu import floors as triton_floors
    from disagg.kernels.gpu import sampling as triton_sampling

    modules = {
        "_fill": decode_inputs,
        **dict.fromkeys(("_adjust", "_score", "_pick", "_remember"), triton_sampling),
        **dict.fromkeys(("_groups", "_select", "_floors"), triton_floors),
    }
    launched: list[str] = []
    launchers = {name: getattr(module, name) for name, module in modules.items()}

    def launch(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append(name)
        if name == "_pick":
            arguments[6].zero_()

    try:
        for name, module in modules.items():
            setattr(module, name, partial(launch, name))
        yield launched
    finally:
        for name, launcher in launchers.items():
            setattr(modules[name], name, launcher)


def device_calls(sequences: list[Sequence], vocab_size: int) -> tuple[int, float, Counter[str]]:
    """Calls of a step on a GPU's path, the host's microseconds for them, and their names."""
    from disagg.kernels.gpu.sampling import TritonSampling

    with kernels_that_do_nothing() as launched:
        stepping = Stepping(sequences, vocab_size, TritonSampling())
        logits = torch.empty(len(sequences), vocab_size)
        positions = torch.tensor([len(each.tokens) - 1 for each in sequences])
        stepping.launch(logits, positions)
        launched.clear()
        with Calls() as calls:
            stepping.launch(logits, positions)
        calls.names["zero_"] -= launched.count("_pick")
        num_calls = calls.num_calls + len(launched)
        took = min(_timed(partial(stepping.launch, logits, positions)) for _ in range(20))
    return num_calls, 1e6 * took, calls.names + Counter(launched)


def _timed(run: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def measure(family: str, num_rows: int, context: int, vocab_size: int) -> dict[str, Any]:
    sampling = FAMILIES[family][1]
    old = new_sequences(num_rows, vocab_size, context, sampling)
    new = Stepping(new_sequences(num_rows, vocab_size, context, sampling), vocab_size)
    # As peaked as a model's: some nats above a crowd.
    logits = torch.randn(num_rows, vocab_size) * 2.5
    begun = sampler_before.sample(logits.clone(), old), new.step(logits.clone())
    assert [token.token_id for token in begun[0]] == begun[1]
    nums_calls = []
    for run in (partial(sampler_before.sample, sequences=old), new.step):
        with Calls() as calls:
            run(logits.clone())
        nums_calls.append(calls.num_calls - 1)  # the copy

    def timed(run: Callable[[Tensor], Any]) -> float:
        own = logits.clone()
        return _timed(lambda: run(own))

    runs = {
        "before": partial(timed, partial(sampler_before.sample, sequences=old)),
        "after": partial(timed, new.step),
    }
    took = take_turns(runs, 5, ENOUGH_S)
    num_device_calls, host_us, _ = device_calls(
        new_sequences(num_rows, vocab_size, context, sampling), vocab_size
    )
    return {
        "defaults of": family,
        "sequences": num_rows,
        "calls before": nums_calls[0],
        "calls after": nums_calls[1],
        "us before": round(1e6 * took["before"]),
        "us after": round(1e6 * took["after"]),
        "device calls": num_device_calls,
        "host us of these": round(host_us),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--context", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    rows = []
    for num_rows in [2] if arguments.tiny else arguments.rows:
        for family, (vocab_size, _) in FAMILIES.items():
            size = 1000 if arguments.tiny else vocab_size
            rows.append(measure(family, num_rows, min(arguments.context, size), size))
    print_table(rows)
    finish("sampler", rows, context=arguments.context)


if __name__ == "__main__":
    main()
