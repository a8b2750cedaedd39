"""How long a step takes on given GPUs, from the arithmetic and the memory reads that it needs.

A step reads every weight and multiplies with it; the slower of the two counts. Of experts, only
those that its tokens use count. Prompt attention (arithmetic), decode attention (KV reads) and the
exchanges of tensor parallelism are added. Steps are described by the time model's own features
(`StepFeatures`), so a roofline is a prior of the time model and can be compared with a later fit.

Everything here is a prediction. Knows no load, price or clock.

Sources: Williams, Waterman and Patterson (CACM 2009) for the roofline; Pope et al. (arXiv
2211.05102) for its use on decoders. docs/planning.md has the formulas in one place.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from disagg.errors import NotEnoughMemory
from disagg.planner.efficiency import PLANNED, Efficiency, efficiency_of
from disagg.planner.gpus import CPU_CORE, Gpu
from disagg.planner.shapes import ModelShape
from disagg.time_model import CHUNK_TOKENS, StepFeatures, StepTimeModel, attended

# Of a GPU's memory, what weights and KV may fill; activations, graphs and the driver have the rest.
# The engine's own default (`gpu_memory_utilization`).
MEMORY_SHARE = 0.9

# Tensor parallelism sums the activations of all GPUs after attention and after the MLP.
ALL_REDUCES_PER_LAYER = 2
ACTIVATION_NBYTES = 2  # bf16, whatever the weights are


class Placement(msgspec.Struct, frozen=True, dict=True):  # `dict`: for `cached_property`
    """One worker: a model split over `num_gpus` of a node by tensor parallelism.

    expert_parallel: each GPU has whole experts, of a model that has some; the busiest one counts.
    """

    shape: ModelShape
    gpu: Gpu
    num_gpus: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    efficiency: Efficiency = PLANNED
    expert_parallel: bool = False

    @property
    def num_holders(self) -> int:
        """Among so many GPUs whole experts are divided."""
        return self.num_gpus if self.expert_parallel else 1

    @property
    def weights_nbytes(self) -> float:
        return self.shape.weights_nbytes(self.weights)

    @property
    def kv_nbytes_per_token(self) -> int:
        return self.shape.kv_nbytes_per_token(self.kv)

    @cached_property
    def kv_nbytes_per_gpu_token(self) -> float:
        """More GPUs than KV heads hold copies of them."""
        num_heads = self.shape.num_kv_heads
        return self.kv_nbytes_per_token * max(1.0 / self.num_gpus, 1.0 / num_heads)

    @property
    def kv_room_nbytes(self) -> float:
        """Of one GPU, after the weights; negative where these do not fit."""
        weights_nbytes = self.shape.weights_nbytes(self.weights, self.num_holders)
        return self.gpu.memory_nbytes * MEMORY_SHARE - weights_nbytes / self.num_gpus

    @property
    def num_kv_tokens(self) -> int:
        """Whose KV fits beside the weights."""
        return max(0, int(self.kv_room_nbytes / self.kv_nbytes_per_gpu_token))

    @property
    def break_even_batch(self) -> float:
        """Tokens in a step at which multiplying with the weights takes as long as reading them.

        Each token costs two FLOP a weight, on the datasheet's figures.
        """
        return self.gpu.flops_per_byte(self.weights) * self.shape.value_nbytes(self.weights) / 2

    def step_s(self, step: StepFeatures) -> float:
        """Seconds of an engine step."""
        sequences_s = self.efficiency.sequence_s * step.num_decoding
        return (
            self._tokens_s(step.num_new_tokens + step.num_decoding)
            + sequences_s
            + step.num_attended * self.attended_s
            + step.num_decode_context * self.context_s
        )

    def decode_step_s(self, num_sequences: int, num_context_tokens: float) -> float:
        """One token for each sequence; `num_context_tokens` is the mean length of one."""
        return self.step_s(
            StepFeatures(0, 0.0, num_sequences, int(num_sequences * num_context_tokens))
        )

    def prefill_s(self, num_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> float:
        """A prompt alone on the worker, in chunks as the scheduler makes them."""
        num_full, rest = divmod(num_tokens, chunk_tokens)
        tokens_s = num_full * self._tokens_s(chunk_tokens) + (self._tokens_s(rest) if rest else 0)
        return tokens_s + attended(num_tokens, 0) * self.attended_s

    def time_model(self, num_sequences: int = 64) -> StepTimeModel:
        """A prior for the worker's time model: straight lines through this roofline.

        They meet it in a chunk of `CHUNK_TOKENS` prompt tokens and in a decode step of
        `num_sequences`. In between they lie above it, at most by the time of reading what every
        step reads. Only of a model with experts they may also lie below it, at most by the time of
        reading all experts, as its first tokens read most of them. All coefficients are > 0, as a
        fit needs.
        """
        per_step_s = self._tokens_s(0)
        per_token_s = (self._tokens_s(CHUNK_TOKENS) - per_step_s) / CHUNK_TOKENS
        grown_s = (self._tokens_s(num_sequences) - per_step_s) / num_sequences
        per_sequence_s = grown_s + self.efficiency.sequence_s
        # Where a step only reads weights in time, tokens would seem to be free.
        coefficients = (per_step_s, per_token_s, self.attended_s, per_sequence_s, self.context_s)
        return StepTimeModel(tuple(max(each, 1e-12) for each in coefficients))

    @cached_property
    def attended_s(self) -> float:
        """Of one prompt token and one position it sees: a product for the score, one for the sum.

        Attention multiplies in bf16 whatever the weights are.
        """
        shape = self.shape
        num_flop = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        return num_flop / (self.num_gpus * self.gpu.bf16_flops * self.efficiency.attention)

    @cached_property
    def context_s(self) -> float:
        """Of reading one token's KV; of latent KV, of multiplying with it, if that takes longer."""
        bytes_per_s = self.gpu.memory_bytes_per_s * self.efficiency.memory
        flops = self.num_gpus * self.gpu.bf16_flops * self.efficiency.attention
        multiply_s = self.shape.num_latent_flop / flops
        return max(self.kv_nbytes_per_gpu_token / bytes_per_s, multiply_s)

    @cached_property
    def _matmul_flops(self) -> float:
        """Of the datasheet. Experts of 4 bits without wide products are widened to 16."""
        return self.gpu.flops("bf16" if self.shape.has_mxfp4_experts else self.weights)

    def _tokens_s(self, num_tokens: int) -> float:
        """A step without attention: the slower of reading and multiplying, and the exchange."""
        shape, gpu, efficiency = self.shape, self.gpu, self.efficiency
        read_nbytes = shape.read_nbytes(num_tokens, self.weights, self.num_holders)
        read_s = read_nbytes / (gpu.memory_bytes_per_s * efficiency.memory)
        flops = self._matmul_flops * efficiency.matmul
        num_params = shape.num_multiplied_params(num_tokens, self.num_holders)
        multiply_s = 2 * num_params * num_tokens / flops
        slower_s = max(read_s, multiply_s) / self.num_gpus
        return efficiency.step_s + slower_s + self._exchange_s(num_tokens)

    def _exchange_s(self, num_tokens: int) -> float:
        """Ring all-reduces: every GPU sends and receives 2 (n - 1) / n of the activations."""
        if self.num_gpus == 1:
            return 0.0
        nbytes = num_tokens * self.shape.hidden_size * ACTIVATION_NBYTES
        sent_nbytes = 2 * (self.num_gpus - 1) / self.num_gpus * nbytes
        one_s = sent_nbytes / (self.gpu.link_bytes_per_s * self.efficiency.link)
        num_reduces = ALL_REDUCES_PER_LAYER * self.shape.num_layers
        return num_reduces * (one_s + self.efficiency.all_reduce_s)


