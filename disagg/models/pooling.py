"""What a model computes instead of answers, as its files for Sentence Transformers say.

Embedding models have the modules Transformer, Pooling and Normalize; rerankers that are decoders
have Transformer and LogitScore. vLLM's `classifier_from_token` in config.json says the same as the
latter. Only the last token can be pooled: with a cached prefix, others are not computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disagg.models.family import Json

_SUPPORTED = (
    "Supported are modules.json of Sentence Transformers with Pooling of the last token, or with"
    ' LogitScore, and "classifier_from_token" in config.json'
)

# Beside config.json, what `read_pooling` reads in published models.
POOLING_FILES = ("modules.json", "1_Pooling/config.json", "1_LogitScore/config.json")


@dataclass(frozen=True)
class ModelPooling:
    """What a model computes instead of answers.

    Attributes:
        embedding_size: how many numbers the hidden state of a text's last token has, which at
            length 1 is its embedding; 0: it is none.
        has_head: whether a head of its own says how well they fit, as with vLLM.
        scores: the tokens whose logits after a query and a document say how well they fit, as ids
            or as texts of one token: of "yes", and of "no" if that is compared with it.
        why_not: a sentence, if it does neither.
    """

    embedding_size: int = 0
    has_head: bool = False
    scores: tuple[int | str, ...] = ()
    why_not: str = ""


def read_pooling(read: Callable[[str], str | None], config: Json) -> ModelPooling:
    """What a model pools.

    Args:
        read: returns the text of a file of its directory; None if there is none.
        config: its config.json.
    """
    named = config.get("classifier_from_token")
    if named is not None:
        is_pair = isinstance(named, list) and len(named) == 2
        if not is_pair or not all(isinstance(each, str) for each in named):
            return _not('its "classifier_from_token" is not a list of two texts, as ["no", "yes"]')
        return ModelPooling(scores=(named[1], named[0]))
    try:
        modules = [
            (str(each["type"]).rpartition(".")[2], str(each["path"]))
            for each in json.loads(read("modules.json") or "[]")
        ]
        settings = [
            {} if not path else json.loads(read(f"{path}/config.json") or "{}")
            for _, path in modules
        ]
        if not all(isinstance(each, dict) for each in settings):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        return _not("its files for Sentence Transformers cannot be read")
    match [kind for kind, _ in modules]:
        case []:
            return _not("its files name no pooling")
        case ["Transformer", "Pooling"] | ["Transformer", "Pooling", "Normalize"]:
            return _embedding(settings[1], config)
        case ["Transformer", "LogitScore"]:
            ids = [settings[1].get("true_token_id"), settings[1].get("false_token_id")]
            wanted = tuple(each for each in ids if isinstance(each, int))
            if not wanted or wanted[0] != ids[0]:
                return _not("its LogitScore has no true_token_id")
            return ModelPooling(scores=wanted)
        case kinds:
            return _not(f"its modules.json has {', '.join(kinds)}")


def _embedding(settings: Mapping[str, Any], config: Json) -> ModelPooling:
    modes = {name for name, value in settings.items() if value is True}
    is_last = settings.get("pooling_mode") == "lasttoken" or (
        {each for each in modes if each.startswith("pooling_mode_")} == {"pooling_mode_lasttoken"}
    )
    if not is_last:
        return _not("its Pooling is not that of the last token")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        return _not("its attention also looks ahead, which is not supported")
    return ModelPooling(embedding_size=config["hidden_size"])


def _not(why: str) -> ModelPooling:
    return ModelPooling(why_not=f"{why}. {_SUPPORTED}.")
