"""SentencePiece tokenizers of GGUF files encode and decode as the library itself does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from disagg.errors import ModelError
from disagg.models.description import describe_model
from disagg.text.detokenizer import TextStream
from disagg.text.tokenizer import Tokenizer
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf import small_model

TEXTS = [
    "Hello, world",
    "  two spaces,  and a  third",
    " a leading space",
    "",
    "numbers 1234567890 and tabs\tand\nlines\n\n",
    "naïve café — 東京, Ελληνικά, 🚀🚀",
    "the the thethe theatre of the absurd",
]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Numbers like 12 and 345 are words of digits in the text of the corpus.",
    "Hello world, hello there; the theatre is over there and the text is here.",
    "two spaces, a third, and some more words that lead to a naïve café",
] * 20


@pytest.fixture(scope="module")
def trained() -> Any:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.99,
        user_defined_symbols=["<tool>"],
        control_symbols=["[INST]"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def settings_of(trained: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes them."""
    numbers = range(trained.get_piece_size())

    def kind(number: int) -> int:
        for which, is_one in enumerate(
            (trained.is_unknown, trained.is_control, None, trained.is_unused, trained.is_byte), 2
        ):
            if is_one is not None and is_one(number):
                return which
        return 4 if trained.id_to_piece(number) == "<tool>" else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": [trained.id_to_piece(number) for number in numbers],
        "tokenizer.ggml.scores": [trained.get_score(number) for number in numbers],
        "tokenizer.ggml.token_type": [kind(number) for number in numbers],
        "tokenizer.ggml.bos_token_id": trained.bos_id(),
        "tokenizer.ggml.eos_token_id": trained.eos_id(),
        "tokenizer.ggml.unknown_token_id": trained.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
    }


def _read(trained: Any, tmp_path: Path, **changes: Any) -> Tokenizer:
    model = small_model(vocab_size=trained.get_piece_size())
    file = write_gguf(tmp_path / "m.gguf", model, settings={**settings_of(trained), **changes})
    return Tokenizer.from_json(describe_model(file).read_tokenizer(), "m")


def test_texts_are_cut_and_come_back_as_by_the_library(trained: Any, tmp_path: Path) -> None:
    ours = _read(trained, tmp_path)
    for text in TEXTS:
        wanted = trained.encode(text)
        assert ours.encode(text, add_special_tokens=False) == wanted, text
        assert ours.encode(text, add_special_tokens=True) == [trained.bos_id(), *wanted]
        stream = TextStream(ours)
        streamed = "".join(stream.push(token) for token in wanted) + stream.flush()
        assert streamed.strip(" ") == trained.decode(wanted).strip(" ") == text.strip(" ")
    assert ours.encode("<tool>", add_special_tokens=False) == [trained.piece_to_id("<tool>")]
    assert ours.encode("[INST]", add_special_tokens=False) == [trained.piece_to_id("[INST]")]


def test_a_file_without_scores_is_refused(trained: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not have a score for each token"):
        _read(trained, tmp_path, **{"tokenizer.ggml.scores": [0.5]})
