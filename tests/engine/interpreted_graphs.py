"""Decode graphs on the kernels; run by `test_interpreted.py` under Triton's interpreter.

A recording here repeats its calls on the same tensors, as a captured graph does on a device.
"""

from __future__ import annotations

import dataclasses
import threading
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from bench.random_models import random_weights
from disagg.engine.device import build, rank_model, step_graphs
from disagg.engine.device.batching import Batching
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.kv_shape import KVShape
from disagg.engine.device.runner import ModelRunner
from disagg.engine.device.step_graphs import GraphSize, Record, StepGraphs, graph_sizes
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.step_arrays import StepArrays
from disagg.kernels.kv_pages import KVPages, format_of
from disagg.kv_groups import LayerGroups, group_layers
from disagg.models import decoder as decoder_module
from disagg.models.adapter_weights import AdapterTables
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder, scores_of
from disagg.models.kept_states import KeptStates
from disagg.models.model_config import ModelConfig
from disagg.models.share import WHOLE
from disagg.rank_messages import RankCapture, RankWork
from tests.engine.fake_followers import engine_of_ranks
from tests.engine.workload import new_sequence
from tests.models.checkpoints import write_checkpoint
from tests.models.paging import SMALL, SMALL_HYBRID, SMALL_SPARSE, Tokens, make_batch, new_slab

BLOCK_SIZE = 4
NUM_BLOCKS = 64
# Where many steps are interpreted: kernels have a program for each head.
ONE_KV_HEAD = dataclasses.replace(SMALL, num_heads=3, num_kv_heads=1)
ROUNDING = 2e-5  # matrices of more rows are multiplied in another order


# Captures without the step that a device computes meanwhile, which takes seconds here.
NOT_COMPUTED: Record = lambda forward: forward  # noqa: E731


def fake_record(forward: Callable[[], object]) -> Callable[[], object]:
    forward()
    return forward


class Captured:
    """Graphs, and the arrays that they read."""

    def __init__(
        self,
        decoder: Decoder,
        slab: KVPages,
        max_num_seqs: int,
        sizes: list[GraphSize],
        record: Record = fake_record,
    ) -> None:
        most = max(size.num_tokens for size in sizes)
        self.arrays = StepArrays.empty(max_num_seqs, most, decoder.device)
        self.tables = torch.zeros(max_num_seqs + 1, 128, dtype=torch.int32)
        made = decoder, slab, self.arrays, self.tables, sizes, record
        self.graphs = StepGraphs(*made)

    def forward(self, batch: Batch) -> Tensor | None:
        """With the batch in the arrays, as `StepArrays.fill` writes it, and tables by slot."""
        arrays, num_seqs = self.arrays, len(batch.query_lens)
        num_tokens, num_logits = len(batch.token_ids), len(batch.logits_rows)
        if num_tokens > arrays.max_num_tokens:
            return self.graphs.forward(batch)
        arrays.clear()
        arrays.token_ids.zero_()
        rows = num_seqs - torch.arange(num_seqs)
        self.tables[rows, : batch.block_tables.shape[1]] = batch.block_tables
        if batch.adapters is not None:
            self.tables[rows, -1] = batch.adapters
        there = dataclasses.replace(
            batch,
            token_ids=arrays.token_ids[:num_tokens].copy_(batch.token_ids),
            positions=arrays.positions[:num_tokens].copy_(batch.positions),
            slots=arrays.slots[:num_tokens].copy_(batch.slots),
            query_start=arrays.query_start[: num_seqs + 1].copy_(batch.query_start),
            context_lens=arrays.context_lens[:num_seqs].copy_(batch.context_lens),
            block_tables=self.tables,
            table_rows=arrays.table_rows[:num_seqs].copy_(rows),
            logits_rows=arrays.logits_rows[:num_logits].copy_(batch.logits_rows),
            adapters=None if batch.adapters is None else self.tables[:, -1],
        )
        return self.graphs.forward(there)


def decodes(max_num_seqs: int) -> list[GraphSize]:
    return [size for size in graph_sizes(max_num_seqs) if size.are_decodes]


