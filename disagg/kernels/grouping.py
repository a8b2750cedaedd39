"""How DeepSeek's routers choose the experts of a token. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grouping:
    """Experts are chosen from the best groups of neighbouring ones.

    Attributes:
        num_groups: of equal size; 1: any expert may be chosen.
        num_chosen_groups: that a token may choose experts of. A group is as good as its best
            expert; of sigmoids, as its best two together.
        is_sigmoid: an expert's score is the sigmoid of its logit, to which a bias of its own may be
            added for the choice alone. Otherwise its part of a softmax over all.
        scale: what the weights of a token's experts are multiplied by.
    """

    num_groups: int = 1
    num_chosen_groups: int = 1
    is_sigmoid: bool = False
    scale: float = 1.0
