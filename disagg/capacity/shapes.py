"""The numbers of a model that determine the cost of serving it: parameters, and KV bytes a token.

Shapes come from a checkpoint directory or from the table below. Knows no GPU and no load.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec

from disagg.config import ASSETS, SCALED_KV_BITS
from disagg.errors import ModelError
from disagg.models.description import ModelDescription, describe_model
from disagg.models.hub import fetch_config, is_repository
from disagg.models.model_config import LatentConfig, ModelConfig
from disagg.models.packing import value_nbytes
from disagg.models.quantized import MXFP4

# Bytes of one value of a weight. fp8 has one scale per matrix, or (fp8-block) per block of 128 x
# 128; fp4 (NVFP4) has an 8-bit scale per 16 values. The two vocabulary tables stay in 16 bits.
NBYTES = {"bf16": 2, "fp8": 1, "fp8-block": 1, "fp4": 9 / 16}
TABLE_NBYTES = 2
MXFP4_NBYTES = value_nbytes(MXFP4) or 0.0
KV_BITS = {"bf16": (16, 0), **SCALED_KV_BITS}


class ModelShape(msgspec.Struct, frozen=True, dict=True):  # `dict`: for `cached_property`
    """A decoder with grouped-query attention, and in each layer a gated MLP or experts.

    Attributes:
        source: where the numbers come from.
        num_experts: experts of each layer that has experts; 0: all layers are dense.
        expert_size, shared_size: inner sizes of one expert, and of the expert that all tokens go
            through.
        num_dense_layers: layers without experts, in a model with experts.
        has_mxfp4_experts: whether experts have 4 bits per value and 8 bits per 32 values, whatever
            the format of the other weights is.
        quantized: the format of a quantised checkpoint.
        packed_nbytes: bytes per value of its layers' matrices, which stay quantised on a GPU; 0:
            they are widened when they are loaded.
        has_widened_experts: whether the matrices of experts are always widened.
        has_order: whether columns are in activation order; `packed_nbytes` is then for one GPU.
        latent_size: KV values of a token in a layer for all heads (multi-head latent attention);
            0: there are keys and values of `num_kv_heads`.
        attention_params: parameters of one layer's attention, if the heads do not determine them.
        repository: the Hugging Face repository of a model of the table below, otherwise empty.
    """

    name: str
    source: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    expert_size: int = 0
    shared_size: int = 0
    num_dense_layers: int = 0
    has_mxfp4_experts: bool = False
    quantized: str = ""
    packed_nbytes: float = 0.0
    has_widened_experts: bool = False
    has_order: bool = False
    latent_size: int = 0
    attention_params: int = 0
    repository: str = ""

    @cached_property
    def num_layer_params(self) -> int:
        """Parameters with which a token is multiplied, without norms and biases (< 0.1 %)."""
        return self._num_common_params + self.num_experts_per_tok * self._num_params_per_expert

    @cached_property
    def num_head_params(self) -> int:
        """Parameters of the product that makes logits, only for the last token of a prompt."""
        return self.hidden_size * self.vocab_size

    @property
    def num_params(self) -> int:
        num_tables = 1 if self.tie_word_embeddings else 2
        layers = self._num_common_params + self.num_experts * self._num_params_per_expert
        return layers + num_tables * self.num_head_params

    def weights_nbytes(self, dtype: str, num_holders: int = 1) -> float:
        """Bytes of all weights on a device, stored as `dtype`, one of `NBYTES`.

        Args:
            num_holders: number of ranks that have whole experts. All are counted like the rank that
                has the most.
        """
        num_tables = 1 if self.tie_word_embeddings else 2
        most = -(-self.num_experts // num_holders)
        return self._nbytes(num_tables, num_holders * most, dtype)

    @property
    def widened(self) -> ModelShape:
        """The shape on a CPU, where no matrix stays quantised."""
        return msgspec.structs.replace(self, packed_nbytes=0.0)

    def divided(self, num_gpus: int) -> ModelShape:
        """The shape on so many GPUs together.

        Each GPU has some columns of the matrices that end attention and MLP, and widens them if
        they are in activation order.
        """
        if num_gpus == 1 or not self.has_order or not self.packed_nbytes:
            return self
        ends = self.hidden_size * (
            self.num_layers * self.num_heads * self.head_dim + self._num_inner
        )
        more = (NBYTES["bf16"] - self.packed_nbytes) * ends / self._num_common_params
        return msgspec.structs.replace(self, packed_nbytes=self.packed_nbytes + more)

    def value_nbytes(self, dtype: str) -> float:
        """Bytes of one value of the layers' matrices; for experts, see `_expert_nbytes`."""
        return self.packed_nbytes if self.packed_nbytes and dtype == "bf16" else NBYTES[dtype]

    def stored_as(self, dtype: str) -> str:
        """The format of the layers' matrices, for people."""
        stored = self.quantized if self.packed_nbytes and dtype == "bf16" else dtype
        return f"{stored}, experts in MXFP4" if self.has_mxfp4_experts else stored

    def read_nbytes(self, num_tokens: int, dtype: str, num_holders: int = 1) -> float:
        """Bytes of the weights that a step of so many tokens reads.

        Experts that no token goes through are not read. Each token goes through
        `num_experts_per_tok` experts, as if they were drawn at random.

        Args:
            num_holders: number of ranks that have whole experts. All are counted like the rank that
                reads the most.
        """
        missed = 0.0
        if self.num_experts:
            missed = (1 - self.num_experts_per_tok / self.num_experts) ** max(num_tokens, 1)
        read = self.num_experts * (1 - missed)
        deviation = math.sqrt(read * missed / num_holders)
        most = read / num_holders + _above_mean(num_holders) * deviation
        return self._nbytes(1, min(num_holders * most, self.num_experts), dtype)

    def num_multiplied_params(self, num_tokens: int, num_holders: int = 1) -> float:
        """As `num_layer_params`, in a step of so many tokens.

        Args:
            num_holders: number of ranks that have whole experts. All are counted like the rank that
                multiplies the most, because tokens choose experts at random.
        """
        if num_holders == 1 or not self.num_experts:
            return self.num_layer_params
        chosen, count = self.num_experts_per_tok, self.num_experts
        num_pairs = max(num_tokens, 1) * chosen
        # Experts are drawn without replacement, because a token does not choose an expert twice.
        spread = (num_holders - 1) * (count - chosen) / max(count - 1, 1) / num_pairs
        busier = min(1 + _above_mean(num_holders) * math.sqrt(spread), num_holders)
        return self._num_common_params + busier * chosen * self._num_params_per_expert

    def products_in(self, weights: str) -> str:
        """The format of the products that determine the speed; that of experts, if published."""
        if self.has_mxfp4_experts:
            return "mxfp4"
        return "fp4-experts" if self.num_experts and weights == "fp4" else weights

    @property
    def num_latent_flop(self) -> int:
        """FLOP of a decoding sequence for one latent of its context, for all heads."""
        return 4 * self.num_layers * self.num_heads * self.latent_size

    @cached_property
    def _num_common_params(self) -> int:
        """Parameters of all layers without their experts."""
        of_heads = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        attention = self.attention_params or of_heads
        router = self._num_sparse * self.num_experts * self.hidden_size
        return self.num_layers * attention + 3 * self.hidden_size * self._num_inner + router

    @property
    def _num_sparse(self) -> int:
        """The number of layers with experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def _num_inner(self) -> int:
        """The sum of the inner sizes of all MLPs that every token goes through."""
        dense = (self.num_layers - self._num_sparse) * self.intermediate_size
        return dense + self._num_sparse * self.shared_size

    @cached_property
    def _num_params_per_expert(self) -> int:
        """Parameters of one expert in each layer that has experts."""
        num_sparse = self.num_layers - self.num_dense_layers
        return num_sparse * 3 * self.hidden_size * self.expert_size

    def _nbytes(self, num_tables: int, num_experts: float, dtype: str) -> float:
        """Bytes of so many vocabulary tables, and of all layers with so many experts."""
        experts = num_experts * self._num_params_per_expert * self._expert_nbytes(dtype)
        tables = num_tables * self.num_head_params * TABLE_NBYTES
        return self._num_common_params * self.value_nbytes(dtype) + experts + tables

    def _expert_nbytes(self, dtype: str) -> float:
        """Bytes of one value of an expert."""
        if self.has_mxfp4_experts:
            return MXFP4_NBYTES
        return NBYTES[dtype] if self.has_widened_experts else self.value_nbytes(dtype)

    def kv_nbytes_per_token(self, dtype: str = "bf16") -> int:
        """Bytes of the keys and values of all layers, with their scales."""
        value_bits, scale_bits = KV_BITS[dtype]
        if self.latent_size:
            return self.num_layers * (self.latent_size * value_bits + scale_bits) // 8
        vector_nbytes = (self.head_dim * value_bits + scale_bits) // 8
        return 2 * self.num_layers * self.num_kv_heads * vector_nbytes


def _above_mean(count: int) -> float:
    """The expected largest of `count` normal numbers, in deviations above their mean (Blom)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def read_shape(name_or_directory: str) -> ModelShape:
    """The shape of a model: a name of `SHAPES`, a model on a hub, a bundled one, or a directory.

    Raises:
        ModelError: it is none of these, or the model is not supported.
        StartupError: the hub cannot be reached.
    """
    if name_or_directory in SHAPES:
        return SHAPES[name_or_directory]
    if is_repository(name_or_directory):
        return shape_of(describe_model(fetch_config(name_or_directory)))
    if (ASSETS / name_or_directory).is_dir():
        return shape_of(describe_model(ASSETS / name_or_directory))
    if not Path(name_or_directory).exists():
        raise ModelError(
            f"{name_or_directory} is neither a model directory, nor a GGUF file, nor a model of"
            f" Hugging Face (organisation/name), nor one of the known models: {', '.join(SHAPES)}.",
            param="model",
        )
    return shape_of(describe_model(name_or_directory))


