"""The part of a model that one rank of a worker computes, divided as in Megatron-LM.

Knows no torch.

Query heads, inner sizes of MLPs and experts, and the vocabulary are divided among the ranks of a
worker. KV heads are divided too, or copied if there are more ranks. Norms and routers are whole on
every rank. With expert parallelism, each rank has some whole experts instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg.errors import StartupError
from disagg.kernels.packed_sizes import MXFP4_GROUP
from disagg.models.experts_config import ExpertsConfig
from disagg.models.model_config import ModelConfig

MOST_RANKS = 16  # error messages list possible numbers of ranks up to this one


@dataclass(frozen=True, slots=True)
class Share:
    """The share of rank `rank` of `num_ranks`.

    has_whole_experts: whether each rank has whole experts instead of a part of every expert.
    """

    rank: int = 0
    num_ranks: int = 1
    has_whole_experts: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this rank adds terms that must be added once, such as a bias after a sum."""
        return self.rank == 0

    def of(self, total: int) -> tuple[int, int]:
        """The range of this rank's part of `total` items; parts differ by one at most."""
        return total * self.rank // self.num_ranks, total * (self.rank + 1) // self.num_ranks

    def of_experts(self, experts: ExpertsConfig) -> tuple[int, int]:
        """The range of this rank's part of an expert's inner size.

        With MXFP4 a rank has whole groups of values that share a scale, so parts may differ by one
        group; no part is larger than the first rank's.
        """
        if self.has_whole_experts:
            return 0, experts.intermediate_size
        size = MXFP4_GROUP if experts.is_mxfp4 else 1
        own = self._largest_first(experts.intermediate_size // size)
        return own.start * size, own.stop * size

    def own_experts(self, experts: ExpertsConfig) -> range | None:
        """The neighbouring experts that this rank has whole; None: it has a part of every expert.

        No rank has more experts than the first.
        """
        if not self.has_whole_experts:
            return None
        return self._largest_first(experts.num_experts)

    def _largest_first(self, total: int) -> range:
        """As `of`, but the first rank, for which memory is planned, has the largest part."""
        ends = (-(-total * rank // self.num_ranks) for rank in (self.rank, self.rank + 1))
        return range(*ends)

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """The range of the model's KV heads that this rank has.

        If there are more ranks than heads, some ranks have the same head.
        """
        first, end = self.of(num_kv_heads)
        return first, max(end, first + 1)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The settings of the part that this rank computes; the vocabulary stays whole."""
        if self.num_ranks == 1:
            return config
        experts = config.experts
        if experts is not None:
            first, end = self.of_experts(experts)
            experts = replace(
                experts,
                intermediate_size=end - first,
                shared_intermediate_size=experts.shared_intermediate_size // self.num_ranks,
            )
        return replace(
            config,
            num_heads=config.num_heads // self.num_ranks,
            num_kv_heads=max(1, config.num_kv_heads // self.num_ranks),
            intermediate_size=config.intermediate_size // self.num_ranks,
            experts=experts,
        )


WHOLE = Share()


def possible_ranks(config: ModelConfig, *, expert_parallel: bool = False) -> list[int]:
    """The numbers of ranks, up to `MOST_RANKS`, into which a model can be divided."""
    sizes = range(2 if expert_parallel else 1, MOST_RANKS + 1)
    return [each for each in sizes if not _problem(config, each, expert_parallel)]


def check_ranks(config: ModelConfig, num_ranks: int, *, expert_parallel: bool = False) -> None:
    """Raise `StartupError` if a model cannot be divided among so many ranks.

    Args:
        expert_parallel: whether each rank has whole experts.
    """
    if expert_parallel:
        _check_has_experts(config, num_ranks)
    why = _problem(config, num_ranks, expert_parallel)
    if not why:
        return
    sizes = map(str, possible_ranks(config, expert_parallel=expert_parallel))
    also = ""
    if not expert_parallel and config.experts and not _problem(config, num_ranks, True):
        also = (
            f" With enable_expert_parallel, which splits no expert, {num_ranks} is possible, too."
        )
    raise StartupError(
        f"tensor_parallel_size = {num_ranks} does not divide this model: {why}. Possible up to"
        f" {MOST_RANKS}: {', '.join(sizes)}.{also}",
        param="tensor_parallel_size",
    )


def _check_has_experts(config: ModelConfig, num_ranks: int) -> None:
    if config.experts is None:
        raise StartupError(
            "enable_expert_parallel gives each rank of a worker some of a model's experts, but this"
            " model has none; leave it out. tensor_parallel_size also works without it.",
            param="enable_expert_parallel",
        )
    if num_ranks < 2:
        raise StartupError(
            "enable_expert_parallel divides a model's experts among the ranks of a worker, but"
            " with tensor_parallel_size = 1 there is only one rank; raise tensor_parallel_size, or"
            " leave enable_expert_parallel out.",
            param="enable_expert_parallel",
        )


def _problem(config: ModelConfig, num_ranks: int, expert_parallel: bool) -> str:
    """Why so many ranks cannot divide a model; empty if they can."""
    heads, kv_heads, experts = config.num_heads, config.num_kv_heads, config.experts
    if config.states is not None and num_ranks > 1:
        return "the recurrent states of its layers with linear attention cannot be divided yet"
    if config.altup is not None and num_ranks > 1:
        return "models with several residual streams (AltUp) cannot be divided yet"
    if heads % num_ranks:
        return f"{heads} (heads) / {num_ranks} = {heads / num_ranks:g}"
    if kv_heads % num_ranks and num_ranks % kv_heads:
        return (
            f"neither do {num_ranks} ranks divide {kv_heads} KV heads evenly, nor is their number"
            " a multiple of the heads"
        )
    sizes = {}
    if any(config.experts_in(layer) is None for layer in range(config.num_layers)):
        sizes["intermediate_size"] = config.intermediate_size
    if experts is not None:
        if not experts.is_mxfp4 and not expert_parallel:
            sizes["the intermediate size of an expert"] = experts.intermediate_size
        sizes["the size of the shared expert"] = experts.shared_intermediate_size
    for what, size in sizes.items():
        if size % num_ranks:
            return f"{size} ({what}) / {num_ranks} = {size / num_ranks:g}"
    if experts is not None and expert_parallel:
        if experts.num_experts < num_ranks:
            return f"{experts.num_experts} experts are too few for {num_ranks} ranks"
    elif experts is not None and experts.is_mxfp4:
        num_groups = experts.intermediate_size // MXFP4_GROUP
        if num_groups < num_ranks:
            return (
                f"an expert has {num_groups} x {MXFP4_GROUP} values that share a scale (MXFP4),"
                f" which are too few for {num_ranks} ranks"
            )
    return ""
