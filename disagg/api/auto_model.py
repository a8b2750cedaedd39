"""The model "auto" as the API sees it, derived from the tiers of a cascade.

A larger tier takes over the rendered prompt and the tokens of a smaller one. So all tiers must have
the same tokenizer, chat template and end tokens, which is checked at start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from disagg.api.served_model import ServedModel
from disagg.config import AUTO
from disagg.errors import ModelError
from disagg.text.tokenizer import Tokenizer


def auto_model(tiers: Sequence[ServedModel]) -> ServedModel:
    """The model that stands for the cascade of `tiers`, smallest first.

    Its limits are the tightest of all tiers. The defaults of sampling parameters are those of the
    largest tier.
    """
    return dataclasses.replace(
        tiers[0],
        name=AUTO,
        full_name="",
        max_model_len=min(tier.max_model_len for tier in tiers),
        vocab_size=min(tier.vocab_size for tier in tiers),
        defaults=tiers[-1].defaults,
        num_parameters=0,
    )


def check_one_language(tiers: Sequence[ServedModel]) -> None:
    """Check that models can take over each other's prompts and tokens.

    Raises:
        ModelError: two models differ; the message says in what.
    """
    for one, other in pairwise(tiers):
        reason = _difference(one, other)
        if reason:
            raise ModelError(
                f"{one.name!r} and {other.name!r} cannot form a cascade: {reason}. In a cascade the"
                " larger model takes over the tokens of the smaller one; use models of one family,"
                " or serve them without --cascade.",
                param="cascade",
            )


def _difference(one: ServedModel, other: ServedModel) -> str:
    if one.tokenizer.core.to_str() != other.tokenizer.core.to_str():
        return f"their tokenizers differ, {_where(one.tokenizer, other.tokenizer)}"
    if sorted(one.eos_token_ids) != sorted(other.eos_token_ids):
        return (
            f"their answers end with different tokens, {sorted(one.eos_token_ids)} and"
            f" {sorted(other.eos_token_ids)}"
        )
    templates = [None if each.template is None else each.template.key for each in (one, other)]
    if templates[0] != templates[1]:
        return "their chat templates differ (--chat-template sets one template for both)"
    return ""


def _where(one: Tokenizer, other: Tokenizer) -> str:
    if one.num_ids != other.num_ids:
        return f"with {one.num_ids} and {other.num_ids} tokens"
    pairs = ((i, one.core.id_to_token(i), other.core.id_to_token(i)) for i in range(one.num_ids))
    for number, first, second in pairs:
        if first != second:
            return f"token {number} is {first!r} in one and {second!r} in the other"
    return "in how they split or join text"
