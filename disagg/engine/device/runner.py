"""The model runner: executes step plans with a model.

Knows devices and dtypes. Must not know the reasons for a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import add, attrgetter

import torch
from torch import Tensor

from disagg.engine.device.batching import Batching, StepInputs
from disagg.engine.device.deferral import Deferral
from disagg.engine.device.followers import Followers
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.prompt_scores import (
    ScoredRows,
    hidden_scored,
    keep_pooled,
    pooled_rows,
    scored_ranges,
    scored_rows,
)
from disagg.engine.device.rank_model import RankModel
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.device.step_threads import CONTEXT, StepThreads
from disagg.engine.device.token_masks import bound_rows, token_masks
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued, rows
from disagg.engine.sched.step import (
    Choose,
    Results,
    Sampled,
    SampledToken,
    SequencesFailed,
    StepPlan,
)
from disagg.errors import DisaggError, InvalidLogits, ModelError
from disagg.kernels.torch.sampling import TorchSampling
from disagg.messages import GenerateRequest, SamplingParams
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder
from disagg.rank_messages import RankCapture, RankStep
from disagg.time_model import StepFeatures

_CPU = torch.device("cpu")
_NEEDS_HOST = attrgetter("needs_host")


class ModelRunner(RankModel):
    """Runs a decoder on a KV cache. One call of `run` is one forward pass and one sampling.

    Args:
        followers: the worker's other ranks, which also compute each step.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        grammars: Grammars | None = None,
        max_num_seqs: int = 1,
        followers: Followers | None = None,
        max_model_len: int | None = None,
        deferral: Deferral | None = None,
    ) -> None:
        super().__init__(decoder, kv_cache, max_num_seqs, max_model_len)
        self.followers = followers
        self.grammars = grammars
        self._is_shared = False  # whether other ranks are in the middle of a step
        self.threads = StepThreads(torch.get_num_threads())
        self.sampler = Sampler(
            self.slots,
            decoder.config.vocab_size,
            decoder.device,
            max_model_len=self.max_model_len,
            deferral=deferral,
        )

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Execute a plan. Returns one result per sequence; see `engine.sched.step.Sampled`.

        Raises:
            SequencesFailed: the step failed because of some sequences. It can be planned again.
        """
        self.threads.use_for(plan.features)
        with self._blaming(plan):
            scored = scored_rows(plan) if plan.reads_prompts else None
            begun = self._begin(plan, scored, is_launched=False)
            return [*self._choose(begun, 0)()]

    def launch(self, plan: StepPlan) -> Choose:
        """As `run`, without waiting for the device; see `AsyncRunner`."""
        with self._blaming(plan):
            begun = self._begin(plan, None, is_launched=True)
            if plan.is_ahead and any(map(_NEEDS_HOST, plan.sequences)):
                return partial(self._choose_later, begun)
            results = self._choose(begun, plan.num_unread)
        return lambda: results

    def _choose_later(self, begun: _Begun) -> Results:
        with self._blaming(begun.plan):
            return self._choose(begun, 0)

    def _begin(
        self, plan: StepPlan, scored: SequenceOf[ScoredRows] | None, *, is_launched: bool
    ) -> _Begun:
        """Begin a step on all ranks: its numbers, and then its logits.

        Args:
            scored: the rows that score prompts; None: nothing but tokens is read of the step.
        """
        entered = [] if plan.continues else self.slots.enter(plan.sequences)
        step = self.batching.inputs(plan, entered)
        if self.followers is not None:
            numbers, num_slots = step.to_bytes(), self.slots.num_slots
            ranges = None if scored is None else scored_ranges(scored)
            self._is_shared = True
            self.followers.follow(RankStep(numbers, step.shape, num_slots, ranges, is_launched))
        rows, nums_rows = _rows(plan)
        begun = _Begun(plan, rows, nums_rows, is_launched)
        self._compute(begun, step, [sequence.slot for sequence in entered], scored)
        self._is_shared = False
        return begun

    @torch.inference_mode()
    def _compute(
        self,
        begun: _Begun,
        step: StepInputs,
        entered: list[int],
        scored: SequenceOf[ScoredRows] | None = None,
    ) -> None:
        """Compute a step's logits, and what else its requests ask of their prompts.

        Args:
            entered: the slots that have new owners.
            scored: see `_begin`.
        """
        self.sampler.enter(entered)
        batch, begun.slots = self.batching.batch(step)
        begun.logits, begun.positions = self._forward(batch, begun.rows, scored)

    def _forward(
        self, batch: Batch, rows: SequenceOf[Continued], scored: SequenceOf[ScoredRows] | None
    ) -> tuple[Tensor, Tensor]:
        """The logits, and for each row the position of the token that it follows."""
        if scored is None:
            logits = self.logits(batch)
        else:
            hidden = hidden_scored(self.decoder, batch, self.kv_cache.pages, scored)
            logits = self.decoder.logits(hidden)
            keep_pooled(pooled_rows(rows), hidden, logits)
        is_all = batch.logits_rows.shape[0] == batch.positions.shape[0]
        return logits, batch.positions if is_all else batch.positions[batch.logits_rows]

    @torch.inference_mode()
    def _choose(self, begun: _Begun, num_unread: int) -> Results:
        """Choose a step's tokens. All rows of a draft are sampled, right or not.

        Args:
            num_unread: see `Sampler.sample`.
        """
        rows, masks, failed = begun.rows, None, dict[int, DisaggError]()
        try:
            if any(map(_NEEDS_HOST, begun.plan.sequences)) and (bound := bound_rows(rows)):
                # On a GPU the host fills the masks while the logits are computed.
                masks, failed = token_masks(rows, bound, self.grammars, self.decoder.device)
            chosen = self.sampler.sample(begun.logits, rows, begun.positions, masks, num_unread)
        except Exception:
            if begun.is_launched:  # the other ranks wait for tokens also if there are none
                _synchronize(self.decoder.device)  # raises if the device has failed
                self._share(torch.zeros_like(begun.slots))
            raise
        if begun.is_launched:
            self._share(chosen.token_ids)
            self.batching.remember(begun.slots, chosen.token_ids)

        def results() -> SequenceOf[Sampled]:
            sampled: list[int | SampledToken | DisaggError] = [*chosen.sampled()]
            for row, error in failed.items():
                sampled[row] = error
            return sampled if begun.nums_rows is None else _joined(sampled, begun.nums_rows)

        return results

    def _share(self, token_ids: Tensor) -> None:
        """Give the other ranks the tokens of a step."""
        if self.decoder.ranks is not None and token_ids.shape[0]:
            self.decoder.ranks.broadcast_(token_ids)

    @contextmanager
    def _blaming(self, plan: StepPlan) -> Iterator[None]:
        """Raise `SequencesFailed` if some sequences of a plan make its step fail.

        Otherwise the device or this code is broken. So it is also in the middle of a step that
        other ranks compute: they would take the next one for the rest of it.
        """
        try:
            yield
        except Exception as error:
            if self._is_shared:
                raise
            _synchronize(self.decoder.device)  # blocks may change hands now
            self.slots.leave(plan.sequences)  # what was written for them may be incomplete
            sizes = self.kv_cache.block_size, self.max_num_blocks, self.decoder.config.vocab_size
            broken = _find_broken(plan, *sizes, self.grammars)
            if not broken:
                raise
            raise SequencesFailed(broken) from error

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
        prompt = self._scratch_sequence(num_tokens)
        answers = self.run(StepPlan((prompt,), (num_tokens,), 0, StepFeatures()))
        num_seqs = min(num_seqs, self.kv_cache.num_blocks)
        decodes = [self._scratch_sequence(1, i) for i in range(num_seqs)]
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
        If an index chooses tokens, others attend to more tokens than it chooses. Overwrites blocks
        too.
        """
        from disagg.kernels.gpu.attention_work import KEYS_PER_ROW, LONG_ROWS, MAX_SHORT_ROWS

        block_size, num_blocks = self.kv_cache.block_size, self.kv_cache.num_blocks
        many = 2 * KEYS_PER_ROW * LONG_ROWS  # so that also those of a prompt's tile are cut
        latent, contexts = self.decoder.config.latent, [many]
        if latent is not None and latent.index is not None:
            contexts = [latent.index.num_chosen, latent.index.num_chosen + many]
        for context in contexts:
            num_tokens = min(context, max_model_len, num_blocks * block_size)
            num_new = 1
            while num_new <= min(2 * MAX_SHORT_ROWS, num_tokens):
                sequence = self._scratch_sequence(num_tokens)
                sequence.num_computed = num_tokens - num_new
                self.run(StepPlan((sequence,), (num_new,), 0, StepFeatures()))
                num_new *= 2

    def measure_threads(self, max_model_len: int) -> None:
        """Measure which steps on a CPU are faster with fewer threads. Overwrites blocks too."""
        block_size, num_blocks = self.kv_cache.block_size, self.kv_cache.num_blocks
        num_tokens = min(CONTEXT, max_model_len, num_blocks * block_size)

        def compute(num_seqs: int) -> None:
            decodes = [self._scratch_sequence(num_tokens) for _ in range(num_seqs)]
            for sequence in decodes:
                sequence.num_computed = num_tokens - 1
            self.run(StepPlan(decodes, [1] * num_seqs, num_seqs, StepFeatures()))

        self.threads.measure(compute)

    def _scratch_sequence(self, num_tokens: int, first_block: int = 0) -> Sequence:
        """A sequence to warm up with. Its groups of layers share blocks, which does for that."""
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
        size, num_groups = self.kv_cache.block_size, self.kv_cache.pages.num_groups
        blocks = range(first_block, first_block + -(-num_tokens // size))
        sequence.block_ids = [block_id for block_id in blocks for _ in range(num_groups)]
        sequence.num_slots = len(blocks) * size
        return sequence

    def capture(self, max_num_seqs: int) -> None:
        """Capture graphs on all ranks; see `capture_graphs`."""
        if self.followers is not None:
            self.followers.follow(RankCapture(max_num_seqs))
        self.capture_graphs(max_num_seqs)


@dataclass(slots=True)
class _Begun:
    """A step whose logits are being computed.

    rows, nums_rows: see `_rows`.
    is_launched: whether the tokens are the input of the next step before the host reads them.
    logits, positions: see `Sampler.sample`.
    slots: int64 [num_rows], of the rows' sequences.
    """

    plan: StepPlan
    rows: SequenceOf[Continued]
    nums_rows: list[int] | None
    is_launched: bool
    logits: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    slots: Tensor = field(init=False)


def _rows(plan: StepPlan) -> tuple[SequenceOf[Continued], list[int] | None]:
    """The sequence of each row of a step's logits, and the number of rows of each sequence.

    The numbers are None if there is one row for each sequence.
    """
    n, sequences = plan.num_decodes, plan.sequences
    if n == len(sequences):
        return sequences, None
    ends = map(add, plan.first_positions(), plan.query_lens)
    chunks = [[*rows(*each)] for each in islice(zip(sequences, ends, strict=True), n, None)]
    return [*sequences[:n], *chain.from_iterable(chunks)], [1] * n + [*map(len, chunks)]


def _joined(
    sampled: SequenceOf[int | SampledToken | DisaggError], nums_rows: list[int]
) -> list[Sampled]:
    """The results of sequences with so many rows each."""
    tokens = iter(sampled)
    results: list[Sampled] = []
    for num_rows in nums_rows:
        some = [next(tokens) for _ in range(num_rows)]
        if num_rows < 2 or isinstance(some[0], DisaggError):
            results.append(some[0] if some else None)
            continue
        # An error counts only if the draft before it is right; the next step shows it.
        verified: list[SampledToken] = []
        for one in some:
            if isinstance(one, DisaggError):
                break
            verified.append(SampledToken(one) if isinstance(one, int) else one)
        results.append(tuple(verified))
    return results


def _synchronize(device: torch.device) -> None:
    """Wait until all launched work has ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _find_broken(
    plan: StepPlan, block_size: int, max_num_blocks: int, vocab_size: int, grammars: Grammars | None
) -> dict[Sequence, Exception]:
    """The sequences of a failed plan whose rows cannot be built alone either, and why.

    If one of many has a number that no tensor can hold, or a grammar that raises, the exception
    does not say whose it is. So all that a step does for a sequence, except for the model, is done
    for each one alone, and on the CPU: a device that has failed may answer nothing any more.
    The sequences have no slots before and afterwards.
    """
    broken: dict[Sequence, Exception] = {}
    for sequence in plan.sequences:
        slots = Slots()
        slots.enter([sequence])
        try:
            alone = StepPlan((sequence,), (sequence.num_uncomputed,), 0, StepFeatures())
            batching = Batching(slots, block_size, max_num_blocks, _CPU)
            batch, _ = batching.batch(batching.inputs(alone, [sequence]))
            masks, _ = token_masks([sequence], bound_rows([sequence]), grammars, _CPU)
            sampler = Sampler(slots, vocab_size, _CPU, TorchSampling())
            sampler.enter([sequence.slot])
            last = batch.positions[-1:]
            sampler.sample(torch.zeros(1, vocab_size), [sequence], last, masks).sampled()
        except Exception as error:
            broken[sequence] = error
        slots.leave([sequence])
    return broken
