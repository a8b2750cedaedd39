"""Models of different families cannot form a cascade, and are told why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tokenizers

from disagg.api.served_model import ServedModel, auto_model, check_one_language
from disagg.errors import ModelError
from disagg.models.description import GenerationDefaults
from disagg.text.chat_template import ChatTemplate
from disagg.text.tokenizer import Tokenizer
from tests.api.fakes import CHATML, byte_fallback_core, byte_level_core, served_model


def changed(**fields: Any) -> ServedModel:
    return dataclasses.replace(served_model("large"), **fields)


def renamed_token() -> Tokenizer:
    """As many tokens, one of which is another."""
    text = byte_level_core().to_str()
    return Tokenizer(tokenizers.Tokenizer.from_str(text.replace("<|endoftext|>", "<|pad|>")))


def other_split() -> Tokenizer:
    """The same tokens, found in another way."""
    core = byte_level_core()
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    return Tokenizer(core)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (changed(tokenizer=Tokenizer(byte_fallback_core())), "tokenizers differ, with 298 and 261"),
        (changed(tokenizer=renamed_token()), "tokenizers differ"),
        (changed(tokenizer=other_split()), "tokenizers differ"),
        (changed(eos_token_ids=(2, 0)), r"end with different tokens, \[2\] and \[0, 2\]"),
        (changed(template=None), "chat templates differ"),
        (changed(template=ChatTemplate(CHATML + " ", {})), "chat templates differ"),
        (changed(template=ChatTemplate(CHATML, {"bos_token": "x"})), "chat templates differ"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_tiers_that_cannot_read_each_other_are_refused(other: ServedModel, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as refused:
        check_one_language([served_model("tiny"), served_model("small"), other])
    assert "'small' and 'large' cannot form a cascade" in refused.value.message


def test_models_of_one_family_are_one_language() -> None:
    same = Tokenizer(tokenizers.Tokenizer.from_str(byte_level_core().to_str()))
    other = changed(tokenizer=same, eos_token_ids=(2,), template=ChatTemplate(CHATML, {}))
    check_one_language([served_model("small"), other])


def test_auto_has_the_tightest_limits_and_the_largest_models_defaults() -> None:
    small = served_model("small", max_model_len=300)
    large = changed(vocab_size=200, defaults=GenerationDefaults(temperature=0.6))
    auto = auto_model([small, large])
    assert (auto.name, auto.max_model_len, auto.vocab_size) == ("auto", 300, 200)
    assert auto.defaults.temperature == 0.6
