"""Samplers without a model, for `bench.host_step`, the GPU suite and a test.

Sampling parameters are the defaults of three model families (`generation_config.json`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    from disagg.kernels.gpu import floors as triton_floors
    from disagg.kernels.gpu import sampling as triton_sampling
    from disagg.kernels.gpu import step_arrays

    modules = {
        "_fill": step_arrays,
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


def device_calls(sequences: list[Sequence], vocab_size: int) -> Counter[str]:
    """What a step calls and launches on a GPU's path, views left out; how often, by name."""
    from disagg.kernels.gpu.sampling import TritonSampling

    with kernels_that_do_nothing() as launched:
        stepping = Stepping(sequences, vocab_size, TritonSampling())
        logits = torch.empty(len(sequences), vocab_size)
        positions = torch.tensor([len(each.tokens) - 1 for each in sequences])
        stepping.launch(logits, positions)
        launched.clear()
        with Calls() as calls:
            stepping.launch(logits, positions)
    calls.names["zero_"] -= launched.count("_pick")  # by the kernels that do nothing
    return Counter({name: num for name, num in calls.names.items() if name not in VIEWS}) + Counter(
        launched
    )
