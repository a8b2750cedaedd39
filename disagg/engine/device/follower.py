"""A follower: any rank of a worker but the first. It computes each step on its part of the model.

It has no scheduler, no sequences and no sampler. The inputs of a step are the numbers that the
first rank uploads, and what the device keeps of the step before, such as its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from disagg.config import EngineConfig
from disagg.engine.device.adapters import adapter_memory
from disagg.engine.device.batching import Batching, StepBuffer, StepInputs
from disagg.engine.device.communicator import TorchCommunicator
from disagg.engine.device.engine_plan import EnginePlan
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.prompt_scores import forward_ranges
from disagg.engine.device.slots import Slots
from disagg.models.adapter_weights import HostAdapter
from disagg.models.batch import Batch
from disagg.models.decoder import load_model
from disagg.models.description import ModelDescription
from disagg.models.share import Share
from disagg.rank_messages import (
    LOOPBACK,
    ForgetAdapter,
    RankAdapter,
    RankCapture,
    RankDone,
    RankSlot,
    RankStep,
    RankWork,
)

if TYPE_CHECKING:  # imports Triton, which a machine without a GPU may lack
    from disagg.engine.device.step_graphs import StepGraphs


class Follower:
    """A follower rank. Call `load`, then `allocate`, then `follow` for each step.

    Args:
        largest_step: see `memory_plan.plan_memory`.
        num_threads: number of torch's threads on a CPU.

    Raises:
        StartupError: a setting contradicts the model or the machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        share: Share,
        largest_step: tuple[int, int],
        num_threads: int,
    ) -> None:
        torch.set_num_threads(num_threads)
        self._description, self._share = description, share
        self._plan = EnginePlan.from_config(config, description, share, largest_step)
        self._graphs: StepGraphs | None = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def device(self) -> torch.device:
        return self._plan.device

    def load(self, meeting_place: str, host: str = LOOPBACK) -> int | None:
        """Connect to the other ranks, and load this rank's weights.

        Returns the bytes that are left for KV on a GPU; None on a CPU.

        Args:
            meeting_place, host: see `TorchCommunicator`.

        Raises:
            ModelError: the weights do not fit the model's config, or are damaged.
        """
        plan = self._plan
        communicator = TorchCommunicator(self._share, self.device.type, meeting_place, host)
        self._decoder = load_model(
            self._description,
            plan.dtype,
            plan.device,
            quantization=plan.config.quantization,
            communicator=communicator,
        )
        self.adapters = adapter_memory(self._decoder, self._description, self._share, plan.config)
        return plan.room_nbytes()

    def allocate(self, num_blocks: int, max_num_seqs: int) -> KVCache:
        """Allocate the KV cache. `max_num_seqs`: most sequences of a step."""
        self._kv_cache = cache = KVCache(self._plan.shape, num_blocks, self.device)
        self._slots = Slots(max_num_seqs)
        max_num_blocks = -(-self._decoder.config.max_model_len // cache.block_size)
        self._batching = Batching(
            self._slots,
            cache.block_size,
            max_num_blocks,
            self.device,
            has_adapters=self._decoder.adapters is not None,
        )
        self._numbers, self._numbers_before = StepBuffer(self.device), StepBuffer(self.device)
        return cache

    def follow(self, work: RankWork) -> None:
        """Do the work that the first rank does now. Raises `RuntimeError` if a rank is gone."""
        match work:
            case RankStep():
                self._compute(work)
            case RankCapture():
                self._capture(work)
            case RankSlot(slot=slot, digest=digest):
                assert self.adapters is not None, "all ranks have adapters, or none has"
                self.adapters.write(slot, digest)

    def load_adapter(
        self, task: RankAdapter | ForgetAdapter, tell: Callable[[RankDone], object]
    ) -> None:
        """Begin to read a LoRA adapter into host memory, or free that.

        Args:
            tell: sends the first rank a message, from any thread.
        """
        memory = self.adapters
        assert memory is not None, "all ranks have adapters, or none has"
        if isinstance(task, ForgetAdapter):
            memory.forget(task.digest)
            return

        def ended(read: Future[HostAdapter]) -> None:
            error = read.exception()
            tell(RankDone(task.number, None if error is None else str(error)))

        memory.load(task.adapter).add_done_callback(ended)

    @torch.inference_mode()
    def _compute(self, step: RankStep) -> None:
        # The buffer that is written now is copied already: the first rank has read the results of
        # the step before the last one, and these depend on all ranks.
        self._numbers, self._numbers_before = self._numbers_before, self._numbers
        self._numbers.write_bytes(step.numbers)
        self._slots.num_slots = step.num_slots
        inputs = StepInputs(
            self._numbers,
            step.lengths,
            step.num_unread,
            step.num_decodes,
            step.query_lens,
            step.ends,
            step.longest,
            step.has_adapters,
        )
        batch, slots = self._batching.batch(inputs)
        if step.scored:
            forward_ranges(self._decoder, batch, self._kv_cache.pages, step.scored)
        else:
            self._forward(batch)
        ranks, num_sampled = self._decoder.ranks, slots.shape[0]
        if step.shares_tokens and num_sampled and ranks is not None:
            token_ids = torch.empty(num_sampled, dtype=torch.int64, device=self.device)
            self._batching.remember(slots, ranks.broadcast_(token_ids))

    def _forward(self, batch: Batch) -> Tensor:
        logits = None if self._graphs is None else self._graphs.forward(batch)
        if logits is not None:
            return logits
        return self._decoder.forward(batch, self._kv_cache.pages)

    def _capture(self, capture: RankCapture) -> None:
        from disagg.engine.device.step_graphs import StepGraphs, graph_sizes

        arrays, tables = self._batching.arrays, self._batching.tables
        assert arrays is not None, "only a GPU captures"
        sizes, pages = graph_sizes(capture.max_num_seqs), self._kv_cache.pages
        self._graphs = StepGraphs(self._decoder, pages, arrays, tables, sizes)
