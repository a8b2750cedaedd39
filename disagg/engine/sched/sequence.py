"""A request inside one engine: its tokens so far, and how many of them have KV.

Knows nothing of blocks' states, steps or devices. Prefill, decode, prefix hits, recomputation and
arrival from another worker are all values of `num_computed`; there are no phases.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from disagg.blocks import BlockHash
from disagg.messages import FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from disagg.engine.sched.grammar import GrammarState
    from disagg.engine.sched.prompt_lookup import Ngrams

NO_SLOT = -1


@lru_cache(maxsize=64)
def _as_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    """One for all that stop alike: each is looked into for every token, and stays in a cache."""
    return frozenset(token_ids)


class Sequence:
    """Mutable state of one request; only the thread that owns the engine touches it.

    tokens: the prompt, then every token generated so far (also those generated elsewhere).
    draft: what somebody proposes to come after them; see `speculation`.
    num_computed: leading tokens whose KV lies in `block_ids`; below len(tokens) while it lives.
    block_ids: the sequence is one holder of each; block i has positions i * block_size onwards.
    block_hashes: names of full blocks, extended as blocks fill up with generated tokens.
    num_listed: leading blocks that are in the runner's table at `slot`.
    num_published: leading blocks that were offered to the pool under their names.
    arrival: place in every queue: (priority, number that the scheduler gave; -1 before).
    num_cached_tokens: tokens that were found in the prefix cache when it was first admitted.
    hand_over: leave this engine, with the blocks, after one token.
    grammar_state: where the answer is in its grammar, if it has one; the runner's.
    ngrams: where its runs of tokens are, for `prompt_lookup` alone.
    slot: its row of what the runner keeps of running sequences; see `slots`.
    max_num_tokens, stop_ids: when to end, as the scheduler worked it out on submission.
    check_at: len(tokens) from which on the next token may end it or begin a block; never too large.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "block_hashes",
        "block_ids",
        "check_at",
        "deadline_unix_s",
        "draft",
        "grammar_state",
        "hand_over",
        "hash_root",
        "max_num_tokens",
        "min_num_tokens",
        "ngrams",
        "num_cached_tokens",
        "num_computed",
        "num_listed",
        "num_prompt_tokens",
        "num_published",
        "num_slots",
        "publish_at",
        "request_id",
        "sampling",
        "slot",
        "stop_ids",
        "tokens",
        "was_admitted",
    )

    def __init__(self, request: GenerateRequest, *, hand_over: bool = False) -> None:
        sampling: SamplingParams = request.sampling
        self.request_id = request.request_id
        self.tokens: list[int] = list(request.token_ids)
        # Each token of an answer under a grammar is masked by those before it.
        self.draft: tuple[int, ...] = request.draft_token_ids if sampling.grammar is None else ()
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.num_slots = 0  # len(block_ids) * block_size
        self.sampling = sampling
        self.hash_root = request.hash_root
        self.block_hashes: list[BlockHash] = list(request.block_hashes)
        self.num_published = 0
        self.publish_at = 0  # num_computed at which the next block is full
        self.check_at = 0
        self.deadline_unix_s = request.deadline_unix_s
        self.arrival = (request.priority, -1)
        self.was_admitted = False
        self.num_cached_tokens = 0
        self.hand_over = hand_over
        self.grammar_state: GrammarState | None = None
        self.ngrams: Ngrams | None = None
        self.slot = NO_SLOT
        self.num_listed = 0
        self.max_num_tokens = request.num_prompt_tokens + sampling.max_tokens
        self.min_num_tokens = request.num_prompt_tokens + sampling.min_tokens
        self.stop_ids = _as_set(sampling.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token, if it does."""
        tokens = self.tokens
        if tokens[-1] in self.stop_ids and len(tokens) >= self.min_num_tokens:
            return "stop"
        return "length" if len(tokens) >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.num_computed}/{len(self.tokens)} tokens,"
            f" {len(self.block_ids)} blocks)"
        )
