"""Drafts from a smaller model with the same tokenizer (vLLM's method "draft_model").

It continues a sequence as the sequence's own model would, with the same sampling parameters and the
same noise for a seed and a position. So the two choose the same token wherever their distributions
are alike, and since a draft is verified by choosing each token without it, answers stay what they
are (drafts by a coupling without communication: Daliri, Musco and Suresh, 2024).

The model has blocks of its own, without a prefix cache. A sequence's KV in them follows the
sequence's tokens: what is missing is computed before a draft, whatever the reason, a prompt, a
prefix hit, imported KV, or tokens that another kind of draft gave; what a wrong draft left is
overwritten. So nothing of a draft model moves between workers.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakSet, ref

import torch
from msgspec.structs import replace

from disagg.engine.device.memory_plan import MISSING_TOKENS
from disagg.engine.device.runner import ModelRunner
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.block_tables import extend, give_back
from disagg.engine.sched.drafting import MAX_FORCED
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Sampled, SequencesFailed, StepPlan
from disagg.messages import GenerateRequest
from disagg.time_model import StepFeatures, StepTimeFit, attended

NUM_TIMED = 3  # steps of each size that are timed at the start
TIMED_PROMPTS = 16, 128  # tokens
# How much the time of a draft counts for what is known of it. No stall counts for more than so many
# times what its steps should take.
LEARNED, MOST_BESIDE = 0.05, 3.0


class DraftModel:
    """A `drafting.Proposer` that runs a model.

    Args:
        runner: of the draft model, for the sequences that stand for others here.
        num_tokens: most tokens of a draft.
        stream: on which all of the runner was made, so that drafts do not wait for a step of the
            other model; None: the current one.
        timer: returns seconds.
    """

    knows_ahead = False

    def __init__(
        self,
        runner: ModelRunner,
        num_tokens: int,
        stream: torch.cuda.Stream | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_tokens = num_tokens
        self._stream = stream
        self.spent_s = 0.0
        self._runner = runner
        num_blocks, block_size = runner.kv_cache.num_blocks, runner.kv_cache.block_size
        self._pool = BlockPool(
            num_blocks, block_size, array("Q", bytes(8 * num_blocks)), enable_prefix_caching=False
        )
        self._timer = timer
        self._times = StepTimeFit()
        # What drafts took lately beside their steps: the host's part, and the tokens by which
        # sequences are behind.
        self._beside_s = 0.0
        self._twins: dict[ref[Sequence], Sequence] = {}
        self._failed = WeakSet[Sequence]()

    def measure(self, max_num_seqs: int) -> None:
        """Time steps, from which it is known what drafts and prompts cost. Overwrites blocks."""
        for num_seqs in sorted([1, min(8, max_num_seqs), max_num_seqs] * NUM_TIMED):
            # It computes a prompt of one token, too.
            seconds = self._warm_up_s(1, num_seqs) * num_seqs / (num_seqs + 1)
            self._times.observe(StepFeatures(0, 0, num_seqs, num_seqs), seconds)
        for num_tokens in TIMED_PROMPTS * NUM_TIMED:
            num_tokens = min(num_tokens, self._runner.max_model_len - 1)
            seconds = self._warm_up_s(num_tokens, 1) - self._times.model.decode_step_s(1, 1)
            self._times.observe(StepFeatures(num_tokens, attended(num_tokens, 0)), seconds)

    def _warm_up_s(self, num_tokens: int, num_seqs: int) -> float:
        began_s = self._timer()
        with torch.cuda.stream(self._stream):
            self._runner.warm_up(num_tokens, num_seqs)
        return self._timer() - began_s

    def token_s(self, num_sequences: int, place: int) -> float:
        beside_s = 0.0 if place else self._beside_s
        return beside_s + self._times.model.decode_step_s(num_sequences, 0)

    def entry_s(self, sequence: Sequence) -> float:
        return self._times.model.prefill_s(self._num_missing(sequence))

    def _steps_s(self, limits: Mapping[Sequence, int]) -> float:
        """What the steps of drafts should take."""
        times, most = self._times.model, max(limits.values())
        prompts_s = sum([times.prefill_s(self._num_missing(each)) for each in limits])
        nums = [sum([limit > place for limit in limits.values()]) for place in range(most)]
        return prompts_s + sum([times.decode_step_s(num, 0) for num in nums])

    def _num_missing(self, sequence: Sequence) -> int:
        """Tokens of a sequence's prompt that must be computed before its next draft."""
        twin = self._twins.get(ref(sequence))
        num_known = 0 if twin is None else twin.num_computed
        num_missing = len(sequence.tokens) - self._begin(sequence) - num_known
        return num_missing if num_missing > MAX_FORCED else 0

    def propose(self, limits: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        if not limits:
            return
        began_s, steps_s = self._timer(), self._steps_s(limits)
        self._let_go([each for each in self._twins if each() is None])
        twins = {each: self._follow(each) for each in limits if each not in self._failed}
        drafting = self._with_blocks({twin: limits[each] for each, twin in twins.items()})
        begins = {each: len(each.tokens) for each in drafting}
        owners = {twin: each for each, twin in twins.items()}
        try:
            budget = len(drafting) + MISSING_TOKENS
            while drafting:
                drafting = self._step(drafting, owners, budget)
                budget = len(drafting)  # nothing is missing any more
        except SequencesFailed as failed:
            self._failed.update(each for each, twin in twins.items() if twin in failed.errors)
        took_s = self._timer() - began_s
        self.spent_s += took_s
        beside_s = min(max(0.0, took_s - steps_s), MOST_BESIDE * steps_s)
        self._beside_s += LEARNED * (beside_s - self._beside_s)
        for each, twin in twins.items():
            if twin in begins:
                yield each, tuple(twin.tokens[begins[twin] :])

    def _step(
        self, drafting: dict[Sequence, int], owners: Mapping[Sequence, Sequence], budget: int
    ) -> dict[Sequence, int]:
        """Compute the next tokens of sequences, at most so many in all.

        Returns those that got a token and want another one, with the number of tokens.
        """
        sizes: dict[Sequence, int] = {}
        for twin in sorted(drafting, key=lambda each: each.num_uncomputed):  # decodes come first
            size = min(budget, twin.num_uncomputed)
            if size:
                sizes[twin], budget = size, budget - size
        plan = _plan(sizes)
        began_s = self._timer()
        with torch.cuda.stream(self._stream):
            results = self._run(plan, owners)
        self._times.observe(plan.features, self._timer() - began_s)
        left: dict[Sequence, int] = {}
        for (twin, size), result in zip(sizes.items(), results, strict=True):
            twin.num_computed += size
            twin.tokens += twin.draft
            if isinstance(result, tuple) and len(result) == size:
                result = result[-1].token_id
            if isinstance(result, int):
                twin.tokens.append(result)
                if drafting[twin] > 1:
                    left[twin] = drafting[twin] - 1
            twin.draft = ()
        return left

    def _run(self, plan: StepPlan, owners: Mapping[Sequence, Sequence]) -> list[Sampled]:
        """Run a plan. owners: the sequences for which those of the plan stand."""
        return self._runner.run(plan)

    def _begin(self, sequence: Sequence) -> int:
        """The position of the sequence's token that is its twin's first."""
        return 0

    def _follow(self, sequence: Sequence) -> Sequence:
        """The twin of a sequence, with the sequence's tokens, and KV as far as these are old."""
        key, begin = ref(sequence), self._begin(sequence)
        twin = self._twins.get(key)
        if twin is None:
            self._twins[key] = twin = _twin(sequence, begin)
        tokens, known = sequence.tokens, twin.tokens
        num_tokens = len(tokens) - begin
        # Behind the tokens that it had last time there are at most those of a draft.
        num_same = max(0, len(known) - self.num_tokens)
        while (
            num_same < min(len(known), num_tokens) and known[num_same] == tokens[begin + num_same]
        ):
            num_same += 1
        known[num_same:] = tokens[begin + num_same :]
        twin.draft = ()
        twin.num_computed = max(0, min(twin.num_computed, num_same, num_tokens - 1))
        return twin

    def _with_blocks(self, wanted: dict[Sequence, int]) -> dict[Sequence, int]:
        """Those for which there are blocks; the blocks of others are taken for them."""
        found: dict[Sequence, int] = {}
        for twin, limit in wanted.items():
            num_tokens = len(twin.tokens) + limit
            missing = -(-num_tokens // self._pool.block_size) - len(twin.block_ids)
            if not twin.tokens or num_tokens > self._runner.max_model_len:
                continue
            if missing > self._pool.num_free:
                self._let_go([key for key, each in self._twins.items() if each not in wanted])
            if missing <= 0 or extend(self._pool, twin, missing):
                found[twin] = limit
        return found

    def _let_go(self, keys: list[ref[Sequence]]) -> None:
        for key in keys:
            give_back(self._pool, self._twins.pop(key))


def _plan(sizes: dict[Sequence, int]) -> StepPlan:
    """The plan in which these sequences compute so many tokens.

    The few tokens that a sequence is behind by after a draft are computed as a draft themselves: on
    a CPU a step with a prompt takes longer.
    """
    num_decodes = num_drafting = num_context = num_prompt_tokens = 0
    num_attended = 0.0
    for twin, size in sizes.items():
        if size == twin.num_uncomputed <= MAX_FORCED:
            num_decodes += size == 1
            num_drafting += size
            num_context += len(twin.tokens)
            twin.draft = tuple(twin.tokens[twin.num_computed + 1 :])
            del twin.tokens[twin.num_computed + 1 :]
        else:
            num_prompt_tokens += size
            num_attended += attended(size, twin.num_computed)
    features = StepFeatures(num_prompt_tokens, num_attended, num_drafting, num_context)
    return StepPlan([*sizes], [*sizes.values()], num_decodes, features)


def _twin(sequence: Sequence, begin: int) -> Sequence:
    """A sequence with the tokens from position `begin` on."""
    request = GenerateRequest(
        request_id=sequence.request_id,
        model="",
        token_ids=tuple(sequence.tokens[begin:]),
        num_prompt_tokens=sequence.num_prompt_tokens - begin,
        hash_root=b"",
        block_hashes=(),
        sampling=replace(sequence.sampling, logprobs=None, grammar=None, thinking=None),
        deadline_unix_s=0.0,
    )
    return Sequence(request)
