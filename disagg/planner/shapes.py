"""The numbers of a model that decide what serving it costs: parameters, and KV bytes a token.

Shapes come from a checkpoint directory or from the table below. Knows no GPU and no load.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from disagg.config import SCALED_KV_BITS
from disagg.errors import ModelError
from disagg.models.description import ModelDescription, describe_model

NBYTES = {"bf16": 2, "fp8": 1}  # of one value of a weight
KV_BITS = {"bf16": (16, 0), **SCALED_KV_BITS}


class ModelShape(msgspec.Struct, frozen=True):
    """A decoder with grouped-query attention and a gated MLP: Llama, Mistral, Qwen2 and Qwen3.

    `source` says where the numbers are from.
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

    @property
    def num_layer_params(self) -> int:
        """Of the matrix products that every token goes through; norms and biases are < 0.1 %."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_params(self) -> int:
        """Of the product that makes logits: of a prompt, only its last token goes through it."""
        return self.hidden_size * self.vocab_size

    @property
    def num_params(self) -> int:
        num_tables = 1 if self.tie_word_embeddings else 2
        return self.num_layer_params + num_tables * self.num_head_params

    def kv_nbytes_per_token(self, dtype: str = "bf16") -> int:
        """Keys and values of all layers, with their scales."""
        value_bits, scale_bits = KV_BITS[dtype]
        vector_nbytes = (self.head_dim * value_bits + scale_bits) // 8
        return 2 * self.num_layers * self.num_kv_heads * vector_nbytes


def read_shape(name_or_directory: str) -> ModelShape:
    """The shape of a name of `SHAPES`, or of a directory with a config.json.

    Raises:
        ModelError: it is neither, or the directory holds a model that is not supported.
    """
    if name_or_directory in SHAPES:
        return SHAPES[name_or_directory]
    if not Path(name_or_directory).exists():
        raise ModelError(
            f"{name_or_directory} is neither a model directory, nor a GGUF file, nor one of the"
            f" known models: {', '.join(SHAPES)}.",
            param="model",
        )
    return shape_of(describe_model(name_or_directory))


def shape_of(model: ModelDescription) -> ModelShape:
    numbers = {name: getattr(model.config, name) for name in ModelShape.__struct_fields__[2:]}
    return ModelShape(model.name, model.source, **numbers)


Numbers = tuple[int, int, int, int, int, int, int, int]


def _known(name: str, repository: str, numbers: Numbers, tied: bool = False) -> ModelShape:
    return ModelShape(name, f"config.json of {repository} on Hugging Face", *numbers, tied)


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
    )
}  # fmt: skip
