"""The device memory that steps need besides weights and KV, in bytes. Needs no device."""

from __future__ import annotations

from collections.abc import Iterable

from disagg.engine.sched.speculation import MAX_AHEAD
from disagg.kernels.gpu.latent_group import SCORES_NBYTES
from disagg.models.model_config import IndexConfig, ModelConfig

# Operations on logits that need copies of them, such as masks, take so many rows at a time.
ROWS_AT_ONCE = 64
COPIES_NBYTES = 12  # of such an operation per logit
# Bytes per logit that sampling keeps: float32, its log-probability, and its token's count.
SAMPLING_NBYTES = 12
# Bytes of a captured kernel launch: its arguments and the driver's objects. Not yet measured.
LAUNCH_NBYTES = 16 << 10
LAUNCHES_A_LAYER = 16
LAUNCHES_OF_EXPERTS = 12  # additional launches of a layer with experts
LAUNCHES_OF_LATENTS = 12  # additional launches of a layer with latents
LAUNCHES_OF_INDICES = 14  # additional launches of a layer whose tokens an index chooses
LAUNCHES_OF_DELTA_NETS = 12  # additional launches of a layer with a recurrent state
LAUNCHES_OF_ALTUP = 36  # additional launches of a layer with several residual streams
LAUNCHES_OF_WIDE_NORMS = 9  # additional launches of a layer with norms over all heads of q and of k
CUBLAS_NBYTES = 32 << 20  # torch's workspace per stream on Hopper, where it is largest
# Query rows of partial results, of a tile of few queries and of a prompt's.
PARTIAL_ROWS = 64 + 128
LEAST_BLOCK_SIZE = 16  # smallest block size on a GPU
SPARE_PARTIALS = 1024  # twice the pieces that fill any device, over all KV heads
# Partial sums of one product with packed weights, whose programs share the columns of a tile. They
# are at most 4/3 as many tiles of 128 x 128 as programs that keep a device busy, which are 3 for
# each of up to 160 multiprocessors.
SPLITS_NBYTES = 640 * 128 * 128 * 4


def step_nbytes(
    model: ModelConfig,
    itemsize: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_ranks: int = 1,
) -> int:
    """Bytes of the largest step: activations, logits and the memory of sampling.

    Args:
        model: the first rank's part of the model; there are `num_ranks` ranks.
        itemsize: bytes of one number of the activations.
    """
    activations = max_num_batched_tokens * _token_nbytes(model, itemsize)
    num_rows = max_num_seqs + MAX_AHEAD
    logit_nbytes = SAMPLING_NBYTES + _projected_nbytes(itemsize, num_ranks)
    sampling = (num_rows * logit_nbytes + ROWS_AT_ONCE * COPIES_NBYTES) * model.vocab_size
    return activations + sampling + _partials_nbytes(model) + CUBLAS_NBYTES


