"""Llama checkpoints that every peer reads, with a tokenizer of one word a token.

Weights are random, except in "smollm2", which is SmolLM2-135M-Instruct, widened to bf16.
"""

from __future__ import annotations

from pathlib import Path

from bench.peers.environments import ENVIRONMENTS
from bench.peers.limits import MAX_MODEL_LEN
from bench.shapes import SHAPES, transformers_config
from disagg.models.fetched import cached_file, fetch

SMOLLM2 = "smollm2"
WORD = "~"  # begins every word and is nowhere else, so a client counts tokens by it


def write(shape: str, directory: Path) -> Path:
    """The checkpoint, and what servers need beside it."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    vocabulary = {f"{WORD}{number}": number for number in range(SHAPES[shape][0])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=f"{WORD}0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # Of its words none is special to a server, which would leave it out of the text.
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    if shape == SMOLLM2:
        return _write_smollm2(directory)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers_config(shape, MAX_MODEL_LEN)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def _write_smollm2(directory: Path) -> Path:
    """Its GGUF file as transformers has such models; as random ones, without an end of answers."""
    import gguf
    import torch
    import transformers

    fetch(SMOLLM2, lambda event, message, **fields: print(message, flush=True), lambda: False)
    config = transformers_config(SMOLLM2, MAX_MODEL_LEN)
    config.tie_word_embeddings, config.rms_norm_eps = True, 1e-5
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100000.0}
    model = transformers.LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {each.name: each for each in gguf.GGUFReader(cached_file(SMOLLM2)).tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored[names.get_name(name, try_suffixes=(".weight",)) or name]
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            num_heads = heads.get(name.split(".")[-2])
            if num_heads:  # pairs of neighbours become halves of a head
                pairs = values.reshape(num_heads, config.head_dim // 2, 2, -1)
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            parameter.copy_(torch.from_numpy(values.copy()))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def kept(shape: str) -> Path:
    """The checkpoint, always at the same place: vLLM finds what it compiled by the path."""
    return write(shape, ENVIRONMENTS / "checkpoints" / shape)
