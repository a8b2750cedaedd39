"""A request inside one engine: its tokens so far, and how many of them have KV.

A sequence has no phases: prefill, decode, prefix hits, recomputation and imported KV differ only in
the value of `num_computed`. Other parts keep what they know of a sequence in it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from disagg.blocks import BlockHash, hash_blocks
from disagg.engine.sched.thinking import ThinkingState
from disagg.errors import ContextLengthExceeded, RequestError
from disagg.kv_groups import KVGroups
from disagg.messages import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from disagg.engine.sched.acceptance import Acceptance
    from disagg.engine.sched.grammar import GrammarState

NO_SLOT = -1


@lru_cache(maxsize=64)
def _as_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    """The stop tokens as a set, one object for all sequences that have the same.

    The set is read for every token, and one shared object stays in the CPU's cache.
    """
    return frozenset(token_ids)


class Sequence:
    """Mutable state of one request; only the thread that owns the engine touches it.

    tokens: the prompt, then every token generated so far, here or on another worker. Only the
        scheduler adds tokens.
    num_computed: number of leading tokens with KV in `block_ids`; below len(tokens) until the
        sequence ends. It follows the blocks in `block_tables`; else only the scheduler advances it.
    draft: tokens that are proposed to come next; see `speculation`.
    max_num_tokens, stop_ids: when the sequence ends; set by the scheduler on submission.
    hand_over: whether the sequence leaves this engine, with its blocks, after one token.

    Written by `block_tables`, or by KV import before the sequence joins:
    block_ids: its block table, of whose blocks the sequence is a holder. Row i has a block of each
        group of layers (`kv_groups`), for the positions from i * block_size on. num_slots: the
        positions up to which every group has room. num_evicted: positions without a row in the
        middle, a number of whole rows; the rows behind them come that much earlier. Blocks of such
        a sequence are never cached.
    block_hashes: hashes of full rows, extended as rows fill up with generated tokens.
    num_published: number of leading rows that were offered to the pool's prefix cache.
    publish_at: the value of `num_computed` at which the next row is full.
    was_admitted, num_cached_tokens: whether it was ever admitted; tokens that had KV then, also of
        an answer that was begun elsewhere.

    Written by one part each:
    arrival, num_queued: place in every queue, (priority, number, or -1 before it has one), and its
        share of `Queues.num_queued_tokens`; by `queues`.
    acceptance: how far its drafts were right; by `drafting`. None: it had none.
    stream_since: start of its TPOT, and its number of tokens then; by `step_budget`. None: it does
        not decode yet.
    grammar_state: state of the answer in its grammar, if it has one; by the engine.
    thinking, needs_host: state of the reasoning, or None if nothing depends on it any more; and
        whether the device needs the host's knowledge of all tokens to choose the next one.
    prompt_logprobs: log-probabilities of the computed prompt tokens but the first, if they were
        requested and the answer has not begun; by the runner. Until then no cached prefix is used.
    pooling, pooled: what the request has instead of an answer, if it has none, and its value, as in
        `TokenDelta`, when the prompt is computed; by the runner.
    slot: its row in the runner's tensors of running sequences; by `slots`.
    adapter, adapter_slot: the LoRA adapter of the request, or None; and its slot on the device,
        which the sequence has from before it enters the engine to its end; by `AdapterGate`.
    num_listed: the positions whose blocks are in the runner's table at `slot`; by `batching`.
    """

    __slots__ = (
        "__weakref__",
        "acceptance",
        "adapter",
        "adapter_slot",
        "arrival",
        "block_hashes",
        "block_ids",
        "deadline_unix_s",
        "draft",
        "grammar_state",
        "hand_over",
        "hash_root",
        "max_num_tokens",
        "min_num_tokens",
        "needs_host",
        "num_cached_tokens",
        "num_computed",
        "num_evicted",
        "num_listed",
        "num_prompt_tokens",
        "num_published",
        "num_queued",
        "num_slots",
        "pooled",
        "pooling",
        "prompt_logprobs",
        "publish_at",
        "request_id",
        "sampling",
        "slot",
        "stop_ids",
        "stream_since",
        "thinking",
        "tokens",
        "tpot_slo_s",
        "was_admitted",
    )

    def __init__(self, request: GenerateRequest, *, hand_over: bool = False) -> None:
        sampling: SamplingParams = request.sampling
        self.request_id = request.request_id
        self.sampling = sampling
        self.tokens: list[int] = list(request.token_ids)
        self.thinking: ThinkingState | None = None
        if sampling.thinking is not None:
            self.thinking = ThinkingState(sampling.thinking, request.num_prompt_tokens)
        self.draft: tuple[int, ...] = request.draft_token_ids if self.takes_drafts else ()
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.num_slots = 0
        self.num_evicted = 0
        self.hash_root = request.hash_root
        self.block_hashes: list[BlockHash] = list(request.block_hashes)
        self.num_published = 0
        self.num_queued = 0
        self.publish_at = 0
        self.deadline_unix_s = request.deadline_unix_s
        self.arrival = (request.priority, -1)
        self.was_admitted = False
        self.num_cached_tokens = 0
        self.hand_over = hand_over
        self.acceptance: Acceptance | None = None
        self.grammar_state: GrammarState | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if request.scores_prompt else None
        self.pooling = sampling.pooling
        self.pooled: bytes | None = None
        self.needs_host = self._has_rules or self.thinking is not None
        self.slot = NO_SLOT
        self.num_listed = 0
        self.adapter = request.adapter
        self.adapter_slot = NO_SLOT
        self.max_num_tokens = request.num_prompt_tokens + sampling.max_tokens
        self.min_num_tokens = request.num_prompt_tokens + sampling.min_tokens
        self.stop_ids = _as_set(sampling.stop_token_ids)
        self.tpot_slo_s = request.tpot_slo_s or math.inf
        self.stream_since: tuple[float, int] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_cached_prompt_tokens(self) -> int:
        return min(self.num_cached_tokens, self.num_prompt_tokens)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def takes_drafts(self) -> bool:
        """Whether it can use any draft. A row of logits has no penalties of a draft's tokens, and
        no budget for them."""
        return self.thinking is None and not self.sampling.has_penalties

    @property
    def _has_rules(self) -> bool:
        # Bad words of one token do not depend on the tokens before.
        long_words = any(len(word) > 1 for word in self.sampling.bad_words_token_ids)
        return self.sampling.grammar is not None or long_words

    def watch_thinking(self) -> None:
        """Forget the reasoning when it has ended, unless a grammar begins behind it."""
        thinking = self.thinking
        if thinking is not None and self.sampling.grammar is None and thinking.is_over(self.tokens):
            self.thinking = None
            self.needs_host = self._has_rules

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Take `prompt_logprobs` when the answer begins; None if they were not requested."""
        scored, self.prompt_logprobs = self.prompt_logprobs, None
        if scored is None:
            return None
        if len(scored) != self.num_prompt_tokens - 1:
            raise ValueError(f"{self} has log-probabilities for {len(scored)} tokens of its prompt")
        return tuple(scored)

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token, if it does."""
        tokens = self.tokens
        if tokens[-1] in self.stop_ids and len(tokens) >= self.min_num_tokens:
            return "stop"
        return "length" if len(tokens) >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.num_computed}/{len(self.tokens)} tokens,"
            f" {self.num_slots} slots)"
        )


def rename_blocks(sequence: Sequence, named_by: int, block_size: int) -> None:
    """Hash the full blocks again if they were hashed for another block size.

    That happens while an update changes the block size. The new hashes match nothing elsewhere, but
    they are valid: a hash covers all tokens up to the end of its block.

    Args:
        named_by: the block size for which the hashes were made; 0: `block_size`.
    """
    if named_by not in (0, block_size):
        sequence.block_hashes = hash_blocks(sequence.hash_root, sequence.tokens, block_size)


def check_token_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Check the tokens whose logits a request changes or asks for.

    A step has the logits of many requests in one tensor, so another token id would change those of
    another request, or be outside of it, which ends the whole worker on a GPU.

    Raises:
        RequestError: one is not in the vocabulary.
    """
    pooling = sampling.pooling
    for param, token_ids in (
        ("pooling", () if pooling is None else pooling.token_ids),
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", [token_id for word in sampling.bad_words_token_ids for token_id in word]),
    ):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise RequestError(
                f"{param} has a token id that is not between 0 and {vocab_size - 1}.", param=param
            )