def _sequences(contexts: list[int]) -> list[Tokens]:
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for index, context in enumerate(contexts):
        blocks = [order.pop() for _ in range(-(-(context + 4) // BLOCK_SIZE))]
        ids = [(7 * index + 3 * position) % SMALL.vocab_size for position in range(context + 4)]
        found.append(Tokens(ids, blocks))
    return found


def _steps(groups: list[list[int]], graphs: bool) -> tuple[list[Tensor], KVPages, Tensor]:
    """Logits of one step for each group of sequences, and at the end the cache and the states that
    are kept for drafts.

    Without graphs there are no kernels either, which take seconds under the interpreter; nor do
    prompts need them.
    """
    weights = random_weights(ONE_KV_HEAD, torch.float32, torch.device("cpu"), seed=2)
    decoder, plain = Decoder(ONE_KV_HEAD, weights, TritonOps(3, 1)), Decoder(ONE_KV_HEAD, weights)
    slab = new_slab(ONE_KV_HEAD, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    states = torch.zeros(NUM_BLOCKS * BLOCK_SIZE + 1, 2 * ONE_KV_HEAD.hidden_size)
    layers = 1, ONE_KV_HEAD.num_layers
    decoder.kept = plain.kept = KeptStates(layers, lambda each: each, states)
    sequences = _sequences([9, 1, 22, 13, 5])
    for sequence, context in zip(sequences, [9, 1, 22, 13, 5], strict=True):
        plain.forward(make_batch([(sequence, context)], BLOCK_SIZE), slab)
        sequence.num_computed = context
    captured = Captured(decoder, slab, 5, decodes(5)) if graphs else None
    logits, places = [], set()
    for group in groups:
        work = [(sequences[index], 1) for index in group]
        batch = make_batch(work, BLOCK_SIZE)
        found = captured.forward(batch) if captured is not None else plain.forward(batch, slab)
        assert found is not None
        logits.append(found.clone())
        places.add(found.untyped_storage().data_ptr())
        for sequence, _ in work:
            sequence.num_computed += 1
    assert captured is None or len(places) == 1, (
        "memory is for the largest step, not for each graph"
    )
    return logits, slab, states[:-1]


def test_graphs_equal_plain_steps() -> None:
    """Fewer sequences than before, others in their rows, and every size that was captured."""
    groups = [[0, 1, 2, 3, 4], [0, 1, 2, 3], [3, 2, 0], [4]]
    plain, plain_slab, plain_states = _steps(groups, graphs=False)
    captured, captured_slab, captured_states = _steps(groups, graphs=True)
    for ours, theirs in zip(captured, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(
        captured_slab.values, plain_slab.values, rtol=ROUNDING, atol=ROUNDING
    )
    torch.testing.assert_close(captured_states, plain_states, rtol=ROUNDING, atol=ROUNDING)


def test_graphs_with_adapters_equal_plain_steps() -> None:
    """One graph serves steps of any adapters, and the graph without them steps of none."""
    weights = random_weights(ONE_KV_HEAD, torch.float32, torch.device("cpu"), seed=2)
    decoder, plain = Decoder(ONE_KV_HEAD, weights, TritonOps(3, 1)), Decoder(ONE_KV_HEAD, weights)
    decoder.adapters = plain.adapters = AdapterTables(
        ONE_KV_HEAD, WHOLE, 2, 16, torch.float32, torch.device("cpu")
    )
    for matrix in (each for fields in plain.adapters.layers for each in fields.values()):
        matrix.a.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
        matrix.b.normal_(0, 0.1, generator=torch.Generator().manual_seed(4))
        matrix.ranks[:] = [matrix.rank] * 2
    slab = new_slab(ONE_KV_HEAD, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    sequences = _sequences([9, 5, 3])
    for sequence, context in zip(sequences, [9, 5, 3], strict=True):
        plain.forward(make_batch([(sequence, context)], BLOCK_SIZE), slab)
        sequence.num_computed = context
    captured = Captured(decoder, slab, 3, [GraphSize(True, 4)], NOT_COMPUTED)
    for slots in ([0, 1, -1], [1, -1, 0], None):
        batch = make_batch([(sequence, 1) for sequence in sequences], BLOCK_SIZE)
        if slots is not None:
            own = torch.tensor(slots, dtype=torch.int32)
            batch = dataclasses.replace(batch, adapters=own)
        theirs = plain.forward(batch, slab)
        ours = captured.forward(batch)
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING)


LONG = 300  # cut along its keys, which takes more than 256


class _Mixed(NamedTuple):
    """Four sequences, some of whose KV is there, a decoder on torch, and graphs of the kernels."""

    plain: Decoder
    graphs: Captured
    slab: KVPages
    sequences: list[Tokens]
    values: Tensor  # of the slab before any step


@pytest.fixture(scope="module", params=[ONE_KV_HEAD, SMALL_SPARSE], ids=["heads", "latents"])
def mixed(request: pytest.FixtureRequest) -> _Mixed:
    """Captured once, which takes seconds under the interpreter; each step begins with `values`."""
    config = dataclasses.replace(request.param, max_model_len=512)
    weights = random_weights(config, torch.float32, torch.device("cpu"), seed=2)
    decoder, plain = (
        Decoder(config, weights, TritonOps(3, 4, scores=scores_of(config))),
        Decoder(config, weights),
    )
    slab = new_slab(config, 128, BLOCK_SIZE, torch.float32)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3)).tolist()
    sequences = []
    for index, context in enumerate((LONG, 3, 30, 0)):
        ids = [(7 * index + 3 * place) % SMALL.vocab_size for place in range(context + 40)]
        blocks = [order.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))]
        sequences.append(Tokens(ids, blocks))
        if context:
            plain.forward(make_batch([(sequences[-1], context)], BLOCK_SIZE), slab)
            sequences[-1].num_computed = context
    values = slab.values.clone()
    graphs = Captured(decoder, slab, 4, [GraphSize(False, 16), GraphSize(False, 32)], NOT_COMPUTED)
    # What it leaves lies beyond the tokens of smaller steps, whose graphs must not look there.
    larger = [(sequences[2], 1), (sequences[3], 17), (sequences[0], 9), (sequences[1], 4)]
    assert graphs.forward(make_batch(larger, BLOCK_SIZE)) is not None
    return _Mixed(plain, graphs, slab, sequences, values)


def _mixed_step(
    mixed: _Mixed, work: list[tuple[int, int]], graphs: bool, *, every_row: bool
) -> tuple[Tensor, Tensor]:
    """Logits and KV of one step."""
    sequences, slab = mixed.sequences, mixed.slab
    slab.values.copy_(mixed.values)
    batch = make_batch([(sequences[i], n) for i, n in work], BLOCK_SIZE, every_row=every_row)
    if not graphs:
        return mixed.plain.forward(batch, slab).clone(), slab.values.clone()
    logits = mixed.graphs.forward(batch)
    assert logits is not None
    return logits.clone(), slab.values.clone()


@pytest.mark.parametrize(
    ("work", "every_row"),
    [
        pytest.param([(1, 1), (0, 5), (2, 8)], True, id="drafts"),
        pytest.param([(0, 1), (3, 25), (2, 2)], False, id="a prompt beside a decode and a draft"),
        pytest.param([(0, 9)], False, id="the rest of a long prompt"),
    ],
)
def test_prompts_and_drafts_equal_plain_steps(
    mixed: _Mixed, work: list[tuple[int, int]], every_row: bool
) -> None:
    plain, plain_values = _mixed_step(mixed, work, graphs=False, every_row=every_row)
    captured, captured_values = _mixed_step(mixed, work, graphs=True, every_row=every_row)
    torch.testing.assert_close(captured, plain, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(captured_values, plain_values, rtol=ROUNDING, atol=ROUNDING)


def test_what_no_graph_holds_is_left_to_the_decoder() -> None:
    weights = random_weights(SMALL, torch.float32, torch.device("cpu"), seed=2)
    decoder = Decoder(SMALL, weights, TritonOps(6, 1))
    slab = new_slab(SMALL, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    graphs = Captured(decoder, slab, 2, decodes(2), NOT_COMPUTED)
    sequences = _sequences([9, 1, 5])
    too_many = make_batch([(each, 1) for each in sequences], BLOCK_SIZE)
    assert graphs.forward(too_many) is None
    assert graphs.forward(make_batch([(sequences[0], 4)], BLOCK_SIZE)) is None


def _texts(
    graphs: bool,
    prompts: list[list[int]],
    config: ModelConfig,
    layers: LayerGroups | None,
    most: int,
) -> list[list[int]]:
    """What an engine makes of prompts that come in chunks of up to `most` tokens."""
    weights = random_weights(config, torch.float32, torch.device("cpu"), seed=2)
    decoder = Decoder(config, weights, TritonOps(3, 1) if graphs else None)
    format = format_of(torch.float32)
    shape = KVShape.from_model(config, "weights", BLOCK_SIZE, format, layers=layers)
    kv_cache = KVCache(shape, NUM_BLOCKS, torch.device("cpu"))
    runner = ModelRunner(decoder, kv_cache, max_num_seqs=3)
    if graphs:
        num_blocks = -(-config.max_model_len // BLOCK_SIZE)
        runner.batching = Batching(
            runner.slots,
            BLOCK_SIZE,
            num_blocks,
            decoder.device,
            use_kernel=True,
            num_groups=shape.groups.num_groups,
        )
        arrays, tables = runner.batching.arrays, runner.batching.tables
        assert arrays is not None
        sizes = [GraphSize(False, 8), *decodes(3)]
        made = decoder, kv_cache.pages, arrays, tables, sizes, NOT_COMPUTED
        runner.graphs = StepGraphs(*made)
    stamps, windows = array("Q", bytes(8 * NUM_BLOCKS)), shape.groups.windows
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, stamps, windows=windows)
    scheduler = Scheduler(pool, max_num_seqs=3, max_num_batched_tokens=most, max_model_len=128)
    return _said(Engine(scheduler, runner), prompts)


def _said(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt with the four tokens that follow, all in one batch."""
    sequences = [
        new_sequence(tuple(prompt), BLOCK_SIZE, 4, stop_ids=frozenset()) for prompt in prompts
    ]
    for sequence in sequences:
        engine.submit(sequence)
    while engine.has_work:
        engine.step()
    return [sequence.tokens for sequence in sequences]


def test_an_engine_says_the_same_with_graphs() -> None:
    """Of the last prompt a chunk has one token."""
    asked = [[3, 1, 4], list(range(9)), [5] * 9, [8, 9]], ONE_KV_HEAD, None, 8
    assert _texts(True, *asked) == _texts(False, *asked)


def test_and_with_layers_that_forget_what_left_their_window() -> None:
    config = dataclasses.replace(ONE_KV_HEAD, sliding_windows=(6, None))
    prompts = [[*range(3, 60), *range(33)], [5, 7, 5]]
    in_groups = _texts(True, prompts, config, group_layers(config.sliding_windows), 48)
    assert in_groups == _texts(False, prompts, config, None, 48)


def test_and_with_recurrent_states() -> None:
    """A prompt in chunks that begin in a row and behind one; states move to another block."""
    config = dataclasses.replace(SMALL_HYBRID, num_heads=3, num_kv_heads=1)
    asked = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [5, 7, 5]], config, None, 7
    assert _texts(True, *asked) == _texts(False, *asked)


def _texts_of_ranks(
    directory: Path, num_ranks: int, place: Path
) -> tuple[list[list[int]], list[RankWork]]:
    """What an engine says, with graphs where it has several ranks; and what these were given."""
    sizes = {
        "block_size": BLOCK_SIZE,
        "max_model_len": 16,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 4,
        "num_gpu_blocks_override": 16,
    }
    made = engine_of_ranks(directory, place, num_ranks=num_ranks, **sizes)
    with made as (engine, _, others):
        assert isinstance(engine.runner, ModelRunner)
        if num_ranks > 1:
            engine.runner.capture(2)
            engine.launcher = engine.runner  # tokens of a step are input of the next on every rank
        texts = _said(engine, [[3, 1, 4], list(range(6))])
    return texts, others.given


def test_ranks_that_capture_and_replay_the_same_graphs_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one rank without kernels and graphs. The sums between ranks are part of each recording."""
    one_at_a_time, run = threading.Lock(), InterpretedFunction.run
    replays: list[str] = []

    def run_alone(self: Any, *arguments: Any, **constants: Any) -> None:
        with one_at_a_time:  # the interpreter is one for all threads
            run(self, *arguments, **constants)

    def record(forward: Callable[[], object]) -> Callable[[], object]:
        forward()

        def replay() -> None:
            replays.append(threading.current_thread().name)
            forward()

        return replay

    write_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    plain, _ = _texts_of_ranks(tmp_path / "model", 1, tmp_path)
    kernels = TritonOps(3, 1)
    monkeypatch.setattr(InterpretedFunction, "run", run_alone)
    monkeypatch.setattr(decoder_module, "ops_for", lambda *_: kernels)
    monkeypatch.setattr(rank_model, "Batching", partial(Batching, use_kernel=True))
    monkeypatch.setattr(step_graphs, "record_cuda_graph", lambda: record)
    sizes = [GraphSize(False, 4), *decodes(2)]
    monkeypatch.setattr(step_graphs, "graph_sizes", lambda _: sizes)
    monkeypatch.setattr(build, "_warm_up", lambda runner, *_: runner.warm_up(4, 2))
    captured, given = _texts_of_ranks(tmp_path / "model", 2, tmp_path)
    assert captured == plain
    assert isinstance(given[2], RankCapture)  # behind two steps that warm up
    num_steps = len(given) - 3
    assert len(replays) == 2 * num_steps > 8, "a rank launched what the other one replayed"
    assert replays.count(threading.current_thread().name) == num_steps