def running_nbytes(
    model: ModelConfig, max_num_seqs: int, max_model_len: int, num_columns: int = 0
) -> int:
    """Bytes kept for running sequences: the token lists of penalties, and block tables.

    Block tables include those of a step. The counts of tokens belong to `SAMPLING_NBYTES`.

    Args:
        num_columns: of a sequence's block tables, if they are many, as those of recurrent states.
    """
    seen = 4 * (min(max_model_len, model.vocab_size) + 1)
    blocks = 2 * 4 * max(num_columns, -(-max_model_len // LEAST_BLOCK_SIZE))
    return max_num_seqs * (seen + blocks)


def captured_nbytes(
    model: ModelConfig,
    itemsize: int,
    capture_sizes: Iterable[int],
    num_ranks: int = 1,
    *,
    is_packed: bool = False,
) -> int:
    """Bytes of captured steps: their inputs and outputs, their memory pool, and the graphs.

    Args:
        model: the first rank's part of the model; there are `num_ranks` ranks.
        capture_sizes: number of tokens of each graph.
        is_packed: whether some matrices of the model are packed.
    """
    sizes = list(capture_sizes)
    num_rows = max(sizes)
    inputs = num_rows * (5 * 8 + 2 * 4)
    logits = num_rows * model.vocab_size * (4 + _projected_nbytes(itemsize, num_ranks))
    pool = num_rows * _token_nbytes(model, itemsize) + _partials_nbytes(model) + CUBLAS_NBYTES
    pool += SPLITS_NBYTES * is_packed
    # Each piece of work has its own numbers, once for each window.
    num_windows = len(set(model.sliding_windows))
    pieces = 4 * 10 * sum(size + SPARE_PARTIALS for size in sizes) * num_windows
    pieces += sum(sizes) * _chosen_nbytes(model)
    launches_a_layer = LAUNCHES_A_LAYER + (LAUNCHES_OF_EXPERTS if model.experts else 0)
    launches_a_layer += LAUNCHES_OF_LATENTS if model.latent else 0
    launches_a_layer += LAUNCHES_OF_INDICES if _index(model) else 0
    launches_a_layer += LAUNCHES_OF_WIDE_NORMS if model.qk_norm_all_heads else 0
    launches_a_layer += LAUNCHES_OF_DELTA_NETS if model.delta_heads else 0
    launches_a_layer += LAUNCHES_OF_ALTUP if model.altup else 0
    launches = len(sizes) * model.num_layers * launches_a_layer * LAUNCH_NBYTES
    return inputs + logits + pool + pieces + launches


def _projected_nbytes(itemsize: int, num_ranks: int) -> int:
    """Bytes per logit before it is float32.

    With ranks also those of all ranks, joined, and this rank's before and after padding.
    """
    return itemsize + (-(-itemsize * (num_ranks + 2) // num_ranks) if num_ranks > 1 else 0)


def _partials_nbytes(model: ModelConfig) -> int:
    """Bytes of the partial results of attention, which are as many as fill the device, and of the
    scores of an index."""
    scores = SCORES_NBYTES if _index(model) else 0
    return SPARE_PARTIALS * PARTIAL_ROWS * 4 * (model.head_dim + 1) + scores


def _index(model: ModelConfig) -> IndexConfig | None:
    return None if model.latent is None else model.latent.index


def _chosen_nbytes(model: ModelConfig) -> int:
    """Bytes of the places that an index chooses for a token."""
    index = _index(model)
    return 0 if index is None else 4 * index.num_chosen


def _token_nbytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of a token's activations at one time."""
    num_heads = model.num_heads + 2 * model.num_kv_heads
    mlp = 3 * model.intermediate_size
    if model.experts is not None:  # activations of the token's experts, and of the shared one
        mlp = max(mlp, 3 * model.experts.shared_intermediate_size)
        per_expert = model.experts.intermediate_size + model.hidden_size
        mlp += model.experts.num_experts_per_tok * per_expert
    attention = 2 * num_heads * model.head_dim
    if model.latent is not None:  # queries before and after absorption, and values of heads
        attention += 2 * model.num_heads * (model.latent.query_dim + model.latent.value_dim)
    index = _index(model)
    if index is not None:  # its queries twice, and the hidden state in float32
        attention += 2 * index.num_heads * index.head_dim + 2 * model.hidden_size
    if model.gates_output:  # q, k and v again without gates, gates, and the product with them
        attention += (num_heads + 3 * model.num_heads) * model.head_dim
    if model.delta_heads is not None:  # projections, and gates and products in float32
        num_values = model.delta_heads.num_heads * model.delta_heads.value_dim
        attention = max(attention, model.delta_heads.num_channels + 9 * num_values)
    residuals = 4 * model.hidden_size
    if (altup := model.altup) is not None:  # streams, predicted, and their difference in float32
        residuals *= 1 + 2 * altup.num_streams
        residuals += 4 * model.num_layers * altup.embedding_size
    return (residuals + mlp + attention) * itemsize + _chosen_nbytes(model)
