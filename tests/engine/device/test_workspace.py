"""Memory that is kept from KV, against what is really allocated where that can be counted here.

That a step's tensors fit is for a GPU to show; `interpreted_graphs` counts those of graphs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from disagg.config import EngineConfig
from disagg.engine.device.batching import Batching
from disagg.engine.device.kv_shape import KVShape
from disagg.engine.device.memory_plan import StoredModel, plan_memory
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.device.step_graphs import graph_sizes
from disagg.engine.device.token_masks import TokenMasks
from disagg.engine.device.workspace import (
    COPIES_NBYTES,
    LAUNCHES_OF_WIDE_NORMS,
    ROWS_AT_ONCE,
    SAMPLING_NBYTES,
    SPLITS_NBYTES,
    captured_nbytes,
    running_nbytes,
)
from disagg.engine.sched.step import StepPlan
from disagg.kernels.gpu.packed_linear import MOST_SPLIT_ROWS, num_splits, tile_sizes
from disagg.kernels.gpu.packed_tile import MAX_ROWS
from disagg.kernels.kv_pages import FORMATS
from disagg.messages import SamplingParams
from disagg.models.layers import mean_squares
from disagg.time_model import StepFeatures
from tests.engine.device.test_sampler import new_sequence
from tests.models.paging import SMALL

LLAMA_3_8B = dataclasses.replace(
    SMALL,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    sliding_windows=(None,) * 32,
)


def test_logits_of_graphs_are_counted_once_and_not_for_each_graph() -> None:
    small, large = (
        captured_nbytes(dataclasses.replace(LLAMA_3_8B, vocab_size=n), 2, [8, 1024])
        for n in (1, 128257)
    )
    assert large - small == 1024 * 128256 * (4 + 2)


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that launch a kernel on a GPU: all but views."""

    num = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.num += not function.is_view
        return function(*args, **(kwargs or {}))


def test_launches_of_norms_over_all_heads_are_counted() -> None:
    heads = torch.zeros(2, 10, 16)
    with torch.inference_mode(), _Launches() as launches:  # type: ignore[no-untyped-call]
        mean_squares(heads, 8, None)
    assert launches.num == LAUNCHES_OF_WIDE_NORMS - 1  # and the sum over ranks


class _LiveNbytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the most bytes that tensors made meanwhile have at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[Any, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._live = {at: each for at, each in self._live.items() if not each[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return result


class _ChoosesNothing:
    """The place of the kernels, whose memory does not grow with the vocabulary."""

    def adjust_(self, logits: Tensor, *_: Any) -> None:
        pass

    def choose(self, logits: Tensor, *_: Any) -> Tensor:
        return torch.zeros(2, len(logits), dtype=torch.int64)

    def remember(self, *_: Any) -> None:
        pass


def test_sampling_takes_what_is_kept_for_it() -> None:
    """All rows have everything at once: scores, penalties, a mask, and allowed tokens."""
    num_seqs, vocab_size = 3 * ROWS_AT_ONCE, 40_000
    asked = SamplingParams(
        max_tokens=8, logprobs=1, repetition_penalty=1.1, allowed_token_ids=tuple(range(64))
    )
    slots, cpu = Slots(num_seqs), torch.device("cpu")
    sampler = Sampler(slots, vocab_size, cpu, _ChoosesNothing(), max_model_len=9)
    sequences = [new_sequence(asked, (1,)) for _ in range(num_seqs)]
    words = torch.zeros(num_seqs, vocab_size // 32, dtype=torch.int32)
    masks, positions = TokenMasks([*range(num_seqs)], words, cpu), torch.zeros(num_seqs).long()
    logits = torch.zeros(num_seqs, vocab_size)
    with _LiveNbytes() as live:
        sampler.enter([each.slot for each in slots.enter(sequences)])
        sampler.sample(logits, sequences, positions, masks)
    rows_nbytes = num_seqs * SAMPLING_NBYTES * vocab_size
    copies_nbytes = ROWS_AT_ONCE * COPIES_NBYTES * vocab_size
    assert rows_nbytes + copies_nbytes / 2 < live.most < rows_nbytes + copies_nbytes


def test_what_is_captured_is_kept_from_kv_unless_nothing_is() -> None:
    shape = KVShape.from_model(LLAMA_3_8B, "weights", 64, FORMATS["bfloat16"])

    def workspace(claim_nbytes: int | None, **changes: object) -> int:
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
        config = EngineConfig(**sizes, **changes)  # type: ignore[arg-type]
        plan = plan_memory(
            config, StoredModel(LLAMA_3_8B, shape, 2, config.quantization), 2048, claim_nbytes
        )
        return plan.workspace_nbytes

    claim_nbytes = 72 * 10**9
    eager = workspace(claim_nbytes, enforce_eager=True)
    captured = workspace(claim_nbytes) - eager
    assert captured == captured_nbytes(
        LLAMA_3_8B, 2, [size.num_tokens for size in graph_sizes(256)]
    )
    assert workspace(None) == eager
    packed = workspace(claim_nbytes, quantization="int8") - eager
    assert packed == captured + SPLITS_NBYTES


def test_sums_of_shared_columns_fit_into_what_is_kept_for_them() -> None:
    """Of the product that has most, on a device of 160 multiprocessors."""
    num_programs, most = 3 * 160, 0
    for num_rows in range(1, MOST_SPLIT_ROWS + 1):
        for num_out in range(128, 1 << 15, 128):
            rows, width = tile_sizes(num_rows, MAX_ROWS)
            num_tiles = -(-num_rows // rows) * -(-num_out // width)
            splits = num_splits(num_tiles, 1024, num_programs)
            most = max(most, splits * num_rows * num_out * 4 if splits > 1 else 0)
    assert SPLITS_NBYTES / 2 < most <= SPLITS_NBYTES


def test_tables_of_running_sequences_are_kept_from_kv() -> None:
    """All of a step with penalties, one of them as long as any can be, after shorter ones."""
    num_seqs, max_model_len = 6, 500
    model = dataclasses.replace(SMALL, vocab_size=900, max_model_len=1024)
    slots, cpu = Slots(num_seqs), torch.device("cpu")
    sampler = Sampler(slots, model.vocab_size, cpu, max_model_len=max_model_len)
    batching = Batching(slots, 16, -(-max_model_len // 16), cpu)
    penalised = SamplingParams(max_tokens=8, repetition_penalty=1.1)
    for num_tokens in (2, 260, max_model_len):
        sequences = [new_sequence(penalised, (1,) * (num_tokens - 1)) for _ in range(num_seqs)]
        sampler.enter([each.slot for each in slots.enter(sequences)])
        logits, positions = torch.zeros(num_seqs, 900), torch.full((num_seqs,), num_tokens - 2)
        sampler.sample(logits, sequences, positions)
        for each in sequences:
            each.block_ids, each.num_computed = [*range(32)], num_tokens - 2
        plan = StepPlan(sequences, [1] * num_seqs, num_seqs, StepFeatures())
        batching.batch(batching.inputs(plan, sequences))
    tables = sampler._state.tables
    assert slots.num_slots == num_seqs, "as many as a step may have"
    assert tables.seen_ids.shape[1] == max_model_len + 1
    assert tables.counts.nbytes == num_seqs * model.vocab_size * 4
    kept = tables.numbers, tables.stop_ids, tables.seen_ids, tables.num_seen, batching.tables
    room = running_nbytes(model, num_seqs, max_model_len)
    assert room / 3 < sum(table.nbytes for table in kept) < room
