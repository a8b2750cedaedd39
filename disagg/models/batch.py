"""The input tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """One step of some sequences, whose tokens are packed one after the other.

    Sequence i has rows [query_start[i], query_start[i+1]) of the token tensors. These are its last
    tokens, at positions context_lens[i] - num_query_tokens .. context_lens[i] - 1, or at later ones
    if the KV of tokens before them was given up. Decoding sequences (one token each) come first,
    then chunks of prompts.
    """

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    slots: torch.Tensor  # int64 [num_tokens]: KV slots, block_id * block_size + offset
    query_start: torch.Tensor  # int32 [num_seqs + 1]
    context_lens: torch.Tensor  # int32 [num_seqs]: tokens with KV after this step
    # int32 [num_rows, max_num_blocks]; entries beyond a sequence's context are undefined
    block_tables: torch.Tensor
    logits_rows: torch.Tensor  # int64 [num_logits], increasing: token rows whose logits are needed
    num_decodes: int  # the first `num_decodes` sequences have exactly one token
    max_query_len: int
    query_lens: tuple[int, ...]  # host copy, for code that loops over sequences
    context_lens_host: Sequence[int]
    # int64 [num_seqs]: the row of each sequence in `block_tables`; None: row i is sequence i's
    table_rows: torch.Tensor | None = None
    # int32 [num_rows]: for each row of `block_tables` the slot of its sequence's LoRA adapter, or
    # -1; None: no sequence of the step has one
    adapters: torch.Tensor | None = None
    # Whether positions of a sequence are not the last of its context.
    are_shifted: bool = False
