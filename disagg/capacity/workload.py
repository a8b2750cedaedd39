"""The load of a planned fleet: request rate, lengths and SLOs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import fmean

import msgspec

from disagg.capacity.shapes import ModelShape
from disagg.errors import ContextLengthExceeded, StartupError
from disagg.queueing import QUANTILE

NUM_SAMPLED = 256  # prompts of a trace that are sampled when each one is timed


class Slo(msgspec.Struct, frozen=True):
    """The SLOs that `QUANTILE` of the requests must meet, in seconds.

    ttft_s: time to the first token.
    tpot_s: time from each token to the next.
    """

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if not 0 < value < float("inf"):
                raise StartupError(
                    f"The SLO must be a number of seconds > 0, but is {value}.", param=name
                )


class Workload(msgspec.Struct, frozen=True, dict=True):
    """A load of requests that arrive at random times.

    Args:
        requests_per_s: average rate.
        lengths: (prompt tokens, output tokens) of representative requests.
    """

    requests_per_s: float
    lengths: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        if not 0 < self.requests_per_s <= 1e6:
            raise StartupError(
                "The load must be > 0 and at most 1,000,000 requests per second, but is"
                f" {self.requests_per_s}.",
                param="requests_per_s",
            )
        if not self.lengths or min(map(min, self.lengths)) < 1:
            raise StartupError("Every request needs a prompt and an output of at least 1 token.")

    @cached_property
    def prompt_tokens(self) -> list[int]:
        """Sorted."""
        return sorted(prompt for prompt, _ in self.lengths)

    @cached_property
    def prompt_sample(self) -> list[int]:
        """At most `NUM_SAMPLED` lengths of equal weight: means of neighbours in sorted order."""
        size = -(-len(self.lengths) // NUM_SAMPLED)
        groups = (self.prompt_tokens[at : at + size] for at in range(0, len(self.lengths), size))
        return [max(1, round(fmean(group))) for group in groups]

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return sum(self.prompt_tokens) / len(self.lengths)

    @cached_property
    def mean_output_tokens(self) -> float:
        return sum(output for _, output in self.lengths) / len(self.lengths)

    @property
    def tokens_per_s(self) -> float:
        """Of prompts and answers."""
        return self.requests_per_s * (self.mean_prompt_tokens + self.mean_output_tokens)

    @cached_property
    def long_prompt_tokens(self) -> int:
        """The `QUANTILE` of the prompt lengths."""
        return self.prompt_tokens[min(len(self.lengths) - 1, int(QUANTILE * len(self.lengths)))]

    @cached_property
    def longest_tokens(self) -> int:
        return max(prompt + output for prompt, output in self.lengths)

    @cached_property
    def decode_tokens(self) -> float:
        """Mean length of the sequences that decode at one moment, where long answers count more."""
        steps = sum(output for _, output in self.lengths)
        return sum(output * (prompt + output / 2) for prompt, output in self.lengths) / steps

    @cached_property
    def reach(self) -> float:
        """The mean number of tokens to which a prompt token attends, over all prompt tokens."""
        squares = sum(prompt * (prompt + 1) for prompt in self.prompt_tokens)
        return squares / 2 / sum(self.prompt_tokens)

    def check_fits(self, shape: ModelShape) -> None:
        """Raise `ContextLengthExceeded` if a request is longer than the model's context."""
        limit = shape.config.max_model_len
        if self.longest_tokens > limit:
            num_long = sum(prompt + output > limit for prompt, output in self.lengths)
            raise ContextLengthExceeded(
                f"{num_long:,} of {len(self.lengths):,} requests are longer than the"
                f" {limit:,} tokens that {shape.name} takes; the longest has"
                f" {self.longest_tokens:,}. Use a model with a longer context, or leave these"
                " requests out."
            )
