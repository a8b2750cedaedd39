"""Write and read a demo model as a model folder that transformers and disagg load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.demo_model import Decoder, ModelShape
from training.demo_tokenizer import IM_END_ID, PAD_ID, save_tokenizer

PREFIX = "model."
EMBEDDING = "embed_tokens.weight"


def export(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights (bfloat16) and tokenizer into `folder`.

    The output matrix is the embedding, so it is not written a second time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        PREFIX + name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"do_sample": False, "eos_token_id": IM_END_ID, "pad_token_id": PAD_ID}
    for name, content in (("config", model.shape.hf_config()), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)


def load_exported(shape: ModelShape, folder: Path) -> Decoder:
    """Return the exported model with float32 parameters that hold its bfloat16 values."""
    weights = load_file(folder / "model.safetensors")
    model = Decoder(shape)
    model.load_state_dict({name.removeprefix(PREFIX): w.float() for name, w in weights.items()})
    return model


@torch.no_grad()
def widened(model: Decoder, tokenizer: Tokenizer, shape: ModelShape, wide: Tokenizer) -> Decoder:
    """Return the model with the vocabulary of `wide`, which extends that of `tokenizer`.

    A new token begins as the mean of the tokens that its text had before.
    """
    result = Decoder(shape)
    result.load_state_dict(model.state_dict() | {EMBEDDING: result.embed_tokens.weight})
    known = model.embed_tokens.weight
    for token_id in range(len(known), shape.vocab_size):
        parts = tokenizer.encode(wide.decode([token_id])).ids
        result.embed_tokens.weight[token_id] = known[parts].mean(0)
    result.embed_tokens.weight[: len(known)] = known
    return result
