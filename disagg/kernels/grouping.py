"""How DeepSeek's routers choose the experts of a token. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grouping:
    """Settings of a grouped choice: a token's experts are chosen from its best groups of experts.

    Attributes:
        num_groups: number of groups of neighbouring experts, all of the same size; 1: any expert
            may be chosen.
        num_chosen_groups: number of groups from which a token's experts come. A group's score is
            the score of its best expert; with sigmoids, the sum of the scores of its best two.
        is_sigmoid: whether an expert's score is the sigmoid of its logit; a bias may then be added
            for the choice, but not for the weight. Otherwise it is the softmax over all experts.
        scale: the weights of a token's experts are multiplied by this.
    """

    num_groups: int = 1
    num_chosen_groups: int = 1
    is_sigmoid: bool = False
    scale: float = 1.0
