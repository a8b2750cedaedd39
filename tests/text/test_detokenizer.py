from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from disagg.text.detokenizer import Detokenizer, TextStream
from disagg.text.tokenizer import Tokenizer
from tests.api.fakes import END, TOKENIZER, byte_fallback_core

BYTE_FALLBACK = Tokenizer(byte_fallback_core())
ID_OF_BYTE = {
    raw[0]: token_id
    for token_id in range(TOKENIZER.num_ids)
    if len(raw := TOKENIZER.token_bytes(token_id)) == 1
}
TEXTS = st.text(max_size=40) | st.text("the quick brown 😀é漢\n", max_size=60)
ANY_IDS = st.lists(st.integers(0, TOKENIZER.num_ids - 1), max_size=60)


def shown(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """The pieces a client would see, one per token and one at the end."""
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.found is not None:
            return pieces
    return [*pieces, detokenizer.finish()]


def cut_by_definition(text: str, stops: list[str], include: bool) -> str:
    """Character by character: the first stop string to be complete, the longest of equals."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[:end] if include else text[: end - max(map(len, ending))]
    return text


@given(TEXTS)
def test_text_comes_back(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert "".join(shown(Detokenizer(TOKENIZER), token_ids)) == TOKENIZER.decode(token_ids)


@given(ANY_IDS, st.booleans())
def test_any_ids_give_what_decoding_them_at_once_gives(token_ids: list[int], skip: bool) -> None:
    pieces = shown(Detokenizer(TOKENIZER, skip_special_tokens=skip), token_ids)
    assert "".join(pieces) == TOKENIZER.decode(token_ids, skip_special_tokens=skip)


@given(TEXTS)
def test_no_piece_holds_half_a_code_point(text: str) -> None:
    text = text.replace("\ufffd", "")
    token_ids = [
        token_id
        for byte in text.encode()
        for token_id in [
            next(i for i in range(3, 259) if TOKENIZER.token_bytes(i) == bytes([byte]))
        ]
    ]
    pieces = shown(Detokenizer(TOKENIZER), token_ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("text", ["hello world", "hello 😀 world", "😀", "ihello"])
def test_byte_fallback_tokens_become_characters(text: str) -> None:
    vocab = BYTE_FALLBACK.core.get_vocab()
    token_ids: list[int] = []
    for word in text.split(" "):
        if f"▁{word}" in vocab:
            token_ids.append(vocab[f"▁{word}"])
        else:
            token_ids.append(vocab["▁"])
            token_ids += [vocab[f"<0x{byte:02X}>"] for byte in word.encode()]
    assert "".join(shown(Detokenizer(BYTE_FALLBACK), token_ids)) == text


@given(st.lists(st.integers(0, BYTE_FALLBACK.num_ids - 1), max_size=40))
def test_byte_fallback_never_fails_and_loses_no_word(token_ids: list[int]) -> None:
    """A broken run of bytes may change text that is out already, so only words are compared."""
    text = "".join(shown(Detokenizer(BYTE_FALLBACK), token_ids))
    whole = BYTE_FALLBACK.decode(token_ids)
    assert text.count("hello") == whole.count("hello")
    if "\ufffd" not in text + whole:
        assert text == whole


@given(ANY_IDS, st.booleans())
def test_each_push_gives_what_the_stream_of_the_library_gives(
    token_ids: list[int], skip: bool
) -> None:
    """Although tokens of whole code points do not go through it."""
    ours, theirs = TextStream(TOKENIZER, skip_special_tokens=skip), DecodeStream([], skip)
    for token_id in token_ids:
        try:
            expected = theirs.step(TOKENIZER.core, token_id) or ""
        except Exception:  # a token changes text that was returned: the library cannot go on
            return
        assert ours.push(token_id) == expected


def test_tokens_of_whole_code_points_of_byte_level_tokenizers_are_remembered() -> None:
    texts = TOKENIZER.whole_texts
    assert [texts[each] for each in TOKENIZER.encode(" fox", add_special_tokens=False)] == [" fox"]
    added = next(iter(TOKENIZER.special_ids))
    assert (texts[added], texts[ID_OF_BYTE[0xFF]], texts[TOKENIZER.num_ids]) == ("", "", "")


def test_output_that_never_becomes_text_is_not_held_for_ever() -> None:
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(ID_OF_BYTE[0xFF]) for _ in range(1000)]
    assert sum(map(len, pieces)) >= 700
    assert "".join(pieces) + stream.flush() == "\ufffd" * 1000


def test_long_runs_of_hidden_tokens_hold_nothing() -> None:
    stream = TextStream(TOKENIZER)
    assert "".join(stream.push(END) for _ in range(1000)) == ""
    word = TOKENIZER.encode("fox", add_special_tokens=False)
    assert "".join(map(stream.push, word)) + stream.flush() == "fox"


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_stops_cut_at_the_same_place_however_the_text_arrives(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    watch = Detokenizer(TOKENIZER, stops=stops, include_stop=include, num_unchecked=-1)
    out = ""
    for piece in pieces:
        out += watch.until_stop(piece)
        assert len(out) <= len(cut_by_definition(text, stops, include))
        if watch.found is not None:
            break
    else:
        out += watch.held()
    assert out == cut_by_definition(text, stops, include)
    assert (watch.found is not None) == any(stop in text for stop in stops)


@given(TEXTS, st.data())
def test_a_stop_string_anywhere_in_a_text_ends_it(text: str, data: st.DataObject) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    text = TOKENIZER.decode(token_ids)
    if not text:
        return
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, min(len(text), start + 8)))]
    detokenizer = Detokenizer(TOKENIZER, stops=[stop])
    assert "".join(shown(detokenizer, token_ids)) == text[: text.index(stop)]
    assert detokenizer.found == stop


def test_only_text_that_may_begin_a_stop_string_is_held() -> None:
    watch = Detokenizer(TOKENIZER, stops=["</answer>"], num_unchecked=-1)
    assert watch.until_stop("one <") == "one "
    assert watch.until_stop("b> two </ans") == "<b> two "
    assert watch.until_stop("wer") == ""
    assert watch.until_stop("s") == "</answers"


def test_minimum_length_shields_the_first_tokens_from_stop_strings() -> None:
    token_ids = TOKENIZER.encode("fox fox fox", add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER, stops=["fox"], num_unchecked=len(token_ids) - 1)
    assert "".join(shown(detokenizer, token_ids)).startswith("fox fox")
    assert detokenizer.found == "fox"


def test_offsets_count_held_text() -> None:
    detokenizer = Detokenizer(TOKENIZER, stops=["quick brown"])
    offsets = []
    for token_id in TOKENIZER.encode("the quick fox", add_special_tokens=False):
        offsets.append(detokenizer.num_chars)
        detokenizer.push(token_id)
    assert offsets[:3] == [0, 3, 9]
