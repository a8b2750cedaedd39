"""LoRA adapters in memory: one read into host memory, and those in slots on the device.

All slots of a matrix are one tensor, padded to the largest rank, so that one operation computes a
step whose tokens have different adapters (`kernels.adapters`). Its addresses never change, so that
graphs can read it. The scale of an adapter is part of its B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from disagg.kernels.adapters import NO_ADAPTER, AdaptedMatrix
from disagg.kernels.ops import Ops
from disagg.models.adapter import AdapterDescription, padded_rank, sites
from disagg.models.batch import Batch
from disagg.models.model_config import ModelConfig
from disagg.models.packing import DeviceFormat
from disagg.models.share import WHOLE, Share
from disagg.models.weights import WeightReader

Adapt: TypeAlias = Callable[[Tensor, Tensor], object]  # adds to (out, what it is made of)
_CPU = torch.device("cpu")


class Place(NamedTuple):
    """A matrix of a layer, and which of several outputs that are stacked in it."""

    layer: int
    field: str
    output: int


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory, or a rank's part of it: A [rank, in] and B [out, rank]."""

    matrices: Mapping[Place, tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.matrices.values())


def read_adapter(
    adapter: AdapterDescription,
    config: ModelConfig,
    dtype: torch.dtype,
    share: Share = WHOLE,
    *,
    pinned: bool = False,
) -> HostAdapter:
    """Read an adapter, or a rank's part of it.

    Args:
        config: of the whole model.
        dtype: of the model's activations.
        pinned: whether the memory can be copied to a GPU while the host goes on.

    Raises:
        ModelError: a tensor cannot be read, or holds NaN.
    """
    # B is multiplied by the scale before it is rounded, so it is rounded once.
    reader = WeightReader(adapter.tensors, torch.float32, _CPU, 0, None, DeviceFormat(4))
    matrices = {}
    of_modules = sites(config, share)
    for module, scale in adapter.scales.items():
        for site in of_modules[module]:
            read = reader.read(adapter.parts(module, site))
            pair = read["a"].to(dtype), read["b"].mul_(scale).to(dtype)
            if pinned:
                pair = pair[0].pin_memory(), pair[1].pin_memory()
            matrices[Place(site.layer, site.field, site.place)] = pair
    return HostAdapter(matrices)


class AdapterTables:
    """The adapters on a device, in slots.

    Args:
        config: of the whole model.
        max_rank: the largest rank of an adapter.

    Attributes:
        layers: the tables of each layer, by field.
    """

    def __init__(
        self,
        config: ModelConfig,
        share: Share,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rank = padded_rank(max_rank)
        self.num_slots = num_slots
        outputs: list[dict[str, list[tuple[int, int]]]] = [{} for _ in range(config.num_layers)]
        for of_module in sites(config, share).values():
            for layer, field, _, part in of_module:
                outputs[layer].setdefault(field, []).append((part.shape[0], part.shape[1]))
        self.layers: list[dict[str, AdaptedMatrix]] = [
            {
                field: AdaptedMatrix.empty(
                    num_slots, rank, [num_out for num_out, _ in own], own[0][1], dtype, device
                )
                for field, own in fields.items()
            }
            for fields in outputs
        ]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for fields in self.layers for each in fields.values())

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Put an adapter into a slot, in order with the device's other work."""
        for fields in self.layers:
            for matrix in fields.values():
                matrix.clear(slot)
        for (layer, field, output), (a, b) in adapter.matrices.items():
            self.layers[layer][field].write(slot, output, a, b)


class StepAdapters:
    """The adapters of a step: adds what they make of activations to the outputs of matrices.

    Args:
        tokens: int32 [num_tokens]: the slot of each token's adapter, or -1.
    """

    def __init__(self, tables: AdapterTables, ops: Ops, tokens: Tensor) -> None:
        self._tables, self._ops, self._tokens = tables, ops, tokens
        self._rows = ops.plan_adapters(tokens, tables.num_slots)

    @classmethod
    def of(cls, batch: Batch, tables: AdapterTables | None, ops: Ops) -> StepAdapters | None:
        """None: no sequence of the batch has an adapter."""
        if batch.adapters is None or tables is None:
            return None
        by_sequence = batch.adapters
        if batch.table_rows is not None:
            by_sequence = by_sequence.index_select(0, batch.table_rows)
        starts, num_tokens = batch.query_start, batch.token_ids.shape[0]
        rows = torch.arange(num_tokens, dtype=starts.dtype, device=starts.device)
        sequences = torch.searchsorted(starts, rows, right=True) - 1
        tokens = by_sequence.index_select(0, sequences)
        # A graph has rows that belong to no sequence.
        return cls(tables, ops, tokens.masked_fill(batch.slots < 0, NO_ADAPTER))

    def of_rows(self, rows: Tensor) -> StepAdapters:
        """Those of some of its tokens."""
        return StepAdapters(self._tables, self._ops, self._tokens.index_select(0, rows))

    def adding(self, layer: int, field: str) -> Adapt:
        """The function of a matrix, which does nothing if no adapter can change the matrix."""
        matrix = self._tables.layers[layer].get(field)
        if matrix is None:
            return lambda out, x: None
        return lambda out, x: self._ops.adapt_(out, x, matrix, self._rows)
