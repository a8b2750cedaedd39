"""The load of a planned fleet: request rate, lengths and SLOs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import fmean

import msgspec

from disagg.errors import ContextLengthExceeded, StartupError
from disagg.planner.shapes import ModelShape
from disagg.queueing import QUANTILE

NUM_SAMPLED = 256  # of a trace's prompts, where each is timed


class Slo(msgspec.Struct, frozen=True):
    """What `QUANTILE` of the requests must get: seconds to the first token, and from each token
    to the next."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if not 0 < value < float("inf"):
                raise StartupError(f"It must be a number of seconds > 0, not {value}.", param=name)


class Workload(msgspec.Struct, frozen=True, dict=True):
    """Requests that arrive at random.

    Args:
        requests_per_s: on average.
        lengths: (prompt tokens, output tokens) of requests that stand for all.
    """

    requests_per_s: float
    lengths: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        if not 0 < self.requests_per_s <= 1e6:
            raise StartupError(
                f"The load must be > 0 and at most 1,000,000 a second, not {self.requests_per_s}.",
                param="requests_per_s",
            )
        if not self.lengths or min(map(min, self.lengths)) < 1:
            raise StartupError("Every request needs a prompt and an output of 1 token or more.")

    @cached_property
    def prompt_tokens(self) -> list[int]:
        """Sorted."""
        return sorted(prompt for prompt, _ in self.lengths)

    @cached_property
    def prompt_sample(self) -> list[int]:
        """At most `NUM_SAMPLED` lengths of equal weight: means of neighbours among the sorted."""
        size = -(-len(self.lengths) // NUM_SAMPLED)
        groups = (self.prompt_tokens[at : at + size] for at in range(0, len(self.lengths), size))
        return [max(1, round(fmean(group))) for group in groups]

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return sum(self.prompt_tokens) / len(self.lengths)

    @cached_property
    def mean_output_tokens(self) -> float:
        return sum(output for _, output in self.lengths) / len(self.lengths)

    @cached_property
    def long_prompt_tokens(self) -> int:
        """The `QUANTILE` of the prompts."""
        return self.prompt_tokens[min(len(self.lengths) - 1, int(QUANTILE * len(self.lengths)))]

    @cached_property
    def longest_tokens(self) -> int:
        return max(prompt + output for prompt, output in self.lengths)

    @cached_property
    def decode_tokens(self) -> float:
        """Mean length of the sequences that decode at one moment: long answers are there longer."""
        steps = sum(output for _, output in self.lengths)
        return sum(output * (prompt + output / 2) for prompt, output in self.lengths) / steps

    @cached_property
    def reach(self) -> float:
        """How many tokens a prompt token attends to, on average over all prompt tokens."""
        squares = sum(prompt * (prompt + 1) for prompt in self.prompt_tokens)
        return squares / 2 / sum(self.prompt_tokens)

    def check_fits(self, shape: ModelShape) -> None:
        """Raises `ContextLengthExceeded` where a request is longer than the model can be asked."""
        limit = shape.max_model_len
        if self.longest_tokens > limit:
            num_long = sum(prompt + output > limit for prompt, output in self.lengths)
            raise ContextLengthExceeded(
                f"{num_long:,} of {len(self.lengths):,} requests are longer than the"
                f" {limit:,} tokens that {shape.name} takes, the longest {self.longest_tokens:,}."
                " Take a model with a longer context, or leave these requests out."
            )
