"""The number of CPU threads for a step: few for a small step, measured at start.

Each of a step's hundreds of parallel regions wakes all threads and waits for the last. For a small
model's products of a few rows that costs more than it gains, and the other core is free for the
ingress. Knows only the features of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from disagg.time_model import StepFeatures

CONTEXT = 512  # tokens that a sequence of the measured steps attends to
SIZES = (1, 2, 4, 8, 16, 32)  # sequences of these steps; larger ones get all threads
NUM_ROUNDS = 5
LONG_S = 0.05  # in a step of this length waking threads is negligible
WORTH = 1.05  # more threads must be faster by this factor, since other processes use the cores


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
        """Choose by measurement.

        Args:
            compute: runs a step of so many decodes with `CONTEXT` tokens each.
            clock: seconds.
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
        self.limits = limits  # set at the end, because the measured steps read it

    def use_for(self, features: StepFeatures) -> None:
        """Set torch's number of threads for the next step of the calling thread."""
        if not self.limits:
            return
        num_tokens = features.num_decoding + features.num_new_tokens
        num_attended = features.num_decode_context + features.num_attended
        size = max(num_tokens, num_attended / CONTEXT)
        torch.set_num_threads(
            next((threads for limit, threads in self.limits if size <= limit), self.most)
        )  # 3 us if it is another number, else 0.1

    def _fastest(
        self,
        size: int,
        fewest: int,
        compute: Callable[[int], object],
        clock: Callable[[], float],
    ) -> int:
        """The smallest number of threads with which a step of `size` decodes is about fastest."""
        took_s = {threads: float("inf") for threads in _choices(fewest, self.most)}
        for _ in range(NUM_ROUNDS):  # they take turns, as the machine may have other work
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
    """Powers of two, and `most` last."""
    return [*(1 << i for i in range(most.bit_length()) if fewest <= 1 << i < most), most]
