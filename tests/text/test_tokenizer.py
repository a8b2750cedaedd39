from __future__ import annotations

from unittest import mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from disagg.errors import ModelError
from disagg.text.tokenizer import BREAK, Tokenizer
from tests.api.fakes import END, TOKENIZER, byte_fallback_core, byte_level_core

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FALLBACK_IDS = byte_fallback_core().get_vocab()
HOSTILE = st.lists(
    st.sampled_from([*CONTROL, BREAK, "<|im_", "end|>", "<", "|>", "hi", "<<|im_end|>"]),
    max_size=12,
).map("".join)


@given(HOSTILE)
def test_shielded_text_never_becomes_a_control_token(text: str) -> None:
    token_ids = TOKENIZER.encode_chat(TOKENIZER.shield(text))
    assert not TOKENIZER.special_ids & set(token_ids)
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == text.replace(BREAK, "")


@given(st.text(max_size=50))
def test_shielding_changes_nothing_else(text: str) -> None:
    if any(token in text for token in [*CONTROL, BREAK]):
        return
    assert TOKENIZER.encode_chat(TOKENIZER.shield(text)) == TOKENIZER.encode(
        text, add_special_tokens=False
    )


@given(
    st.lists(st.text("ab<|>", min_size=2, max_size=6), max_size=8, unique=True),
    st.text("ab<|>", max_size=40),
)
def test_every_control_token_is_broken_whatever_they_share(tokens: list[str], text: str) -> None:
    core = tokenizers.Tokenizer(models.BPE())
    core.add_special_tokens(tokens)
    shielded = Tokenizer(core).shield(text)
    with mock.patch("disagg.text.tokenizer.SHIELDED_NUM_CHARS", 3):
        assert Tokenizer(core).shield(text) == shielded  # in parts, as long texts are
    assert not any(token in shielded for token in tokens)
    assert shielded.replace(BREAK, "") == text
    assert (BREAK in shielded) == any(token in text for token in tokens)


def test_control_tokens_of_the_template_itself_count() -> None:
    rendered = "<|im_start|>user\n" + TOKENIZER.shield("a<|im_end|>b") + "<|im_end|>"
    token_ids = TOKENIZER.encode_chat(rendered)
    assert token_ids.count(END) == 1
    assert token_ids[-1] == END


def test_prompts_are_taken_as_they_stand() -> None:
    assert END in TOKENIZER.encode("a<|im_end|>", add_special_tokens=False)


@given(st.binary(max_size=8))
def test_every_byte_has_a_token_that_names_it(raw: bytes) -> None:
    ids = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.num_ids)}
    assert all(bytes([byte]) in ids for byte in raw)


def test_token_texts() -> None:
    texts = {TOKENIZER.token_text(i) for i in range(TOKENIZER.num_ids)}
    assert {" quick", "<|im_end|>", "bytes:\\xff", "a"} <= texts
    fallback = Tokenizer(byte_fallback_core())
    assert fallback.token_bytes(FALLBACK_IDS["▁hello"]) == b" hello"
    assert fallback.token_bytes(FALLBACK_IDS["<0xE2>"]) == b"\xe2"
    assert fallback.token_bytes(10**6) == b""


def test_many_ids_are_decoded_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = [
        *TOKENIZER.encode("the fox, \u65e5\u672c\ud7ff\n" * 10, add_special_tokens=True),
        END,
        0,
    ]
    few = [TOKENIZER.decode(token_ids, skip_special_tokens=skip) for skip in (True, False)]
    monkeypatch.setattr("disagg.text.tokenizer.FEW_IDS", 0)
    assert few == [TOKENIZER.decode(token_ids, skip_special_tokens=skip) for skip in (True, False)]


@pytest.mark.parametrize("text", ["the fox ", "a", "\u65e5", " \n", "<|im_end|>"])
def test_a_text_is_counted_no_further_than_it_takes(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("disagg.text.tokenizer.PIECE_NUM_CHARS", 1000)
    text *= 4000
    num_tokens = len(TOKENIZER.encode(text, add_special_tokens=False))
    assert TOKENIZER.has_more_tokens(text, num_tokens // 2)
    assert not TOKENIZER.has_more_tokens(text, num_tokens)
    read = []

    class Core:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> list[list[int]]:
            read.extend(texts)
            return [list(range(len(texts[0])))]

    counted = Tokenizer(TOKENIZER.core)
    counted.core = Core()  # type: ignore[assignment]
    assert counted.has_more_tokens(text, 1000)
    assert sum(map(len, read)) <= 3000


def test_files() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json of m is invalid"):
        Tokenizer.from_json("{}", "m")
    assert Tokenizer.from_json(byte_level_core().to_str(), "m").num_ids == TOKENIZER.num_ids


def test_a_file_that_truncates_does_not_truncate_here() -> None:
    core = byte_level_core()
    core.enable_truncation(4)
    core.enable_padding(length=8)
    text = "the quick brown fox jumps over"
    tokenizer = Tokenizer.from_json(core.to_str(), "m")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