def token_limit(
    sequence: Sequence, *, max_model_len: int, vocab_size: int, num_blocks: int, groups: KVGroups
) -> int:
    """The number of tokens, prompt and output, at which the sequence ends.

    Raises:
        ContextLengthExceeded: there is no room for a single new token.
        RequestError: the sequence is empty, a token is not in the vocabulary, nothing is left to
            generate, the whole pool is too small, or the hashes were made for another block size.
    """
    num_tokens, block_size = len(sequence.tokens), groups.block_size
    max_tokens = sequence.sampling.max_tokens
    if num_tokens == 0:
        raise RequestError("The prompt is empty; there is nothing to continue.", param="prompt")
    if num_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"The request has {num_tokens} tokens. This worker allows {max_model_len} at most, and"
            " at least one of these must be new. Shorten the prompt."
        )
    if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < vocab_size:
        raise RequestError(f"Token ids must lie between 0 and {vocab_size - 1} for this model.")
    limit = min(sequence.num_prompt_tokens + max_tokens, max_model_len)
    if num_tokens >= limit:
        raise RequestError(
            f"max_tokens is {max_tokens}, and {sequence.num_output_tokens} tokens were generated"
            " already; raise max_tokens.",
            param="max_tokens",
        )
    num_needed = groups.num_at_most(limit - 1)  # the last token never needs KV
    if num_needed > num_blocks:
        raise RequestError(
            f"{sequence.num_prompt_tokens} prompt tokens and max_tokens = {max_tokens} need"
            f" {num_needed} KV blocks of {block_size} tokens; this worker has {num_blocks}."
            " Lower max_tokens or shorten the prompt.",
            param="max_tokens",
        )
    if sequence.sampling.kv_eviction is not None and not groups.can_evict:
        raise RequestError(
            "kv_eviction is not supported for this model: some of its layers keep less than the KV"
            " of all tokens already. Leave it out.",
            param="kv_eviction",
        )
    if len(sequence.block_hashes) > num_tokens // block_size:
        raise RequestError(
            f"The request has {len(sequence.block_hashes)} block hashes for {num_tokens} tokens,"
            f" which is wrong for blocks of {block_size} tokens. All ingresses and workers of a"
            " tier must use the same block_size."
        )
    return limit
