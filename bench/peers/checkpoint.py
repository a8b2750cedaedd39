"""Random Llama checkpoints that every peer reads, with a tokenizer of one word a token."""

from __future__ import annotations

from pathlib import Path

from bench.engine import write_checkpoint
from bench.peers.environments import ENVIRONMENTS
from bench.shapes import SHAPES

WORD = "~"  # begins every word and is nowhere else, so a client counts tokens by it


def write(shape: str, directory: Path) -> Path:
    """The checkpoint of `bench.engine`, and what servers need beside it."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    vocabulary = {f"{WORD}{number}": number for number in range(SHAPES[shape][0])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=f"{WORD}0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # Of its words none is special to a server, which would leave it out of the text.
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return write_checkpoint(shape, directory)


def kept(shape: str) -> Path:
    """The checkpoint, always at the same place: vLLM finds what it compiled by the path."""
    return write(shape, ENVIRONMENTS / "checkpoints" / shape)
