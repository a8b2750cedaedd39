"""The work queued on a worker ahead of a new prompt, according to the worker's last report.

Computed once per report, not once per request, because a routing decision compares many workers.
"""

from __future__ import annotations

import math

import msgspec

from disagg.time_model import CHUNK_TOKENS, TPOT_SHARE, StepTimeModel, prompt_tokens_within


class Backlog(msgspec.Struct, frozen=True, gc=False):
    """Prompts queued on a worker, and the steps that they take.

    Each step gives one token to every decoding sequence and fills the rest of its token budget with
    prompts in order of arrival. So the last queued prompt shares a step with a new one. Tokens of
    the running step no longer count as queued.
    """

    num_prompts: int  # that wait or are computed
    step_s: float  # a step with prompts, but for their tokens
    num_at_once: int  # tokens of prompts in a step
    under_way_s: float  # seconds of the running step as a whole; 0: the worker is idle
    num_later: int  # queued tokens that are in the steps to come
    later_s: float  # what these add to their steps

    @classmethod
    def predict(
        cls,
        times: StepTimeModel,
        num_waiting: int,
        num_queued: int,
        num_decoding: int,
        num_context_tokens: int,
        tpot_slo_s: float = math.inf,
    ) -> Backlog:
        """The backlog of `num_queued` tokens in `num_waiting` prompts on a worker.

        Args:
            num_decoding: sequences that decode on the worker.
            num_context_tokens: total context of these sequences.
            tpot_slo_s: their TPOT SLO, by which the worker limits prompt tokens in its steps.
        """
        step_s, _, _, per_sequence_s, per_context_s, per_prompt_step_s = times.coefficients
        if num_decoding:
            step_s += per_sequence_s * num_decoding + per_context_s * num_context_tokens
        num_at_once = CHUNK_TOKENS - num_decoding if num_decoding < CHUNK_TOKENS else 1
        if num_decoding and tpot_slo_s != math.inf:
            step_slo_s = TPOT_SHARE * tpot_slo_s
            num_within = prompt_tokens_within(times, step_slo_s, num_decoding, num_context_tokens)
            num_at_once = min(num_at_once, num_within)
        decode_s = step_s if num_decoding else 0.0
        step_s += per_prompt_step_s
        if not num_queued:
            return cls(num_waiting, step_s, num_at_once, decode_s, 0, 0.0)
        queued_s = times.prompts_s(num_queued, 0, num_waiting)
        num_later = num_queued - num_at_once if num_queued > num_at_once else 0
        later_s = queued_s * num_later / num_queued
        under_way_s = step_s + (queued_s - later_s)
        return cls(num_waiting + 1, step_s, num_at_once, under_way_s, num_later, later_s)
