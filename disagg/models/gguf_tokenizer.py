"""The tokenizer of a GGUF file, as the `tokenizer.json` that transformers has for the same model.

A GGUF file holds tokens, merges and the name of a rule that cuts text into words; the rules
themselves lie in whoever reads it. Those known here are byte-level, as each model's own
`tokenizer.json` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.errors import ModelError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # types of tokens

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut_by(pattern: str) -> list[dict[str, Any]]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [cut, {**_BYTES, "use_regex": False}]


_CUTS: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [{**_BYTES, "use_regex": True}],
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {**_BYTES, "use_regex": True},
    ],
    "llama-bpe": _cut_by(_WORDS % "{1,3}"),
    "qwen2": _cut_by(_WORDS % ""),
}
_WITH_BOS = ("llama-bpe",)  # where the file does not say


def tokenizer_json(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """
    Raises:
        ModelError: the tokenizer is of a kind that is not known here, or incomplete.
    """
    model, rule = (str(settings.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    if model != "gpt2" or rule not in _CUTS:
        raise ModelError(
            f"{file} has a tokenizer of model {model!r} that cuts words by {rule!r}; supported is"
            f" model 'gpt2' with {', '.join(_CUTS)}. Others are served from a Hugging Face"
            " directory with its tokenizer.json"
        )
    tokens, merges = settings.get("tokenizer.ggml.tokens"), settings.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelError(f"{file} has no tokenizer.ggml.tokens or no tokenizer.ggml.merges")
    types = settings.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{file} has {len(tokens)} tokens and {len(types)} types of tokens")
    added = [
        {
            "id": number,
            "content": tokens[number],
            "special": kind == _CONTROL,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[rule]},
        "post_processor": _ends(settings, tokens, rule),
        "decoder": {**_BYTES, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule == "llama-bpe",
            # Unused ones only fill a table up to its size.
            "vocab": {
                token: number for number, token in enumerate(tokens) if types[number] != _UNUSED
            },
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def token_of(settings: Mapping[str, Any], role: str, file: Path) -> tuple[int, str] | None:
    """The token that a file names for `role`, as "eos"; None where it names none.

    Raises:
        ModelError: there is no such token.
    """
    number = settings.get(f"tokenizer.ggml.{role}_token_id")
    if number is None:
        return None
    tokens = settings.get("tokenizer.ggml.tokens") or []
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ModelError(
            f"{file} is damaged: tokenizer.ggml.{role}_token_id is {number!r}, and it has"
            f" {len(tokens)} tokens"
        )
    return number, tokens[number]


def _ends(settings: Mapping[str, Any], tokens: list[str], rule: str) -> dict[str, Any] | None:
    """What is put around a prompt."""
    roles = {
        "bos": settings.get("tokenizer.ggml.add_bos_token", rule in _WITH_BOS),
        "eos": settings.get("tokenizer.ggml.add_eos_token", False),
    }
    special, pieces = {}, {}
    for role, is_added in roles.items():
        number = settings.get(f"tokenizer.ggml.{role}_token_id")
        if is_added and number is not None and number < len(tokens):
            token = tokens[number]
            special[token] = {"id": token, "ids": [number], "tokens": [token]}
            pieces[role] = {"SpecialToken": {"id": token, "type_id": 0}}
    if not special:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [each for each in (pieces.get("bos"), text, pieces.get("eos")) if each]
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second],
        "special_tokens": special,
    }
