"""The numbers of a model that determine the cost of serving it: parameters, and KV bytes a token.

They follow from its config.json: of a checkpoint directory, of a repository, or of the table below.
Knows no GPU and no load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

from disagg.config import ASSETS, SCALED_KV_BITS
from disagg.errors import ModelError
from disagg.kernels.packed_sizes import EIGHT_BIT_CHUNK, NVFP4_GROUP, Packing
from disagg.kv_groups import TILE_TOKENS, KVGroups, group_layers
from disagg.models.checkpoint import StoredTensor
from disagg.models.description import ModelDescription, describe_model
from disagg.models.hub import fetch_config, is_repository
from disagg.models.model_config import IndexConfig, ModelConfig
from disagg.models.packing import DeviceFormat, stated_tensors
from disagg.models.parts import Fields, layer_parts, outer_parts
from disagg.models.share import Share

# Formats of weights, and how their bits are kept. fp8 has one scale per matrix, or (fp8-block) per
# block of 128 x 128; fp4 (NVFP4) has an 8-bit scale per 16 values. The two vocabulary tables stay
# in 16 bits.
FORMATS: Mapping[str, Packing | None] = {
    "bf16": None,
    "fp8": Packing("fp8", None, 0),
    "fp8-block": Packing("fp8", None, 0),
    "fp4": Packing("nvfp4", NVFP4_GROUP, 1),
}
ITEMSIZE = 2
KV_BITS = {"bf16": (16, 0), **SCALED_KV_BITS}


@dataclass(frozen=True)
class ModelShape:
    """What a model costs.

    Norms and biases (< 0.1 %) do not count. `num_holders` of methods is the number of ranks that
    have whole experts. All are counted like the rank that has the most, or, because tokens choose
    experts at random, that reads or multiplies the most.

    Attributes:
        source: where the numbers come from.
        repository: the Hugging Face repository of a model of the table below, otherwise empty.
        num_gpus: number of GPUs that divide it. Each has some columns of the matrices that end
            attention and MLP, which may determine how their bits are kept.
        is_widened: whether no matrix stays quantised, as on a CPU.
    """

    name: str
    source: str
    config: ModelConfig
    repository: str = ""
    num_gpus: int = 1
    is_widened: bool = False

    @cached_property
    def num_layer_params(self) -> int:
        """Parameters with which a token is multiplied."""
        return self._num_common_params + self._num_chosen * self._num_params_per_expert

    @cached_property
    def num_head_params(self) -> int:
        """Parameters of the product that makes logits, only for the last token of a prompt."""
        return self.config.hidden_size * self.config.vocab_size

    @property
    def num_params(self) -> int:
        layers = self._num_common_params + self.num_experts * self._num_params_per_expert
        return layers + self._num_tables * self.num_head_params + self._num_looked_up_params

    def weights_nbytes(self, dtype: str, num_holders: int = 1) -> float:
        """Bytes of all weights on a device, stored as `dtype`, one of `FORMATS`."""
        most = -(-self.num_experts // num_holders)
        looked_up = self._num_looked_up_params * ITEMSIZE
        return self._nbytes(self._num_tables, num_holders * most, dtype) + looked_up

    @property
    def num_experts(self) -> int:
        """Experts of each layer that has experts; 0: all layers are dense."""
        return 0 if self.config.experts is None else self.config.experts.num_experts

    @property
    def latent_size(self) -> int:
        """KV values of a token in a layer with latent attention; 0: there are keys and values."""
        return 0 if self.config.latent is None else self.config.latent.cached_dim

    @property
    def head_dim(self) -> int:
        """Values of a head; with latents, the mean of the two products of a prompt."""
        latent = self.config.latent
        return self.config.head_dim if latent is None else (latent.key_dim + latent.rank) // 2

    @property
    def has_mxfp4_experts(self) -> bool:
        """Whether experts stay in MXFP4, whatever the format of the other weights is."""
        experts = self.config.experts
        return experts is not None and experts.is_mxfp4 and not self.is_widened

    @property
    def quantized(self) -> str:
        """The format of a quantised checkpoint; empty: it has floats, or only experts in MXFP4."""
        format = self.config.quantized
        return "" if format is None or self.has_mxfp4_experts else format.name

    @property
    def eight_bits(self) -> str:
        """The format of products in 8 bits, if the checkpoint quantises activations so: "fp8",
        "fp8-block" or "int8"; empty: there are none.

        Experts have none: in steps of `CHUNK_TOKENS` each of them has too few rows. Dense matrices
        have 8 bits from `EIGHT_BIT_ROWS` tokens on; fewer wait for their bytes in any format.
        """
        format = self.config.quantized
        if format is None or not format.inputs or self.num_experts or self.is_widened:
            return ""
        if format.num_columns is not None and format.num_columns % EIGHT_BIT_CHUNK:
            return ""
        return f"{format.kind}-block" if format.block else format.kind

    @property
    def is_packed(self) -> bool:
        """Whether matrices of a quantised checkpoint stay so."""
        return bool(self.quantized) and self._layers_nbytes["bf16"] != self._sizes(ITEMSIZE, {})

    @property
    def has_widened_experts(self) -> bool:
        """Whether only the experts of a quantised checkpoint are widened."""
        experts = self._layers_nbytes["bf16"][1], self._sizes(ITEMSIZE, {})[1]
        return self.is_packed and self.num_experts > 0 and experts[0] == experts[1]

    def value_nbytes(self, dtype: str) -> float:
        """Mean bytes of one value of the layers' matrices, without experts."""
        return self._layers_nbytes[dtype][0] / self._num_common_params

    def stored_as(self, dtype: str) -> str:
        """The format of the layers' matrices, for people."""
        stored = self.quantized if self.is_packed and dtype == "bf16" else dtype
        return f"{stored}, experts in MXFP4" if self.has_mxfp4_experts else stored

    def read_nbytes(self, num_tokens: int, dtype: str, num_holders: int = 1) -> float:
        """Bytes of the weights that a step of so many tokens reads.

        Experts that no token goes through are not read. Each token goes through its number of
        experts, as if they were drawn at random.
        """
        missed = 0.0
        if self.num_experts:
            missed = (1 - self._num_chosen / self.num_experts) ** max(num_tokens, 1)
        read = self.num_experts * (1 - missed)
        deviation = math.sqrt(read * missed / num_holders)
        most = read / num_holders + _above_mean(num_holders) * deviation
        return self._nbytes(1, min(num_holders * most, self.num_experts), dtype)

    def num_multiplied_params(self, num_tokens: int, num_holders: int = 1) -> float:
        """As `num_layer_params`, in a step of so many tokens."""
        if num_holders == 1 or not self.num_experts:
            return self.num_layer_params
        chosen, count = self._num_chosen, self.num_experts
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
        """FLOP of a decoding sequence for one latent that it attends to, for all heads."""
        latent = self.config.latent
        key_dim = 0 if latent is None else latent.key_dim
        return 4 * self.config.num_layers * self.config.num_heads * key_dim

    @property
    def index(self) -> IndexConfig | None:
        """What chooses the tokens that a query attends to; None: it attends to all."""
        return None if self.config.latent is None else self.config.latent.index

    @property
    def num_index_layers(self) -> int:
        """Layers that score all tokens of a context, to choose some."""
        index = self.index
        return 0 if index is None else self.config.num_layers - len(index.sharing_layers)

    @property
    def num_index_flop(self) -> int:
        """FLOP of a query for the score of one token, for all heads of the index."""
        index = self.index
        values = 0 if index is None else index.num_heads * index.head_dim
        return 2 * self.num_index_layers * values

    @property
    def _num_tables(self) -> int:
        return 1 if self.config.tie_word_embeddings else 2

    @property
    def _num_looked_up_params(self) -> int:
        """Parameters of the table with embeddings for layers, of which a step reads few rows."""
        altup = self.config.altup
        if altup is None:
            return 0
        return altup.embedding_rows * altup.embedding_size * self.config.num_layers

    @property
    def _num_chosen(self) -> int:
        """The number of experts that a token goes through."""
        return 0 if self.config.experts is None else self.config.experts.num_experts_per_tok

    @cached_property
    def _layers(self) -> list[tuple[int, Fields, Fields]]:
        """The dense layers and those with experts, with attention, with that to the KV of others
        and with delta nets: their number, and the matrices of one of them. Matrices outside the
        layers count as one more.

        They are the matrices of the model, and those of one of its GPUs.
        """
        config, alike = self.config, dict[tuple[bool, ...], list[int]]()
        for layer in range(config.num_layers):
            has_experts = config.experts_in(layer) is not None
            is_shared = config.kv_sources[layer] != layer
            kind = has_experts, layer in config.delta_layers, is_shared
            alike.setdefault(kind, []).append(layer)
        found = []
        for _, layers in sorted(alike.items()):
            shares = Share(), Share(0, self.num_gpus)
            whole, own = (_matrices(config, layers[0], share) for share in shares)
            found.append((len(layers), whole, own))
        outside = _multiplied_outside(config)
        return [*found, (1, outside, outside)]

    @property
    def _num_common_params(self) -> int:
        """Parameters of all layers without their experts."""
        return self._num_params[0]

    @property
    def _num_params_per_expert(self) -> int:
        """Parameters of one expert in each layer that has experts."""
        return self._num_params[1]

    @cached_property
    def _num_params(self) -> tuple[int, int]:
        return self._sizes(1, {})

    @cached_property
    def _layers_nbytes(self) -> Mapping[str, tuple[int, int]]:
        """By format, bytes of all layers without their experts, and of one expert of each layer."""
        found = {}
        for name, others in FORMATS.items():
            kept: dict[str, StoredTensor] = {}
            for _, whole, _ in () if self.is_widened else self._layers:
                kept |= stated_tensors(self.config, whole, others)
            found[name] = self._sizes(ITEMSIZE, kept)
        return found

    def _sizes(self, itemsize: int, kept: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """The same for floats of `itemsize` bytes, if `kept` stay quantised."""
        common, experts, format = 0, 0, DeviceFormat(itemsize, kept=kept)
        for number, whole, own in self._layers:
            packings = format.packings(own)
            for field, parts in whole.items():
                nbytes = number * format.nbytes(parts, packings.get(field))
                if "router" in whole and field in ("gate_up", "down"):
                    experts += nbytes
                else:
                    common += nbytes
        return common, experts // max(1, self.num_experts)

    def _nbytes(self, num_tables: int, num_experts: float, dtype: str) -> float:
        """Bytes of so many vocabulary tables, and of all layers with so many experts."""
        common, per_expert = self._layers_nbytes[dtype]
        tables = num_tables * self.num_head_params * ITEMSIZE
        return common + num_experts * per_expert + tables

    def kv_nbytes_per_token(
        self, dtype: str = "bf16", num_tokens: float = 0.0, *, is_read: bool = False
    ) -> int:
        """Bytes of the keys and values of all layers, with their scales.

        Args:
            is_read: counts what a layer reads of another's KV, too.
            num_tokens: the mean over a sequence of this length, whose windows keep only its last
                tokens, and which has one recurrent state. 0: of a token that all layers keep.
        """
        value_bits, scale_bits = KV_BITS[dtype]
        sources = range(self.config.num_layers) if is_read else self.config.kv_sources
        num_layers: float = self.config.num_kv_layers
        if is_read:
            num_layers = self.config.num_attending_layers
        states, state_nbytes = self.config.states, 0.0
        if states is not None and num_tokens > 0.0:
            state_nbytes = states.nbytes / num_tokens
        elif num_tokens > 0.0:
            layers, size = group_layers(self.config.sliding_windows, sources), TILE_TOKENS
            num_blocks = KVGroups(layers.windows, size).num_needed(math.ceil(num_tokens))
            num_layers = min(num_layers, num_blocks * size * layers.num_layers / num_tokens)
        vector_nbytes = (self.config.head_dim * value_bits + scale_bits) // 8
        num_vectors = self.config.num_vectors
        kv_nbytes = num_layers * num_vectors * self.config.num_kv_heads * vector_nbytes
        return int(kv_nbytes + state_nbytes)


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
    return ModelShape(model.name, model.source, model.config)


def _multiplied_outside(config: ModelConfig) -> Fields:
    """The matrices outside the layers with which a token is multiplied, but the vocabulary's."""
    looked_up = "embedding", "lm_head", "altup.table"
    fields = {
        field: parts for field, parts in outer_parts(config).items() if field not in looked_up
    }
    return {field: parts for field, parts in fields.items() if len(parts[0].shape) == 2}


def _matrices(config: ModelConfig, layer: int, share: Share) -> Fields:
    fields = layer_parts(config, layer, share)
    return {field: parts for field, parts in fields.items() if len(parts[0].shape) == 2}


_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def _known(
    name: str, repository: str, architecture: str, numbers: tuple[int | None, ...], **more: Any
) -> ModelShape:
    """numbers: the values of `_KEYS`. more: further keys of config.json."""
    source = f"config.json of {repository} on Hugging Face"
    stated = {key: value for key, value in zip(_KEYS, numbers, strict=True) if value is not None}
    raw = {"architectures": [f"{architecture}ForCausalLM"], **stated, **more}
    return ModelShape(name, source, ModelConfig.from_hf(raw, source), repository)


_DEEPSEEK = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
}
# layers, hidden, intermediate, heads, KV heads, head size, vocabulary, longest context
SHAPES = {
    shape.name: shape
    for shape in (
        _known("llama-2-7b", "meta-llama/Llama-2-7b-hf", "Llama",
               (32, 4096, 11008, 32, 32, 128, 32000, 4096)),
        _known("llama-2-13b", "meta-llama/Llama-2-13b-hf", "Llama",
               (40, 5120, 13824, 40, 40, 128, 32000, 4096)),
        _known("llama-2-70b", "meta-llama/Llama-2-70b-hf", "Llama",
               (80, 8192, 28672, 64, 8, 128, 32000, 4096)),
        _known("llama-3-8b", "meta-llama/Meta-Llama-3-8B", "Llama",
               (32, 4096, 14336, 32, 8, 128, 128256, 8192)),
        _known("llama-3-70b", "meta-llama/Meta-Llama-3-70B", "Llama",
               (80, 8192, 28672, 64, 8, 128, 128256, 8192)),
        _known("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "Llama",
               (32, 4096, 14336, 32, 8, 128, 128256, 131072)),
        _known("llama-3.1-70b", "meta-llama/Llama-3.1-70B", "Llama",
               (80, 8192, 28672, 64, 8, 128, 128256, 131072)),
        _known("llama-3.1-405b", "meta-llama/Llama-3.1-405B", "Llama",
               (126, 16384, 53248, 128, 8, 128, 128256, 131072)),
        _known("mistral-7b", "mistralai/Mistral-7B-v0.3", "Mistral",
               (32, 4096, 14336, 32, 8, 128, 32768, 32768), sliding_window=None),
        _known("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "Qwen2",
               (28, 3584, 18944, 28, 4, 128, 152064, 32768)),
        _known("qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct", "Qwen2",
               (80, 8192, 29568, 64, 8, 128, 152064, 32768)),
        _known("qwen3-0.6b", "Qwen/Qwen3-0.6B", "Qwen3",
               (28, 1024, 3072, 16, 8, 128, 151936, 40960), tie_word_embeddings=True),
        _known("qwen3-8b", "Qwen/Qwen3-8B", "Qwen3",
               (36, 4096, 12288, 32, 8, 128, 151936, 40960)),
        _known("qwen3-14b", "Qwen/Qwen3-14B", "Qwen3",
               (40, 5120, 17408, 40, 8, 128, 151936, 40960)),
        _known("qwen3-32b", "Qwen/Qwen3-32B", "Qwen3",
               (64, 5120, 25600, 64, 8, 128, 151936, 40960)),
        _known("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral",
               (32, 4096, 14336, 32, 8, 128, 32000, 32768), num_local_experts=8),
        _known("qwen1.5-moe-a2.7b", "Qwen/Qwen1.5-MoE-A2.7B", "Qwen2Moe",
               (24, 2048, 5632, 16, 16, 128, 151936, 8192), num_experts=60,
               moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
        _known("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "Qwen3Moe",
               (48, 2048, 6144, 32, 4, 128, 151936, 40960), num_experts=128,
               moe_intermediate_size=768),
        _known("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "Qwen3Moe",
               (94, 4096, 12288, 64, 4, 128, 151936, 40960), num_experts=128,
               moe_intermediate_size=1536),
        _known("gpt-oss-20b", "openai/gpt-oss-20b", "GptOss",
               (24, 2880, 2880, 64, 8, 64, 201088, 131072), num_local_experts=32,
               quantization_config={"quant_method": "mxfp4"}),
        _known("gpt-oss-120b", "openai/gpt-oss-120b", "GptOss",
               (36, 2880, 2880, 64, 8, 64, 201088, 131072), num_local_experts=128,
               quantization_config={"quant_method": "mxfp4"}),
        _known("deepseek-r1", "deepseek-ai/DeepSeek-R1", "DeepseekV3",
               (61, 7168, 18432, 128, None, None, 129280, 163840), n_routed_experts=256,
               **_DEEPSEEK),
        _known("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2", "DeepseekV32",
               (61, 7168, 18432, 128, None, None, 129280, 163840), n_routed_experts=256,
               **_DEEPSEEK),
        _known("kimi-k2", "moonshotai/Kimi-K2-Instruct", "DeepseekV3",
               (61, 7168, 18432, 64, 64, None, 163840, 131072), n_routed_experts=384,
               first_k_dense_replace=1, n_group=1, topk_group=1, **_DEEPSEEK),
    )
}  # fmt: skip
