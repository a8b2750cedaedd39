"""The number of CPU threads for a step: few for a small step, measured at start.

A step has hundreds of parallel regions, each of which wakes all threads and waits for the last. For
a small model's matrix products with few rows that costs more than it gains, and with fewer threads
the other cores are free for the ingress. Knows only the features of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from disagg.time_model import StepFeatures

CONTEXT = 512  # tokens that a sequence of the measured steps attends to
SIZES = (1, 2, 4, 8, 16, 32)  # sequences of the measured steps; larger steps get all threads
NUM_ROUNDS = 5
LONG_S = 0.05  # in a step of this length the time to wake threads is negligible
WORTH = 1.05  # more threads must be faster by this factor, since other processes need cores too


class StepThreads:
    """The number of torch's threads for each size of a step.

    Args:
        most: threads of a large step.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limits: list[tuple[int, int]] = []  # (largest size, threads), both ascending

    def measure(
        self, compute: Callable[[int], object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Measure steps, and choose the number of threads for each size.

        Args:
            compute: runs a step with a number of decodes, each with `CONTEXT` tokens.
            clock: returns seconds.
        """
        if self.most == 1:
            return
        fewest, limits = 1, []
        for size in SIZES:
            fewest = self._fastest(size, fewest, compute, clock)
            if fewest == self.most:
                break
            limits.append((size, fewest))
        torch.set_num_threads(self.most)
        self.limits = limits  # set only at the end, because the measured steps read it

    def use_for(self, features: StepFeatures) -> None:
        """Set torch's number of threads for the next step of the calling thread."""
        if not self.limits:
            return
        num_tokens = features.num_decoding + features.num_new_tokens
        num_attended = features.num_decode_context + features.num_attended
        size = max(num_tokens, num_attended / CONTEXT)
        torch.set_num_threads(
            next((threads for limit, threads in self.limits if size <= limit), self.most)
        )  # takes 3 us if the number changes, otherwise 0.1

    def _fastest(
        self,
        size: int,
        fewest: int,
        compute: Callable[[int], object],
        clock: Callable[[], float],
    ) -> int:
        """The smallest number of threads at which a step of `size` decodes is nearly fastest."""
        took_s = {threads: float("inf") for threads in _choices(fewest, self.most)}
        for _ in range(NUM_ROUNDS):  # in turns, because the machine may have other work
            for threads in reversed(took_s):
                torch.set_num_threads(threads)
                began_s = clock()
                compute(size)
                took_s[threads] = min(took_s[threads], clock() - began_s)
                if took_s[self.most] > LONG_S:
                    return self.most
        best_s = min(took_s.values())
        return next(threads for threads in took_s if took_s[threads] <= best_s * WORTH)


def _choices(fewest: int, most: int) -> list[int]:
    """Thread counts to try: powers of two from `fewest` on, and `most` last."""
    return [*(1 << i for i in range(most.bit_length()) if fewest <= 1 << i < most), most]