def shape_of(model: ModelDescription) -> ModelShape:
    config = model.config
    numbers = {name: getattr(config, name) for name in _OF_THE_CONFIG}
    experts = config.experts
    is_mxfp4 = experts is not None and experts.is_mxfp4
    format = None if is_mxfp4 else config.quantized
    shape = ModelShape(
        model.name,
        model.source,
        **numbers,
        quantized="" if format is None else format.name,
        packed_nbytes=0.0 if format is None else value_nbytes(format) or 0.0,
        # If a row is one group, any order of columns is the same; see `models/packing.py`.
        has_order=format is not None and format.has_order and format.group_size is not None,
    )
    if config.latent is not None:
        shape = msgspec.structs.replace(shape, **_latent_numbers(config, config.latent))
    if experts is None:
        return shape
    return msgspec.structs.replace(
        shape,
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        expert_size=experts.intermediate_size,
        shared_size=experts.shared_intermediate_size,
        num_dense_layers=len(config.dense_layers),
        has_mxfp4_experts=experts.is_mxfp4,
        has_widened_experts=shape.has_order,
    )


def _latent_numbers(config: ModelConfig, latent: LatentConfig) -> dict[str, int]:
    """The numbers of attention with latents (`models.latent`)."""
    queries = config.num_heads * latent.query_dim
    made = config.num_heads * (latent.nope_dim + latent.value_dim)
    from_hidden = latent.cached_dim + (latent.query_rank or queries)
    attention = config.hidden_size * (from_hidden + config.num_heads * latent.value_dim)
    return {
        "latent_size": latent.cached_dim,
        "attention_params": attention + made * latent.rank + queries * (latent.query_rank or 0),
        # The mean of the two products of a prompt.
        "head_dim": (latent.cached_dim + latent.rank) // 2,
    }


