"""Hidden states of a model, kept for a head that drafts from them (`draft_layers`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from disagg.models.batch import Batch


class KeptStates:
    """A state of each token that has KV, in the slot of its KV.

    Of Medusa heads, which read no other: of each token whose logits were needed.

    A step writes those of its tokens, also in a captured graph. So they are there as long as their
    KV, after a draft, a preemption or a prefix hit; but not for KV that another worker computed.

    Args:
        layers: the layers whose inputs make a state; the number of layers stands for what comes out
            of the last norm.
        of_rows: whether only states of tokens whose logits are needed are kept.
        fuse: makes states [num_tokens, width] of these, joined.

    Attributes:
        by_slot: [num_slots + 1, width]. The last row is for those of a captured step that no token
            uses.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        fuse: Callable[[Tensor], Tensor],
        by_slot: Tensor,
        *,
        of_rows: bool = False,
    ) -> None:
        self.layers = layers
        self.of_rows = of_rows
        self._fuse = fuse
        self.by_slot = by_slot

    @torch.inference_mode()
    def write(self, batch: Batch, states: Tensor) -> None:
        """Keep the states of a step, those of all layers side by side.

        Args:
            states: [num_tokens, or num_logits if it is `of_rows`, len(layers) * hidden size].
        """
        slots = batch.slots  # -1: no token
        if self.of_rows:
            slots = slots.index_select(0, batch.logits_rows)
        self.by_slot.index_copy_(0, slots.remainder(len(self.by_slot)), self._fuse(states))
