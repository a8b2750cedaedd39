"""Hidden states of a model, kept for a head that drafts from them (`draft_layers`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class KeptStates:
    """A state of each token that has KV, in the slot of its KV.

    A step writes those of its tokens, also in a captured graph. So they are there as long as their
    KV, after a draft, a preemption or a prefix hit; but not for KV that another worker computed.

    Args:
        layers: the layers whose inputs make a state; the number of layers stands for what comes out
            of the last norm.
        fuse: makes states [num_tokens, width] of these, joined.

    Attributes:
        by_slot: [num_slots + 1, width]. The last row is for those of a captured step that no token
            uses.
    """

    def __init__(
        self, layers: tuple[int, ...], fuse: Callable[[Tensor], Tensor], by_slot: Tensor
    ) -> None:
        self.layers = layers
        self._fuse = fuse
        self.by_slot = by_slot

    @torch.inference_mode()
    def write(self, slots: Tensor, states: Tensor) -> None:
        """Keep the states of a step.

        Args:
            slots: int64 [num_tokens]; -1: no token.
            states: [num_tokens, len(layers) * hidden size], those of all layers side by side.
        """
        self.by_slot.index_copy_(0, slots.remainder(len(self.by_slot)), self._fuse(states))
