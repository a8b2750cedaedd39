"""The model runner: executes step plans with a model.

Knows devices and dtypes. Must not know the reasons for a plan.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from disagg.engine.device.batching import Batching, StepInputs
from disagg.engine.device.blame import find_broken
from disagg.engine.device.followers import Followers, rank_step
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.prompt_scores import ScoredRows, forward_scored, scored_rows
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.device.step_threads import CONTEXT, StepThreads
from disagg.engine.device.token_masks import bound_rows, token_masks
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued, rows
from disagg.engine.sched.step import Results, Sampled, SampledToken, SequencesFailed, StepPlan
from disagg.errors import DisaggError, InvalidLogits, ModelError
from disagg.messages import GenerateRequest, SamplingParams
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder
from disagg.rank_messages import RankCapture
from disagg.time_model import StepFeatures

if TYPE_CHECKING:  # imports Triton, which a machine without a GPU may lack
    from disagg.engine.device.step_graphs import StepGraphs

_NEEDS_HOST = attrgetter("needs_host")


class ModelRunner:
    """Runs a decoder on a KV cache. One call of `run` is one forward pass and one sampling.

    Args:
        max_num_seqs: sequences for which the tables have room; a larger step enlarges them.
        followers: the worker's other ranks, which also compute each step.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        grammars: Grammars | None = None,
        max_num_seqs: int = 1,
        followers: Followers | None = None,
    ) -> None:
        self.decoder = decoder
        self.followers = followers
        self.kv_cache = kv_cache
        self.grammars = grammars
        self.graphs: StepGraphs = ()
        self.threads = StepThreads(torch.get_num_threads())
        self.slots = Slots(max_num_seqs)
        block_size = kv_cache.block_size
        max_num_blocks = -(-decoder.config.max_model_len // block_size)
        self.batching = Batching(self.slots, block_size, max_num_blocks, decoder.device)
        self.sampler = Sampler(self.slots, decoder.config.vocab_size, decoder.device)

    def launch(self, plan: StepPlan) -> Results:
        """As `run`, for plans for which `can_follow` is true. On a GPU it returns at once."""
        try:
            step, entered = self._inputs(plan)
            self._send_to_followers(step, shares_tokens=True)
            return self._launch(plan, step, entered)
        except Exception as error:
            self._blame(plan, error)
            raise

    def _inputs(self, plan: StepPlan) -> tuple[StepInputs, list[int]]:
        """The numbers to upload, and the slots that have new owners."""
        entered = [] if plan.continues else self.slots.enter(plan.sequences)
        return self.batching.inputs(plan, entered), [sequence.slot for sequence in entered]

    def _send_to_followers(
        self, step: StepInputs, scored: SequenceOf[ScoredRows] = (), *, shares_tokens: bool = False
    ) -> None:
        """Have the other ranks compute a step that begins on this rank now."""
        if self.followers is not None:
            num_slots = self.slots.num_slots
            self.followers.follow(rank_step(step, num_slots, scored, shares_tokens=shares_tokens))

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, step: StepInputs, entered: list[int]) -> Results:
        """The part of `launch` that runs on the device."""
        self.sampler.enter(entered)
        batch, slots = self.batching.batch(step)
        logits, positions = self._forward(batch)
        sequences, ends = plan.sequences, _ends(plan, step)
        if not all(ends):
            sequences = [*compress(sequences, ends)]
        chosen = self.sampler.sample(logits, sequences, positions, num_unread=step.num_unread)
        if self.decoder.ranks is not None and slots.shape[0]:
            self.decoder.ranks.broadcast_(chosen.token_ids)
        self.batching.remember(slots, chosen.token_ids)

        def results() -> list[Sampled]:
            tokens = iter(chosen.sampled())
            return [next(tokens) if is_end else None for is_end in ends]

        return chosen.sampled if all(ends) else results

    def can_follow(self, plan: StepPlan) -> bool:
        """Whether the device can choose all next tokens without the host, so that the next step can
        be launched before the results of this one are read."""
        return (
            bool(plan.sequences)
            and not plan.num_ahead
            and not any(map(_NEEDS_HOST, plan.sequences))
        )

    def needs_host(self, sequence: Sequence) -> bool:
        """Whether the device needs the host to choose this sequence's next token."""
        return sequence.needs_host

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Execute a plan. Returns one result per sequence; see `engine.sched.step.Sampled`.

        Raises:
            SequencesFailed: the step failed because of some sequences. It can be planned again.
        """
        try:
            return self._run(plan)
        except Exception as error:
            self._blame(plan, error)
            raise

    def _blame(self, plan: StepPlan, cause: Exception) -> None:
        """Raise `SequencesFailed` if some sequences made the step fail.

        Otherwise the device or this code is broken. So it is also if there are other ranks: they
        may be in the middle of the step, and would take the next one for the rest of it.
        """
        if self.followers is not None:
            return
        self.slots.leave(plan.sequences)  # what the step has written for them may be incomplete
        vocab_size, block_size = self.decoder.config.vocab_size, self.kv_cache.block_size
        max_num_blocks = -(-self.decoder.config.max_model_len // block_size)
        broken = find_broken(plan, block_size, max_num_blocks, vocab_size, self.grammars)
        if broken:
            raise SequencesFailed(broken) from cause

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> list[Sampled]:
        self.threads.use_for(plan.features)
        step, entered = self._inputs(plan)
        scored = scored_rows(plan)
        self._send_to_followers(step, scored)
        self.sampler.enter(entered)
        batch, _ = self.batching.batch(step)
        logits, positions = self._forward(batch, scored)
        if plan.num_ahead:
            return self._verified(plan, logits, positions)
        if logits.shape[0] == len(plan.sequences):  # each has a row: no prompt stays unfinished
            return [*self._sample(logits, plan.sequences, positions)]
        ends = [work.num_tokens == work.sequence.num_uncomputed for work in plan.work]
        if not any(ends):  # no token is read, so nothing else waits for the step
            _synchronize(self.decoder.device)
            return [None] * len(ends)
        tokens = iter(self._sample(logits, [*compress(plan.sequences, ends)], positions))
        return [next(tokens) if is_end else None for is_end in ends]

    def _forward(self, batch: Batch, scored: SequenceOf[ScoredRows] = ()) -> tuple[Tensor, Tensor]:
        """Compute the logits, and score the prompts' rows.

        Returns the logits, and for each row the position of the token that it follows.
        """
        logits = None
        if scored:
            logits = forward_scored(self.decoder, batch, self.kv_cache.pages, scored)
        for graphs in self.graphs:
            logits = graphs.forward(batch) if logits is None else logits
        if logits is None:
            logits = self.decoder.forward(batch, self.kv_cache.pages)
        is_all = batch.logits_rows.shape[0] == batch.positions.shape[0]
        return logits, batch.positions if is_all else batch.positions[batch.logits_rows]

    def _verified(self, plan: StepPlan, logits: Tensor, positions: Tensor) -> list[Sampled]:
        """The results of a step with drafts. All rows of a draft are sampled, right or not."""
        continued = [list(rows(work)) for work in plan.work]
        tokens = iter(self._sample(logits, list(chain.from_iterable(continued)), positions))
        sampled: list[Sampled] = []
        for each in continued:
            some = [next(tokens) for _ in each]
            if len(some) < 2 or isinstance(some[0], DisaggError):
                sampled.append(some[0] if some else None)
                continue
            verified: list[SampledToken] = []
            for one in some:
                if isinstance(one, DisaggError):
                    break  # it counts only if the draft before it is right; the next step shows it
                verified.append(SampledToken(one) if isinstance(one, int) else one)
            sampled.append(tuple(verified))
        return sampled

    def _sample(
        self, logits: Tensor, sequences: SequenceOf[Continued], positions: Tensor
    ) -> SequenceOf[int | SampledToken | DisaggError]:
        """The next token of each sequence, or the error if its grammar or its logits allow none."""
        bound = bound_rows(sequences)
        if not bound:
            return self.sampler.sample(logits, sequences, positions).sampled()
        # On a GPU the host fills the masks while the logits are computed.
        masks, failed = token_masks(sequences, bound, self.grammars, self.decoder.device)
        chosen = self.sampler.sample(logits, sequences, positions, masks)
        sampled: list[int | SampledToken | DisaggError] = [*chosen.sampled()]
        for row, error in failed.items():
            sampled[row] = error
        return sampled

    def warm_up(self, num_tokens: int, num_seqs: int) -> None:
        """Run a prompt of `num_tokens` and a step of `num_seqs` decodes over unused blocks.

        This compiles or picks kernels and allocates the largest step's memory before the first
        request. It overwrites blocks, so nothing may be in the cache yet. `warm_up_tiles` compiles
        what else a GPU needs.

        Raises:
            ModelError: the model's first answers are no tokens.
        """
        block_size = self.kv_cache.block_size
        num_tokens = min(num_tokens, self.kv_cache.num_blocks * block_size)
        prompt = _scratch_sequence(num_tokens, list(range(-(-num_tokens // block_size))))
        answers = self.run(StepPlan((prompt,), (num_tokens,), 0, StepFeatures()))
        num_seqs = min(num_seqs, self.kv_cache.num_blocks)
        decodes = [_scratch_sequence(1, [i]) for i in range(num_seqs)]
        answers += self.run(StepPlan(decodes, [1] * num_seqs, num_seqs, StepFeatures()))
        for answer in answers:
            if isinstance(answer, InvalidLogits):
                raise ModelError(
                    f"The model cannot be served: it fails on a prompt of {num_tokens} tokens. "
                    + answer.message
                )

    def warm_up_tiles(self, max_model_len: int) -> None:
        """Compile attention for few tokens over many, and the sums of its pieces.

        The height of a tile follows from the number of tokens, and each height is another kernel. A
        kernel that a request compiled would stop the engine for seconds, so that it seems to hang.
        Overwrites blocks too.
        """
        from disagg.kernels.gpu.paged_work import KEYS_PER_ROW, LONG_ROWS, MAX_SHORT_ROWS

        block_size, num_blocks = self.kv_cache.block_size, self.kv_cache.num_blocks
        many = 2 * KEYS_PER_ROW * LONG_ROWS  # so that also those of a prompt's tile are cut
        num_tokens = min(many, max_model_len, num_blocks * block_size)
        blocks = list(range(-(-num_tokens // block_size)))
        num_new = 1
        while num_new <= min(2 * MAX_SHORT_ROWS, num_tokens):
            sequence = _scratch_sequence(num_tokens, blocks)
            sequence.num_computed = num_tokens - num_new
            self.run(StepPlan((sequence,), (num_new,), 0, StepFeatures()))
            num_new *= 2

    def measure_threads(self, max_model_len: int) -> None:
        """Measure which steps on a CPU are faster with fewer threads. Overwrites blocks too."""
        block_size, num_blocks = self.kv_cache.block_size, self.kv_cache.num_blocks
        num_tokens = min(CONTEXT, max_model_len, num_blocks * block_size)
        blocks = list(range(-(-num_tokens // block_size)))

        def compute(num_seqs: int) -> None:
            decodes = [_scratch_sequence(num_tokens, blocks) for _ in range(num_seqs)]
            for sequence in decodes:
                sequence.num_computed = num_tokens - 1
            self.run(StepPlan(decodes, [1] * num_seqs, num_seqs, StepFeatures()))

        self.threads.measure(compute)

    def capture(self, max_num_seqs: int, max_model_len: int, *, with_drafts: bool = False) -> None:
        """Capture small steps as CUDA graphs: decodes of up to `max_num_seqs` sequences, short
        prompts, and the verification of drafts if there are any."""
        from disagg.engine.device.step_graphs import capture_steps

        if self.followers is not None:
            self.followers.follow(RankCapture(max_num_seqs, max_model_len, with_drafts))
        self.graphs = capture_steps(
            self.decoder, self.kv_cache, self.batching, max_num_seqs, max_model_len, with_drafts
        )


def _synchronize(device: torch.device) -> None:
    """Wait until all launched work has ended.

    Afterwards other workers may read the blocks, and freed blocks may be written, since both happen
    outside the device's queue of work.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _ends(plan: StepPlan, step: StepInputs) -> list[bool]:
    """For each sequence, whether the step computes its last token and so samples its next one."""
    n = plan.num_decodes
    chunks = zip(plan.sequences[n:], step.ends[n:], strict=True)
    return [True] * n + [end >= len(sequence.tokens) for sequence, end in chunks]


def _scratch_sequence(num_tokens: int, block_ids: list[int]) -> Sequence:
    request = GenerateRequest(
        request_id="warm-up",
        model="",
        token_ids=(0,) * num_tokens,
        num_prompt_tokens=num_tokens,
        hash_root=b"",
        block_hashes=(),
        # All shapes for which a kernel would be compiled.
        sampling=SamplingParams(max_tokens=1, top_k=8, top_p=0.9, repetition_penalty=1.1),
        deadline_unix_s=0.0,
    )
    sequence = Sequence(request)
    sequence.block_ids = block_ids
    return sequence
