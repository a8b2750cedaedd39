"""Write and read a demo model as a model folder that transformers and disagg load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from scripts.demo_model import Decoder, ModelShape
from scripts.demo_tokenizer import IM_END_ID, PAD_ID, save_tokenizer

PREFIX = "model."


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