def placements(
    shape: ModelShape,
    gpu: Gpu,
    weights: str = "bf16",
    kv: str = "bf16",
    num_tokens: int = 1,
    engine: str = "",
    *,
    expert_parallel: bool = False,
) -> list[Placement]:
    """Every way to split the model over GPUs of one node that leaves room for `num_tokens`.

    Tensor parallelism divides the heads evenly, or copies KV heads evenly.

    Args:
        engine: as `efficiency_of` has it.
        expert_parallel: workers of several GPUs have whole experts on each.

    Raises:
        NotEnoughMemory: it does not fit a whole node.
        StartupError: the GPU cannot multiply in `weights`, or nothing is known of the engine there.
    """
    gpu.flops(weights)
    if gpu is CPU_CORE:
        shape = shape.widened
    efficiency = efficiency_of(gpu, shape.products_in(weights), engine)
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    degrees = [
        num
        for num in (1, 2, 4, 8)
        if num <= gpu.gpus_per_node
        and num_heads % num == 0
        and (num_kv_heads % num == 0 or num % num_kv_heads == 0)
        and (not expert_parallel or num <= shape.num_experts)
    ]
    every = [
        Placement(shape.divided(num), gpu, num, weights, kv, efficiency, expert_parallel)
        for num in degrees
    ]
    fitting = [each for each in every if each.num_kv_tokens >= num_tokens]
    if not fitting:
        most = every[-1]
        needed = most.weights_nbytes / most.num_gpus + num_tokens * most.kv_nbytes_per_gpu_token
        is_wide = weights == "bf16" and not shape.packed_nbytes
        raise NotEnoughMemory(
            f"{shape.name} in {shape.stored_as(weights)} has"
            f" {most.weights_nbytes / 1e9:.1f} GB of weights, and {num_tokens:,} tokens have"
            f" {num_tokens * most.kv_nbytes_per_token / 1e9:.1f} GB of KV;"
            f" {most.num_gpus} x {gpu.name} offer"
            f" {most.num_gpus * gpu.memory_nbytes * MEMORY_SHARE / 1e9:.0f} GB."
            f" It would fit on {most.num_gpus} GPUs of {needed / MEMORY_SHARE / 1e9:.0f} GB each"
            + (", or try fp8 weights." if is_wide else ".")
            + " `disagg serve --nnodes` divides workers over several nodes, which are not planned.",
            param="gpu",
        )
    return fitting