_OF_THE_CONFIG = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_model_len",
    "tie_word_embeddings",
)


Numbers = tuple[int, int, int, int, int, int, int, int]


def _known(
    name: str, repository: str, numbers: Numbers, tied: bool = False, **experts: Any
) -> ModelShape:
    source = f"config.json of {repository} on Hugging Face"
    return ModelShape(name, source, *numbers, tied, repository=repository, **experts)


# layers, hidden, intermediate, heads, KV heads, head size, vocabulary, longest context
SHAPES = {
    shape.name: shape
    for shape in (
        _known("llama-2-7b", "meta-llama/Llama-2-7b-hf",
               (32, 4096, 11008, 32, 32, 128, 32000, 4096)),
        _known("llama-2-13b", "meta-llama/Llama-2-13b-hf",
               (40, 5120, 13824, 40, 40, 128, 32000, 4096)),
        _known("llama-2-70b", "meta-llama/Llama-2-70b-hf",
               (80, 8192, 28672, 64, 8, 128, 32000, 4096)),
        _known("llama-3-8b", "meta-llama/Meta-Llama-3-8B",
               (32, 4096, 14336, 32, 8, 128, 128256, 8192)),
        _known("llama-3-70b", "meta-llama/Meta-Llama-3-70B",
               (80, 8192, 28672, 64, 8, 128, 128256, 8192)),
        _known("llama-3.1-8b", "meta-llama/Llama-3.1-8B",
               (32, 4096, 14336, 32, 8, 128, 128256, 131072)),
        _known("llama-3.1-70b", "meta-llama/Llama-3.1-70B",
               (80, 8192, 28672, 64, 8, 128, 128256, 131072)),
        _known("llama-3.1-405b", "meta-llama/Llama-3.1-405B",
               (126, 16384, 53248, 128, 8, 128, 128256, 131072)),
        _known("mistral-7b", "mistralai/Mistral-7B-v0.3",
               (32, 4096, 14336, 32, 8, 128, 32768, 32768)),
        _known("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct",
               (28, 3584, 18944, 28, 4, 128, 152064, 32768)),
        _known("qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct",
               (80, 8192, 29568, 64, 8, 128, 152064, 32768)),
        _known("qwen3-0.6b", "Qwen/Qwen3-0.6B",
               (28, 1024, 3072, 16, 8, 128, 151936, 40960), True),
        _known("qwen3-8b", "Qwen/Qwen3-8B",
               (36, 4096, 12288, 32, 8, 128, 151936, 40960)),
        _known("qwen3-14b", "Qwen/Qwen3-14B",
               (40, 5120, 17408, 40, 8, 128, 151936, 40960)),
        _known("qwen3-32b", "Qwen/Qwen3-32B",
               (64, 5120, 25600, 64, 8, 128, 151936, 40960)),
        _known("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1",
               (32, 4096, 14336, 32, 8, 128, 32000, 32768),
               num_experts=8, num_experts_per_tok=2, expert_size=14336),
        _known("qwen1.5-moe-a2.7b", "Qwen/Qwen1.5-MoE-A2.7B",
               (24, 2048, 5632, 16, 16, 128, 151936, 8192),
               num_experts=60, num_experts_per_tok=4, expert_size=1408, shared_size=5632),
        _known("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B",
               (48, 2048, 6144, 32, 4, 128, 151936, 40960),
               num_experts=128, num_experts_per_tok=8, expert_size=768),
        _known("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B",
               (94, 4096, 12288, 64, 4, 128, 151936, 40960),
               num_experts=128, num_experts_per_tok=8, expert_size=1536),
        _known("gpt-oss-20b", "openai/gpt-oss-20b",
               (24, 2880, 2880, 64, 8, 64, 201088, 131072), has_mxfp4_experts=True,
               num_experts=32, num_experts_per_tok=4, expert_size=2880),
        _known("gpt-oss-120b", "openai/gpt-oss-120b",
               (36, 2880, 2880, 64, 8, 64, 201088, 131072), has_mxfp4_experts=True,
               num_experts=128, num_experts_per_tok=4, expert_size=2880),
        # Prompts multiply keys of 192 values and values of 128 for each head: 160 on average. The
        # layers' five attention matrices: 7168 x 1536, 1536 x 128 x 192, 7168 x 576,
        # 512 x 128 x 256 and 128 x 128 x 7168.
        _known("deepseek-r1", "deepseek-ai/DeepSeek-R1",
               (61, 7168, 18432, 128, 1, 160, 129280, 163840),
               latent_size=576, attention_params=187_105_280,
               num_experts=256, num_experts_per_tok=8, expert_size=2048, shared_size=2048,
               num_dense_layers=3),
        # As above, with 64 heads.
        _known("kimi-k2", "moonshotai/Kimi-K2-Instruct",
               (61, 7168, 18432, 64, 1, 160, 163840, 131072),
               latent_size=576, attention_params=101_122_048,
               num_experts=384, num_experts_per_tok=8, expert_size=2048, shared_size=2048,
               num_dense_layers=1),
    )
}  # fmt: skip
