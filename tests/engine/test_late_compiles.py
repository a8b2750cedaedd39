"""No request waits for Triton's compiler: a GPU's engine has launched every kernel at its start."""

from __future__ import annotations

import dataclasses
import itertools
import random
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from bench.random_models import random_weights
from disagg.engine.device import rank_model, step_graphs
from disagg.engine.device import sampler as sampler_module
from disagg.engine.device.batching import Batching
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.kv_shape import KVShape
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.engine.sched.scheduler import Scheduler
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.sampling import TritonSampling
from disagg.kernels.kv_pages import FORMATS
from disagg.messages import SamplingParams
from disagg.models.decoder import Decoder, scores_of
from disagg.models.model_config import ModelConfig
from disagg.worker.first_steps import first_steps
from tests.engine.workload import new_sequence
from tests.models.paging import SMALL, SMALL_SPARSE

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS, MAX_TOKENS, MAX_MODEL_LEN = 64, 200, 24, 512, 2048
LENGTHS = (1, 2, 3, 7, 9, 12, 16, 17, 33, 63, 65, 130, 255, 257, 300, 511, 700, 1500)
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.5, "repetition_penalty": 1.2},
    {"min_p": 0.1, "presence_penalty": 0.4},
    {"logprobs": 2, "logit_bias": ((3, 1.0),)},
    {"min_tokens": 3},
    {"prompt_logprobs": 1},
)


class Launches:
    """Stands for Triton: launches nothing, and knows the kernels that it would have compiled."""

    def __init__(self) -> None:
        self.kernels: set[tuple[object, ...]] = set()

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Triton compiles anew for other constants, types, alignments, and for an integer of 1."""
        key: list[object] = [kernel.fn.__name__, *sorted(constants.items())]
        asked = [each for each in kernel.params if not each.is_constexpr]
        for argument, parameter in zip(arguments, asked, strict=True):
            by_value = not parameter.do_not_specialize
            if isinstance(argument, Tensor):
                by_address = by_value and not parameter.do_not_specialize_on_alignment
                is_aligned = by_address and argument.data_ptr() % 16 == 0
                key.append((argument.dtype, is_aligned))
            elif isinstance(argument, int):
                key.append((by_value and (argument == 1 or argument % 16), argument < 1 << 31))
            else:
                key.append(type(argument))
        self.kernels.add(tuple(key))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches()

    def run(
        self: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool, **constants: Any
    ) -> None:
        found.launch(self, *arguments, **constants)

    def record(forward: Callable[[], object]) -> Callable[[], object]:
        forward()
        return forward

    monkeypatch.setattr(triton.JITFunction, "run", run)
    # What no kernel writes must be a valid token, or at least a number.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(Tensor, "new_empty", Tensor.new_zeros)
    monkeypatch.setattr(rank_model, "Batching", partial(Batching, use_kernel=True))
    monkeypatch.setattr(sampler_module, "sampling_ops_for", lambda device: TritonSampling())
    monkeypatch.setattr(step_graphs, "record_cuda_graph", lambda: record)
    yield found


def _engine(config: ModelConfig, format: str, *, has_graphs: bool, has_drafts: bool) -> Engine:
    """As `build_engine` makes it on a GPU."""
    scores = scores_of(config)
    ops = TritonOps(config.num_heads, 132, dtype=torch.bfloat16, scores=scores)
    decoder = Decoder(config, random_weights(config, torch.bfloat16, CPU, seed=2), ops)
    shape = KVShape.from_model(config, "random", BLOCK_SIZE, FORMATS[format])
    runner = ModelRunner(decoder, KVCache(shape, NUM_BLOCKS, CPU), max_num_seqs=MAX_NUM_SEQS)
    runner.warm_up(MAX_TOKENS, MAX_NUM_SEQS)
    runner.warm_up_tiles(MAX_MODEL_LEN)
    if has_graphs:
        runner.capture(MAX_NUM_SEQS)
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, BLOCK_SIZE, array("Q", bytes(8 * NUM_BLOCKS))),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=config.vocab_size,
        proposer=PromptLookup(4, 3) if has_drafts else None,
    )
    return Engine(scheduler, runner, launcher=runner)


assert SMALL_SPARSE.latent is not None and SMALL_SPARSE.latent.index is not None
_INDEX = dataclasses.replace(SMALL_SPARSE.latent.index, num_chosen=700)
CHOOSING = dataclasses.replace(  # in longer contexts, whose pieces are then merged
    SMALL_SPARSE, latent=dataclasses.replace(SMALL_SPARSE.latent, index=_INDEX)
)
HEADS = dataclasses.replace(SMALL, num_heads=4, num_kv_heads=1, num_layers=2)


@pytest.mark.parametrize(
    ("config", "format", "has_graphs", "has_drafts"),
    [
        pytest.param(HEADS, "bfloat16", False, False, id="no graphs"),
        pytest.param(HEADS, "int8", True, True, id="drafts"),
        pytest.param(CHOOSING, "bfloat16", False, False, id="latents, no graphs"),
        pytest.param(CHOOSING, "bfloat16", True, False, id="latents"),
    ],
)
def test_requests_need_no_kernel_that_is_not_compiled(
    config: ModelConfig, format: str, has_graphs: bool, has_drafts: bool, launches: Launches
) -> None:
    config = dataclasses.replace(config, max_model_len=MAX_MODEL_LEN, vocab_size=997)
    engine = _engine(config, format, has_graphs=has_graphs, has_drafts=has_drafts)
    first_steps(engine, itertools.count().__next__)  # so slow that no long prompt is timed
    at_start = set(launches.kernels)
    rng = random.Random(1)
    for num_together in (1, 30, 2, 60, 5, 30):
        for _ in range(num_together):
            tokens = tuple(rng.choices(range(20), k=rng.choice(LENGTHS)))
            sequence = new_sequence(tokens, BLOCK_SIZE)
            asked = {"max_tokens": rng.choice((1, 4, 12)), **rng.choice(ASKED)}
            sequence.sampling = SamplingParams(stop_token_ids=(1, 2), **asked)
            engine.submit(sequence)
        while engine.has_work:
            engine.step()
    assert not launches.kernels - at_start
