"""The memory layout of keys and values: formats, and a slab as the tensors that kernels index.

A page has the keys or the values of one head and one layer in one block: `block_size` vectors. A
format with one byte per value, or half a byte, keeps a float32 scale for each vector at the end of
the vector's page:

    values  block_size * head_dim * 1 byte, or half of that
    scales  block_size * 4 bytes

Each part is padded to 16 bytes, the widest load of a GPU, so that every page and its scales are
aligned. A block has the pages of its first head in all layers, then those of the second head:

    block  [num_kv_heads, num_layers, 2 (keys, values)] pages

In latent attention a token has one vector per layer, which is its key; the first values of the
vector are its value. So there is one head, with one page instead of two.

Layers with a recurrent state have no pages: other blocks hold their states (`recurrent_state`).

So a block is one contiguous run of bytes, the heads of a rank are a run in the block of all heads,
and transfers need not know the format or the model. Must not know which sequence holds a block, or
where the memory comes from.

An int4 value is the upper half of an int8 value: a multiple of 16 from -128 to 112. Two neighbours
share a byte, the first in its lower half. A shift and a mask give both as int8 values, next to each
other as a matrix product needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from disagg.kernels.recurrent_state import StatePages, StateShape, state_pages

if TYPE_CHECKING:  # loading torch takes seconds, and formats and sizes do not need it
    import torch
    from torch import Tensor

SCALE_NBYTES = 4
ALIGNMENT = 16
PACKED_STEP = 16  # difference between neighbouring packed numbers
PACKED_TOP = 7  # the largest packed number is so many steps above 0; the smallest is 8 below


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The type of a stored value.

    Attributes:
        itemsize: bytes of a stored number.
        stored: torch's name of its dtype.
        largest: the stored number of the value with the largest magnitude in a vector; 0.0 for a
            format without scales. If negative, it is used for values of both signs, and the scale
            has the sign, so that the format's lowest number, which has no positive counterpart, is
            used too.
        packed: how many neighbouring values share a stored number, 1 or 2. Heads have even sizes
            (`models.model_config` refuses others).
        capability: the lowest compute capability of GPUs for which Triton can convert its numbers.
    """

    name: str
    itemsize: int
    stored: str
    largest: float = 0.0
    packed: int = 1
    capability: tuple[int, int] = (0, 0)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a stored number."""
        import torch

        dtype: torch.dtype = getattr(torch, self.stored)
        return dtype

    @property
    def has_scales(self) -> bool:
        return self.largest != 0.0

    def scales_offset(self, block_size: int, head_dim: int) -> int:
        """The offset of a page's first scale in the page, in bytes."""
        return _aligned(self._values_nbytes(block_size, head_dim))

    def page_nbytes(self, block_size: int, head_dim: int) -> int:
        if not self.has_scales:
            return self._values_nbytes(block_size, head_dim)
        return _aligned(self.scales_offset(block_size, head_dim) + block_size * SCALE_NBYTES)

    def _values_nbytes(self, block_size: int, head_dim: int) -> int:
        return block_size * (head_dim // self.packed) * self.itemsize


FORMATS = {
    each.name: each
    for each in (
        KVFormat("float32", 4, "float32"),
        KVFormat("bfloat16", 2, "bfloat16"),
        KVFormat("float16", 2, "float16"),
        KVFormat("int8", 1, "int8", 127.0),
        KVFormat("int4", 1, "int8", -128.0, packed=2),
        KVFormat("fp8", 1, "float8_e4m3fn", 448.0, capability=(8, 9)),
    )
}


def format_of(dtype: torch.dtype) -> KVFormat:
    """The format that stores values of `dtype` as they are."""
    return FORMATS[str(dtype).removeprefix("torch.")]


class LayerPages(NamedTuple):
    """One layer of a slab. It is made once, because making a view costs 1.6 us in each launch.

    Attributes:
        values, scales: those of `KVPages` without the dimension of the layers.
        pairs: the bytes of `values` as int16, two bytes each, for `attention_tile`. None for a
            format without scales, or if a vector has an odd number of bytes.
    """

    values: Tensor
    pairs: Tensor | None
    scales: Tensor | None


@dataclass(frozen=True, slots=True)
class KVPages:
    """Views of one slab.

    Attributes:
        values: [num_blocks, num_layers, num_vectors, num_kv_heads, block_size, head_dim]; if
            packed, the last dimension is half as long. In memory heads come before layers, and
            pages with scales are not adjacent. Two vectors are a key and a value; one is a latent.
        scales: float32, shaped as `values` without its last dimension; or None. A stored value
            times the scale of its vector is the value.
        rows: one row per page in the order of memory, [num_blocks * num_kv_heads * num_layers *
            num_vectors, *]: the values; with scales, all bytes as uint8.
        blocks: one row per block, [num_blocks, *], of the same dtype as `rows`.
        layers: `values` and `scales` by layer of the model, of those that have KV.
        places: of each layer of the model, its group and its place in a block of the group. Layers
            of one group share a block table (`disagg.kv_groups`).
        states: the same memory as recurrent states, whose groups come last; None: no layer has one.
    """

    format: KVFormat
    values: Tensor
    scales: Tensor | None
    rows: Tensor
    blocks: Tensor
    layers: Mapping[int, LayerPages]
    places: tuple[tuple[int, int], ...]
    num_groups: int
    states: StatePages | None = None

    @property
    def num_kv_groups(self) -> int:
        """The groups that have KV, which come first."""
        return self.num_groups - (0 if self.states is None else self.states.num_blocks)

    @property
    def head_dim(self) -> int:
        return self.values.shape[5] * self.format.packed

    @property
    def num_vectors(self) -> int:
        """The number of vectors that a token has in each layer and head."""
        return self.values.shape[2]

    @property
    def page_stride(self) -> int:
        """The distance from a page to the next page in memory, in stored numbers."""
        return self.rows.stride(0)

    @property
    def head_pages(self) -> int:
        """The distance from a page to the page of the next head, in pages.

        The strides of `values` do not tell it for one KV head, because torch may give a dimension
        of size one any stride.
        """
        return self.num_vectors * self.values.shape[1]


def clear_begun_blocks(
    kv_cache: KVPages,
    block_tables: Tensor,
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    num_groups: int = 1,
) -> None:
    """Zero the blocks that a step begins and does not fill, before it writes.

    Others read whole blocks and mask their unwritten ends, but a NaN that an earlier owner left
    there would survive the mask (0 * NaN is NaN).

    Args:
        block_tables: [num_seqs, num_groups * columns], those of `num_groups` groups of layers.
    """
    size = kv_cache.values.shape[4]
    for row, (length, new) in enumerate(zip(context_lens, query_lens, strict=True)):
        if 0 < length % size <= new:
            for tables in block_tables[row].chunk(num_groups):
                kv_cache.blocks[int(tables[length // size])] = 0


def pages_of(
    memory: Tensor, format: KVFormat, num_layers: int, num_kv_heads: int, block_size: int,
    head_dim: int, num_vectors: int = 2, places: tuple[tuple[int, int], ...] | None = None,
    states: StateShape | None = None,
) -> KVPages:  # fmt: skip
    """Make the views of a slab.

    Args:
        memory: flat uint8 tensor with a whole number of blocks.
        num_layers: layers in a block.
        num_vectors: vectors of a token in each layer and head: 2, or 1 for latent attention.
        places: see `KVPages`; None: a block has all layers of the model. Layers with a recurrent
            state are in the last group, which stands for all groups of their blocks.
        states: their shape; None: there are none.
    """
    import torch

    places = places or tuple((0, layer) for layer in range(num_layers))
    num_groups = max(places)[0] + 1
    pages_per_block = num_kv_heads * num_layers * num_vectors
    dims = (-1, num_kv_heads, num_layers, num_vectors)
    width, page_nbytes = head_dim // format.packed, format.page_nbytes(block_size, head_dim)
    num_kv_groups, of_states = num_groups, None
    if states is not None:
        of_states = state_pages(memory, states, pages_per_block * page_nbytes)
        num_kv_groups, num_groups = num_groups - 1, num_groups - 1 + of_states.num_blocks
    scales = None
    if not format.has_scales:
        rows = memory.view(format.dtype).view(-1, block_size * head_dim)
        values = rows.view(*dims, block_size, head_dim).movedim(1, 3)
        layers = [LayerPages(layer, None, None) for layer in values.unbind(1)]
    else:
        rows = memory.view(-1, page_nbytes)
        begin = format.scales_offset(block_size, head_dim)
        end = begin + block_size * SCALE_NBYTES
        stored = rows[:, : block_size * width].view(format.dtype)
        values = stored.view(*dims, block_size, width).movedim(1, 3)
        scales = rows[:, begin:end].view(torch.float32).view(*dims, block_size).movedim(1, 3)
        layers = [
            LayerPages(of_layer, of_layer.view(torch.int16) if width % 2 == 0 else None, its_scales)
            for of_layer, its_scales in zip(values.unbind(1), scales.unbind(1), strict=True)
        ]
    return KVPages(
        format=format,
        values=values,
        scales=scales,
        rows=rows,
        blocks=rows.view(-1, pages_per_block * rows.shape[1]),
        layers={
            layer: layers[place]
            for layer, (group, place) in enumerate(places)
            if group < num_kv_groups
        },
        places=places,
        num_groups=num_groups,
        states=of_states,
    )


def new_pages(
    format: KVFormat, num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int,
    head_dim: int, device: torch.device, num_vectors: int = 2,
    places: tuple[tuple[int, int], ...] | None = None, states: StateShape | None = None,
) -> KVPages:  # fmt: skip
    """Allocate a slab of zeros, and make its views; see `pages_of`."""
    import torch

    page_nbytes = format.page_nbytes(block_size, head_dim)
    nbytes = num_blocks * num_layers * num_vectors * num_kv_heads * page_nbytes
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    heads = (num_layers, num_kv_heads, block_size, head_dim, num_vectors)
    return pages_of(memory, format, *heads, places, states)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
