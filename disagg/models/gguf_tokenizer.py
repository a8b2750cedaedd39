"""Converts the tokenizer of a GGUF file to a `tokenizer.json` as transformers has it.

A GGUF file has tokens, merges and the name of a rule that splits text into words. The rules
themselves must be in the reader. This reader knows byte-level rules, copied from each model's own
`tokenizer.json`, and SentencePiece (Llama 2, Mistral), which has scores instead of merges.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens
_SPACE = "▁"  # SentencePiece's symbol for a space
_END_OF_TURN = "<end_of_turn>"

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
_WITH_BOS = ("llama-bpe",)  # rules that add a BOS token if the file does not say it


def tokenizer_json(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Make the contents of tokenizer.json.

    Raises:
        ModelError: the kind of tokenizer is not supported, or it is incomplete.
    """
    model, rule = (str(settings.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    if model == "llama":
        return _sentencepiece(settings, file)
    if model != "gpt2" or rule not in _CUTS:
        raise ModelError(
            f"{file} has a tokenizer of model {model!r} that splits words by {rule!r}; supported"
            f" are model 'gpt2' with {', '.join(_CUTS)}, and model 'llama'. For other tokenizers,"
            " serve a Hugging Face directory with tokenizer.json"
        )
    tokens, merges = settings.get("tokenizer.ggml.tokens"), settings.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelError(f"{file} has no tokenizer.ggml.tokens or no tokenizer.ggml.merges")
    types = _types(settings, tokens, file)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[rule]},
        "post_processor": _ends(settings, tokens, has_bos=rule in _WITH_BOS),
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
            # Unused tokens only pad the vocabulary to its size.
            "vocab": {
                token: number for number, token in enumerate(tokens) if types[number] != _UNUSED
            },
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def token_of(settings: Mapping[str, Any], role: str, file: Path) -> tuple[int, str] | None:
    """The token that a file names for a role such as "eos"; None if it names none.

    Raises:
        ModelError: the named token does not exist.
    """
    number = settings.get(f"tokenizer.ggml.{role}_token_id")
    if number is None:
        return None
    tokens = settings.get("tokenizer.ggml.tokens") or []
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ModelError(
            f"{file} is damaged: tokenizer.ggml.{role}_token_id is {number!r}, but it has only"
            f" {len(tokens)} tokens"
        )
    return number, tokens[number]


def end_of_turn(settings: Mapping[str, Any]) -> tuple[int, str] | None:
    """Gemma's end-of-turn token, found by its text as in llama.cpp, since files may not name it."""
    tokens = settings.get("tokenizer.ggml.tokens") or []
    return (tokens.index(_END_OF_TURN), _END_OF_TURN) if _END_OF_TURN in tokens else None


def _types(settings: Mapping[str, Any], tokens: list[str], file: Path) -> list[int]:
    """The types of all tokens. Raises `ModelError`."""
    types: list[int] = settings.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(
            f"{file} is damaged: it has {len(tokens)} tokens, but types for {len(types)} tokens"
        )
    return types


def _added(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is split."""
    return [
        {
            "id": number,
            "content": tokens[number],
            "special": kind != _USER_DEFINED,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _sentencepiece(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """A SentencePiece tokenizer: pieces are joined by their scores, best first.

    Text without a piece becomes bytes.
    """
    tokens, scores = settings.get("tokenizer.ggml.tokens"), settings.get("tokenizer.ggml.scores")
    if not tokens or not scores or len(tokens) != len(scores):
        raise ModelError(f"{file} does not have a score for each token of tokenizer.ggml.tokens")
    types = _types(settings, tokens, file)
    vocab = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    begins_with_space = settings.get("tokenizer.ggml.add_space_prefix", True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if begins_with_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []
    unknown = token_of(settings, "unknown", file)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replaced]},
        "pre_tokenizer": None,
        "post_processor": _ends(settings, tokens, has_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else unknown[1],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(vocab, types, scores),
        },
    }


def _merges(vocab: Mapping[str, int], types: list[int], scores: list[float]) -> list[list[str]]:
    """All pairs of pieces that join to a piece; the one with the best score comes first."""
    plain = {token: number for token, number in vocab.items() if types[number] == 1}
    found = []
    for token, number in plain.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                found.append((-scores[number], number, plain[left], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def _ends(
    settings: Mapping[str, Any], tokens: list[str], *, has_bos: bool
) -> dict[str, Any] | None:
    """The post-processor that adds tokens around a prompt; None if there are none."""
    roles = {
        "bos": settings.get("tokenizer.ggml.add_bos_token", has_bos),
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
