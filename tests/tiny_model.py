"""A small random checkpoint with a real tokenizer and chat template, written by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from disagg.config import ServeConfig, TierConfig
from disagg.kvtransfer.local_transport import LocalFleet
from disagg.time_model import StepTimeModel
from disagg.worker.parts import Parts, build_parts

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(directory: Path, *, max_model_len: int = 512, seed: int = 0) -> Path:
    """A Qwen3 in float32 whose vocabulary is the 256 bytes and three special tokens.

    Small, but with prompts that cost more than to hand their KV over: routers send them to prefill
    workers of `tiny_parts`. Hence few layers, as each has KV, and wide ones, which cost most.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    end_id = write_tiny_tokenizer(directory)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=True,
        eos_token_id=end_id,
        initializer_range=0.3,  # far from uniform, so that a wrong KV block changes the answer
    )
    Qwen3ForCausalLM(config).eval().save_pretrained(directory)
    return directory


def tiny_parts() -> Callable[..., Parts]:
    """Builds workers of one cluster in this process.

    They do not believe their first steps, whose times say how busy this machine was just then: one
    that seemed twice as slow as the others would get no prompt.
    """
    fleet = LocalFleet()

    def build(
        config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int, **options: Any
    ) -> Parts:
        built = build_parts(config, tier, worker_id, epoch, fleet, **options)
        return replace(built, first_times=StepTimeModel())

    return build


def write_tiny_tokenizer(directory: Path) -> int:
    """The model's tokenizer and chat template alone. Returns the token that ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return len(vocab) + 1
