"""How far results of bfloat16 may be from exact ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.models.checkpoints import Checkpoint
from tests.models.paging import Tokens

_MOST = 0.7  # of the logarithm of how much further ours are off
_NUM_DRAWS = 5


def assert_as_far_as_roundings(
    sequences: Sequence[Tokens], checkpoint: Checkpoint, ends: Sequence[int]
) -> None:
    """Compare the logits of sequences of one length, after the tokens `ends`, with exact ones."""
    ids, rows = torch.tensor([sequence.ids for sequence in sequences]), [end - 1 for end in ends]
    ours = torch.stack([torch.stack(sequence.logits) for sequence in sequences])

    def logits(model: Any, num_draws: int) -> Tensor:
        found: Tensor = model(ids.repeat(num_draws, 1)).logits[:, rows]
        return found

    assert_off_as_roundings(ours, checkpoint.model, logits)


def assert_off_as_roundings(
    ours: Tensor, model: Any, compute: Callable[[Any, int], Tensor]
) -> None:
    """Compare results of bfloat16 with those of exact arithmetic.

    Exact is what transformers computes in float32 with the weights rounded to bfloat16.

    How far a result of bfloat16 is off is random, so the oracle is a distribution: the same model
    in float32, where the result of each module is off by up to half a unit in the last place of a
    bfloat16, uniformly. A rounding is off by half as much in the mean square, which makes up for
    what is rounded within a module. The logarithm of how much further ours was off had, by variant
    and compiled step, a mean of -0.65 to 0.09 over draws of three prompts and a standard deviation
    of at most 0.17: `_MOST` is four of these above each mean.

    Args:
        ours: [num_results, ...].
        compute: the results of a model, some number of times over: [number * num_results, ...].
    """
    exact = copy.deepcopy(model).float()
    for weight in exact.parameters():
        weight.data = weight.data.bfloat16().float()
    with torch.no_grad():
        truth = compute(exact, 1)
        drawn = compute(_rounding_at_random(exact), _NUM_DRAWS)
    off = float((ours.float() - truth).square().mean())
    same = truth.repeat(_NUM_DRAWS, *[1] * (truth.dim() - 1))
    expected = float((drawn - same).square().mean())
    assert math.log(off / expected) <= _MOST


def all_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Changes of a configuration, so that each token goes to all experts, if there are any.

    A rounding may send a token to another expert, and then it and those after it are far from
    exact.
    """
    changes = {"topk_group": config["n_group"]} if "n_group" in config else {}
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if key in config:
            changes["num_experts_per_tok"] = config[key]
    return changes


def _rounding_at_random(model: Any) -> Any:
    """A copy in which each module's result is off, as if it was rounded to bfloat16."""
    rounding = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)

    def round_off(module: Any, arguments: Any, result: Any) -> Any:
        if not isinstance(result, Tensor):  # of modules whose last module has been rounded
            return result
        noise = torch.rand(result.shape, generator=generator, dtype=result.dtype) * 2 - 1
        return result * (1 + noise * torch.finfo(torch.bfloat16).eps / 2)

    for module in rounding.modules():
        module.register_forward_hook(round_off)
    return rounding
