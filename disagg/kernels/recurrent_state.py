"""The recurrent state of layers with gated delta nets, and where blocks of the KV cache hold it.

A head's state is a matrix that each token changes, and what its causal convolution still needs of
the last tokens. It has the same size after any number of tokens. In a block it is one run of
float32 numbers, so that a kernel finds all of a head's state at one address:

    state  [key_dim, value_dim] of the matrix, then [channels of the head, taps - 1]

Heads of queries and keys serve several heads of values, and each of these keeps their channels:
a few percent more, for which no head waits for another. The heads of all layers lie one after the
other in as many blocks as they need; none lies in two. Knows no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loading torch takes seconds, and sizes do not need it
    from torch import Tensor

ITEMSIZE = 4  # float32: each token's rounding would stay in the state
_ALIGNMENT = 4  # numbers, so that each head begins at 16 bytes


@dataclass(frozen=True, kw_only=True)
class DeltaHeads:
    """The heads of a gated delta net (arXiv 2412.06464).

    Attributes:
        num_key_heads: heads of queries and keys, of which each serves neighbouring heads of values.
        num_heads: heads of values, which have a state each.
        key_dim, value_dim: values of a key, and of a value.
        taps: tokens that a causal convolution sees, including the last one.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def num_channels(self) -> int:
        """Numbers of a token that the convolution reads: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def channels_of_head(self) -> int:
        """Those of one head of values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def state_numel(self) -> int:
        """Numbers of a head's state."""
        numel = self.key_dim * self.value_dim + self.channels_of_head * (self.taps - 1)
        return -(-numel // _ALIGNMENT) * _ALIGNMENT

    @property
    def state_nbytes(self) -> int:
        return self.state_numel * ITEMSIZE


@dataclass(frozen=True)
class StateShape:
    """The recurrent state of a model. num_layers: its layers that have one."""

    heads: DeltaHeads
    num_layers: int

    @property
    def nbytes(self) -> int:
        """Bytes of a sequence's state, without what is left over in its blocks."""
        return self.num_layers * self.heads.num_heads * self.heads.state_nbytes

    def heads_in(self, block_nbytes: int) -> int:
        """The number of heads whose state a block holds."""
        return block_nbytes // (self.heads.state_nbytes)

    def num_blocks(self, block_nbytes: int) -> int:
        """The number of blocks that hold a sequence's state.

        Raises:
            ValueError: a block is too small for one head.
        """
        if not (held := self.heads_in(block_nbytes)):
            raise ValueError(f"a block of {block_nbytes} bytes cannot hold the state of a head")
        return -(-self.num_layers * self.heads.num_heads // held)


@dataclass(frozen=True, slots=True)
class StatePages:
    """The view of a slab as states.

    Attributes:
        values: float32 [num_blocks, heads of a block, state_numel].
        num_blocks: of a sequence's state.
        places: for each layer that has states, where its heads are: in which of a sequence's blocks
            of state, and at which place in it; int64 [num_heads] each.
    """

    heads: DeltaHeads
    values: Tensor
    num_blocks: int
    places: tuple[tuple[Tensor, Tensor], ...]


def state_pages(memory: Tensor, shape: StateShape, block_nbytes: int) -> StatePages:
    """Make the view of a slab. memory: flat uint8 tensor with a whole number of blocks."""
    import torch

    held, numel = shape.heads_in(block_nbytes), shape.heads.state_numel
    rows = memory.view(-1, block_nbytes)[:, : held * numel * ITEMSIZE].view(torch.float32)
    values = rows.view(len(rows), held, numel)
    heads = torch.arange(shape.num_layers * shape.heads.num_heads, device=memory.device)
    each_layer = heads.view(shape.num_layers, -1)
    places = tuple(zip(each_layer // held, each_layer % held, strict=True))
    return StatePages(shape.heads, values, shape.num_blocks(block_nbytes), places)
