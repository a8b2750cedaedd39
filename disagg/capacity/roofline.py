"""Predicts how long a step takes on given GPUs, from its arithmetic and its memory reads.

A step reads every weight and multiplies with it, and the slower of the two counts. Experts count
only if a token of the step uses them. Prompt attention (arithmetic), decode attention (KV reads)
and the exchanges of tensor parallelism are added. Steps are described by the time model's own
features (`StepFeatures`), so a roofline is a prior of the time model and can be compared with a
later fit.

Everything here is a prediction. Knows no load, price or clock.

Sources: Williams, Waterman and Patterson (CACM 2009) for the roofline; Pope et al. (arXiv
2211.05102) for its use on decoders. docs/planning.md has the formulas in one place.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import msgspec

from disagg.capacity.efficiency import PLANNED, Efficiency, efficiency_of
from disagg.capacity.gpus import CPU_CORE, Gpu
from disagg.capacity.shapes import ModelShape
from disagg.errors import NotEnoughMemory
from disagg.models.share import possible_ranks
from disagg.time_model import CHUNK_TOKENS, StepFeatures, StepTimeModel, attended

# The share of a GPU's memory that weights and KV may fill, which is the engine's default
# (`gpu_memory_utilization`). The rest is for activations, graphs and the driver.
MEMORY_SHARE = 0.9

# Tensor parallelism sums the activations of all GPUs after attention and after the MLP.
ALL_REDUCES_PER_LAYER = 2
ACTIVATION_NBYTES = 2  # bf16, whatever the format of the weights is

_MORE_NODES = " `disagg serve --nnodes` divides workers over several nodes, which are not planned."


class Placement(msgspec.Struct, frozen=True, dict=True):  # `dict`: for `cached_property`
    """One worker: a model split over `num_gpus` of a node by tensor parallelism.

    expert_parallel: whether each GPU has whole experts, if the model has experts; the busiest GPU
        counts.
    kept_tokens: length of the sequences whose KV is counted, since layers with a window keep only
        their last tokens; 0: layers keep all.
    """

    shape: ModelShape
    gpu: Gpu
    num_gpus: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    efficiency: Efficiency = PLANNED
    expert_parallel: bool = False
    kept_tokens: float = 0.0

    @property
    def num_holders(self) -> int:
        """The number of GPUs among which whole experts are divided."""
        return self.num_gpus if self.expert_parallel else 1

    @property
    def products(self) -> str:
        """The format that the matrix units multiply: that of the weights, or the 8 bits of a
        checkpoint if the GPU has units for them."""
        own = self.shape.eight_bits if self.weights == "bf16" else ""
        return own if own and self.gpu.multiplies(own) else self.weights

    @property
    def weights_nbytes(self) -> float:
        return self.shape.weights_nbytes(self.weights)

    @property
    def kv_nbytes_per_token(self) -> int:
        return self.shape.kv_nbytes_per_token(self.kv, self.kept_tokens)

    @cached_property
    def kv_nbytes_per_gpu_token(self) -> float:
        """KV bytes of a token on one GPU. More GPUs than KV heads hold copies of these."""
        return self.kv_nbytes_per_token * self._share_of_heads

    @property
    def _share_of_heads(self) -> float:
        return max(1.0 / self.num_gpus, 1.0 / self.shape.config.num_kv_heads)

    @cached_property
    def _kv_read_nbytes_per_token(self) -> int:
        """As `kv_nbytes_per_token`, in a step: layers that share KV read it each."""
        return self.shape.kv_nbytes_per_token(self.kv, self.kept_tokens, is_read=True)

    @property
    def kv_room_nbytes(self) -> float:
        """Bytes for KV on one GPU besides the weights; negative if these do not fit."""
        weights_nbytes = self.shape.weights_nbytes(self.weights, self.num_holders)
        return self.gpu.memory_nbytes * MEMORY_SHARE - weights_nbytes / self.num_gpus

    @property
    def is_nearly_full(self) -> bool:
        """Whether the memory left for KV limits throughput, of which predictions are too high."""
        return self.kv_room_nbytes < 0.1 * self.gpu.memory_nbytes

    @property
    def num_kv_tokens(self) -> int:
        """The number of tokens whose KV fits besides the weights."""
        return max(0, int(self.kv_room_nbytes / self.kv_nbytes_per_gpu_token))

    @property
    def break_even_batch(self) -> float:
        """Tokens in a step at which multiplying with the weights takes as long as reading them.

        Each token costs two FLOP per weight; the figures are those of the datasheet.
        """
        return self.gpu.flops_per_byte(self.products) * self.shape.value_nbytes(self.weights) / 2

    def step_s(self, step: StepFeatures) -> float:
        """Seconds of an engine step."""
        sequences_s = self.efficiency.sequence_s * step.num_decoding
        return (
            self._tokens_s(step.num_new_tokens + step.num_decoding)
            + sequences_s
            + self.attention_s(step.num_new_tokens, step.num_attended)
            + step.num_decode_context * self.scored_context_s
            + self._num_chosen(step.num_decoding, step.num_decode_context) * self.per_context_s
        )

    def attention_s(self, num_tokens: int, num_attended: float) -> float:
        """Seconds of attention of prompts' tokens, which see so many positions in all."""
        num_chosen = self._num_chosen(num_tokens, num_attended)
        return num_attended * self.scored_s + num_chosen * self.attended_s

    def _num_chosen(self, num_queries: int, num_seen: float) -> float:
        """To how many of the positions that they see queries attend, if all see as many."""
        index = self.shape.index
        return num_seen if index is None else min(num_seen, num_queries * index.num_chosen)

    def work(self, step: StepFeatures) -> tuple[float, float]:
        """FLOP of an engine step, and the bytes of weights and KV that it reads, on all GPUs."""
        shape, num_tokens = self.shape, step.num_new_tokens + step.num_decoding
        num_params = shape.num_multiplied_params(num_tokens, self.num_holders)
        num_seen = step.num_attended + step.num_decode_context
        num_decode_chosen = self._num_chosen(step.num_decoding, step.num_decode_context)
        num_chosen = num_decode_chosen + self._num_chosen(step.num_new_tokens, step.num_attended)
        nbytes = shape.read_nbytes(num_tokens, self.weights, self.num_holders)
        attention_flop = num_seen * shape.num_index_flop + num_chosen * self._flop_per_attended
        return (
            2 * num_params * num_tokens + attention_flop,
            nbytes
            + num_decode_chosen * self._kv_read_nbytes_per_token
            + step.num_decode_context * self._index_nbytes,
        )

    def decode_step_s(self, num_sequences: int, num_context_tokens: float) -> float:
        """Seconds of a step with one token per sequence.

        num_context_tokens: mean length of a sequence.
        """
        return self.step_s(
            StepFeatures(0, 0.0, num_sequences, int(num_sequences * num_context_tokens))
        )

    def prefill_s(self, num_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> float:
        """Seconds of a prompt alone on the worker, in chunks as the scheduler makes them."""
        num_full, rest = divmod(num_tokens, chunk_tokens)
        tokens_s = num_full * self._tokens_s(chunk_tokens) + (self._tokens_s(rest) if rest else 0)
        return tokens_s + self.attention_s(num_tokens, attended(num_tokens, 0))

    def time_model(self, num_sequences: int = 64) -> StepTimeModel:
        """A prior for the worker's time model: straight lines through this roofline.

        They are exact for a chunk of `CHUNK_TOKENS` prompt tokens and for a decode step of
        `num_sequences`. In between they are too high, at most by the time in which a step reads the
        weights. For a model with experts they may also be too low, at most by the time of reading
        all experts, because the first tokens of a step read most of them. If an index chooses what
        queries attend to, they are exact for contexts beyond what it chooses, and too high for
        shorter ones. All coefficients but the last one are > 0, as a fit needs. The last one is 0:
        in a roofline, a step with prompts has no constant cost of its own.
        """
        per_step_s = self._tokens_s(0)
        per_token_s = (self._tokens_s(CHUNK_TOKENS) - per_step_s) / CHUNK_TOKENS
        grown_s = (self._tokens_s(num_sequences) - per_step_s) / num_sequences
        per_sequence_s = grown_s + self.efficiency.sequence_s
        # In a range where reading the weights takes all the time, tokens would seem to be free.
        attended_s, per_context_s, index = self.attended_s, self.per_context_s, self.shape.index
        if index is not None:
            per_token_s += index.num_chosen * attended_s
            per_sequence_s += index.num_chosen * per_context_s
            attended_s, per_context_s = self.scored_s, self.scored_context_s
        of_prompts = per_step_s, per_token_s, attended_s
        coefficients = *of_prompts, per_sequence_s, per_context_s
        return StepTimeModel.of((*(max(each, 1e-12) for each in coefficients), 0.0))

    @cached_property
    def attended_s(self) -> float:
        """Seconds of attention for one prompt token and one position that it sees.

        There is a product for the score and one for the sum. Attention multiplies in bf16, whatever
        the format of the weights is.
        """
        return self._flop_per_attended / (
            self.num_gpus * self.gpu.bf16_flops * self.efficiency.attention
        )

    @property
    def _flop_per_attended(self) -> int:
        shape = self.shape
        return 4 * shape.config.num_attending_layers * shape.config.num_heads * shape.head_dim

    @cached_property
    def per_context_s(self) -> float:
        """Seconds of reading the KV of a token that a sequence attends to; for latents, of
        multiplying if that takes longer."""
        bytes_per_s = self.gpu.memory_bytes_per_s * self.efficiency.memory
        flops = self.num_gpus * self.gpu.bf16_flops * self.efficiency.attention
        multiply_s = self.shape.num_latent_flop / flops
        read_nbytes = self._kv_read_nbytes_per_token * self._share_of_heads
        return max(read_nbytes / bytes_per_s, multiply_s)

    @cached_property
    def scored_s(self) -> float:
        """Seconds of an index for one query and one token that it sees. Each GPU computes it."""
        return self.shape.num_index_flop / (self.gpu.bf16_flops * self.efficiency.attention)

    @cached_property
    def scored_context_s(self) -> float:
        """As `scored_s`, of a decoding sequence; of reading the keys if that takes longer."""
        bytes_per_s = self.gpu.memory_bytes_per_s * self.efficiency.memory
        return max(self._index_nbytes / bytes_per_s, self.scored_s)

    @property
    def _index_nbytes(self) -> int:
        """Bytes of a token's keys in the indices of all layers."""
        index = self.shape.index
        head_dim = 0 if index is None else index.head_dim
        return self.shape.num_index_layers * head_dim * ACTIVATION_NBYTES

    def _tokens_s(self, num_tokens: int) -> float:
        """Seconds of a step without attention: the slower of reading and multiplying, plus the
        exchanges."""
        shape, gpu, efficiency = self.shape, self.gpu, self.efficiency
        read_nbytes = shape.read_nbytes(num_tokens, self.weights, self.num_holders)
        read_s = read_nbytes / (gpu.memory_bytes_per_s * efficiency.memory)
        # Without 4-bit matrix units, 4-bit experts are widened to 16.
        flops = gpu.flops("bf16" if shape.has_mxfp4_experts else self.products) * efficiency.matmul
        num_params = shape.num_multiplied_params(num_tokens, self.num_holders)
        multiply_s = 2 * num_params * num_tokens / flops
        slower_s = max(read_s, multiply_s) / self.num_gpus
        return efficiency.step_s + slower_s + self._exchange_s(num_tokens)

    def _exchange_s(self, num_tokens: int) -> float:
        """Seconds of ring all-reduces, which send 2 (n - 1) / n of the activations per GPU."""
        if self.num_gpus == 1:
            return 0.0
        nbytes = num_tokens * self.shape.config.hidden_size * ACTIVATION_NBYTES
        sent_nbytes = 2 * (self.num_gpus - 1) / self.num_gpus * nbytes
        one_s = sent_nbytes / (self.gpu.link_bytes_per_s * self.efficiency.link)
        num_reduces = ALL_REDUCES_PER_LAYER * self.shape.config.num_layers
        return num_reduces * (one_s + self.efficiency.all_reduce_s)


def placements(like: Placement, num_tokens: int = 1, engine: str = "") -> list[Placement]:
    """Every way to split a model over GPUs of one node that leaves room for `num_tokens`.

    Args:
        like: the model, its formats and the kind of GPU, with any number of these.
        engine: see `efficiency_of`.

    Raises:
        NotEnoughMemory: the model does not fit on a whole node.
        StartupError: the GPU cannot multiply in `weights`, or no run of the engine is known.
    """
    shape, gpu, weights = like.shape, like.gpu, like.weights
    gpu.flops(weights)
    if gpu is CPU_CORE:
        shape = replace(shape, is_widened=True)
    products = msgspec.structs.replace(like, shape=shape).products
    efficiency = efficiency_of(gpu, shape.products_in(products), engine)
    degrees = {1, *possible_ranks(shape.config, expert_parallel=like.expert_parallel)}
    every = [
        msgspec.structs.replace(
            like, shape=replace(shape, num_gpus=num), num_gpus=num, efficiency=efficiency
        )
        for num in (1, 2, 4, 8)
        if num in degrees and num <= gpu.gpus_per_node
    ]
    fitting = [each for each in every if each.num_kv_tokens >= num_tokens]
    if not fitting:
        most = every[-1]
        needed = most.weights_nbytes / most.num_gpus + num_tokens * most.kv_nbytes_per_gpu_token
        is_wide = weights == "bf16" and not shape.is_packed
        raise NotEnoughMemory(
            f"{shape.name} in {shape.stored_as(weights)} has"
            f" {most.weights_nbytes / 1e9:.1f} GB of weights, and {num_tokens:,} tokens have"
            f" {num_tokens * most.kv_nbytes_per_token / 1e9:.1f} GB of KV, but"
            f" {most.num_gpus} x {gpu.name} have room for"
            f" {most.num_gpus * gpu.memory_nbytes * MEMORY_SHARE / 1e9:.0f} GB."
            f" It would fit on {most.num_gpus} GPU{'s' * (most.num_gpus > 1)} of"
            f" {needed / MEMORY_SHARE / 1e9:.0f} GB each"
            + (", or try fp8 weights." if is_wide else ".")
            + (_MORE_NODES if len(degrees) > 1 else ""),
            param="gpu",
        )
    return fitting
