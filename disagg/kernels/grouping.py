"""How DeepSeek's routers choose the experts of a token. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grouping:
    """Experts are in groups of neighbours. A token's experts are chosen from its best groups.

    Attributes:
        num_groups: all of the same size; 1: any expert may be chosen.
        num_chosen_groups: the groups that a token's experts come from. A group's score is that of
            its best expert; with sigmoids, the sum of its two best.
        is_sigmoid: an expert's score is the sigmoid of its logit, and a bias may be added to it for
            the choice only, not for the weight. Otherwise it is the softmax over all experts.
        scale: what the weights of a token's experts are multiplied by.
    """

    num_groups: int = 1
    num_chosen_groups: int = 1
    is_sigmoid: bool = False
    scale: float = 1.0
