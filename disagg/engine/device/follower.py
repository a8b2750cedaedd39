"""A follower: any rank of a worker but the first. It computes each step on its part of the model.

It has no scheduler, no sequences and no sampler. The inputs of a step are the numbers that the
first rank uploads, and what the device keeps of the step before, such as its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from disagg.config import EngineConfig
from disagg.engine.device.adapters import AdapterMemory
from disagg.engine.device.communicator import TorchCommunicator
from disagg.engine.device.engine_plan import EnginePlan
from disagg.engine.device.gpu import take_stream
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.prompt_scores import forward_ranges
from disagg.engine.device.rank_model import RankModel
from disagg.kernels.kv_pages import FORMATS
from disagg.models.adapter_weights import HostAdapter
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
        self._share = share
        self._plan = EnginePlan(config, description, share, largest_step)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        take_stream(self.device)

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
        chosen, share = self._plan.chosen, self._share
        model = chosen.model
        assert isinstance(model, ModelDescription)
        self._decoder = decoder = load_model(
            model,
            FORMATS[chosen.dtype].dtype,
            self.device,
            quantization=chosen.config.quantization,
            communicator=TorchCommunicator(share, self.device.type, meeting_place, host),
        )
        self.adapters = None
        if chosen.config.enable_lora:
            self.adapters = AdapterMemory(decoder, model, share, chosen.config)
        return self._plan.room_nbytes()

    def allocate(self, num_blocks: int, max_num_seqs: int) -> KVCache:
        """Allocate the KV cache. `max_num_seqs`: most sequences of a step."""
        kv_cache = KVCache(self._plan.chosen.shape, num_blocks, self.device)
        sizes = max_num_seqs, self._plan.chosen.max_model_len
        self._model = RankModel(self._decoder, kv_cache, *sizes)
        return kv_cache

    def follow(self, work: RankWork) -> None:
        """Do the work that the first rank does now. Raises `RuntimeError` if a rank is gone."""
        match work:
            case RankStep():
                self._compute(work)
            case RankCapture(max_num_seqs=max_num_seqs):
                self._model.capture_graphs(max_num_seqs)
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
        model, ranks = self._model, self._decoder.ranks
        model.slots.num_slots = step.num_slots
        batch, slots = model.batching.batch(model.batching.received(step.numbers, step.shape))
        if step.scored is not None:
            forward_ranges(self._decoder, batch, model.kv_cache.pages, step.scored)
        else:
            model.logits(batch)
        if step.shares_tokens and slots.shape[0] and ranks is not None:
            token_ids = torch.empty(slots.shape[0], dtype=torch.int64, device=self.device)
            model.batching.remember(slots, ranks.broadcast_(token_ids))
