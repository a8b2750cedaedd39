"""What each rank of a worker has, the first one too: its part of a model, with the KV and inputs.

Computes the logits of steps. Must not know sequences or how tokens are chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from disagg.engine.device.batching import Batching
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.slots import Slots
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder

if TYPE_CHECKING:  # imports Triton, which a machine without a GPU may lack
    from disagg.engine.device.step_graphs import StepGraphs


class RankModel:
    """A rank's decoder on its KV cache.

    Args:
        max_num_seqs: sequences for which the tables have room; a larger step enlarges them.
        max_model_len: longest sequence; None: the longest that the model allows.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        max_num_seqs: int = 1,
        max_model_len: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.graphs: StepGraphs | None = None
        self.slots = Slots(max_num_seqs)
        self.max_model_len = max_model_len or decoder.config.max_model_len
        self.max_num_blocks = -(-self.max_model_len // kv_cache.block_size)
        self.batching = Batching(
            self.slots,
            kv_cache.block_size,
            self.max_num_blocks,
            decoder.device,
            has_adapters=decoder.adapters is not None,
            num_groups=kv_cache.pages.num_groups,
        )

    def logits(self, batch: Batch) -> Tensor:
        """As `Decoder.forward`, by a captured graph if there is one."""
        logits = None if self.graphs is None else self.graphs.forward(batch)
        return self.decoder.forward(batch, self.kv_cache.pages) if logits is None else logits

    def capture_graphs(self, max_num_seqs: int) -> None:
        """Capture small steps of up to `max_num_seqs` sequences as CUDA graphs."""
        from disagg.engine.device.step_graphs import StepGraphs, graph_sizes

        arrays, tables = self.batching.arrays, self.batching.tables
        assert arrays is not None, "only a GPU captures"
        sizes, pages = graph_sizes(max_num_seqs), self.kv_cache.pages
        self.graphs = StepGraphs(self.decoder, pages, arrays, tables, sizes)
