"""Checks that settings and sequences can work at all. The errors name the numbers."""

from __future__ import annotations

from disagg.blocks import hash_blocks
from disagg.engine.sched.sequence import Sequence
from disagg.errors import ContextLengthExceeded, Overloaded, RequestError, StartupError
from disagg.messages import SamplingParams

# Bytes per token of a waiting request: an integer, its place in a list, and its share of a block
# hash. Measured: 39.7.
TOKEN_NBYTES = 40


def check_room(nbytes: int, num_requests: int, max_nbytes: int) -> None:
    """Check the bound on the memory of all requests on this worker.

    A single request is always allowed; its length is checked elsewhere.

    Args:
        nbytes: memory of all requests, including the new one.
        num_requests: number of these requests.

    Raises:
        Overloaded: there is no room here; another worker may have room.
    """
    if nbytes > max_nbytes and num_requests > 1:
        raise Overloaded(
            f"The requests on this worker already fill the {max_nbytes} bytes that they may use;"
            " try again shortly."
        )


def check_step_size(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Check that every running sequence can decode in every step.

    Raises:
        StartupError: the token budget is smaller than the number of sequences.
    """
    if max_num_batched_tokens < max_num_seqs:
        raise StartupError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, but {max_num_seqs} sequences"
            " may decode in one step; raise it, or lower max_num_seqs.",
            param="max_num_batched_tokens",
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
    """Check the tokens whose logits a request changes.

    A step has the logits of many requests in one tensor, so another token id would change those of
    another request, or be outside of it, which ends the whole worker on a GPU.

    Raises:
        RequestError: one is not in the vocabulary.
    """
    for param, token_ids in (
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", [token_id for word in sampling.bad_words_token_ids for token_id in word]),
    ):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise RequestError(
                f"{param} has a token id that is not between 0 and {vocab_size - 1}.", param=param
            )


def token_limit(
    sequence: Sequence, *, max_model_len: int, vocab_size: int, num_blocks: int, block_size: int
) -> int:
    """The number of tokens, prompt and output, at which the sequence ends.

    Raises:
        ContextLengthExceeded: there is no room for a single new token.
        RequestError: the sequence is empty, a token is not in the vocabulary, nothing is left to
            generate, the whole pool is too small, or the hashes were made for another block size.
    """
    num_tokens = len(sequence.tokens)
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
    num_needed = -(-(limit - 1) // block_size)  # the last token never needs KV
    if num_needed > num_blocks:
        raise RequestError(
            f"{sequence.num_prompt_tokens} prompt tokens and max_tokens = {max_tokens} need"
            f" {num_needed} KV blocks of {block_size} tokens; this worker has {num_blocks}."
            " Lower max_tokens or shorten the prompt.",
            param="max_tokens",
        )
    if len(sequence.block_hashes) > num_tokens // block_size:
        raise RequestError(
            f"The request has {len(sequence.block_hashes)} block hashes for {num_tokens} tokens,"
            f" which is wrong for blocks of {block_size} tokens. All ingresses and workers of a"
            " tier must use the same block_size."
        )
    return limit
