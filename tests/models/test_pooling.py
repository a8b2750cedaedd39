"""What models compute instead of answers, from files as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.models.description import describe_foreign
from disagg.models.pooling import ModelPooling, read_pooling

EMBEDDING = ModelPooling(embedding_size=1024)


def modules(*kinds: str) -> str:
    return json.dumps(
        [
            {"idx": i, "name": str(i), "path": f"{i}_{kind.rpartition('.')[2]}" if i else "",
             "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ]
    )  # fmt: skip


MODES = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
EMBEDS = modules("Transformer", "Pooling", "Normalize")
RANKS = modules("Transformer", "base.modules.logit_score.LogitScore")


def pooling_of(mode: str, **more: Any) -> str:
    flags = {f"pooling_mode_{each}": each == mode for each in MODES}
    return json.dumps({"word_embedding_dimension": 1024, **flags, "include_prompt": True, **more})


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        # Qwen3-Embedding, and the same as newer versions write it
        ({"modules.json": EMBEDS, "1_Pooling/config.json": pooling_of("lasttoken")}, {}, EMBEDDING),
        (
            {
                "modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": '{"pooling_mode": "lasttoken"}',
            },
            {},
            EMBEDDING,
        ),
        # Qwen3-Reranker, zerank-2, and vLLM's words for the first
        (
            {
                "modules.json": RANKS,
                "1_LogitScore/config.json": '{"true_token_id": 9693, "false_token_id": 2152}',
            },
            {},
            ModelPooling(scores=(9693, 2152)),
        ),
        (
            {
                "modules.json": RANKS,
                "1_LogitScore/config.json": '{"true_token_id": 9454, "false_token_id": null}',
            },
            {},
            ModelPooling(scores=(9454,)),
        ),
        ({}, {"classifier_from_token": ["no", "yes"]}, ModelPooling(scores=("yes", "no"))),
        # What cannot be computed
        ({}, {}, "name no pooling"),
        ({}, {"classifier_from_token": ["yes"]}, "classifier_from_token"),
        ({"modules.json": "["}, {}, "cannot be read"),
        ({"modules.json": "[3]"}, {}, "cannot be read"),
        ({"modules.json": EMBEDS}, {}, "not that of the last token"),
        (
            {"modules.json": EMBEDS, "1_Pooling/config.json": pooling_of("mean_tokens")},
            {},
            "not that of the last token",
        ),
        (
            {
                "modules.json": EMBEDS,
                "1_Pooling/config.json": pooling_of("lasttoken", pooling_mode_mean_tokens=True),
            },
            {},
            "not that of the last token",
        ),
        ({"modules.json": EMBEDS, "1_Pooling/config.json": "[]"}, {}, "cannot be read"),
        ({"modules.json": modules("Transformer", "Pooling", "Dense")}, {}, "Dense"),
        ({"modules.json": RANKS}, {}, "true_token_id"),
        (
            {"modules.json": EMBEDS, "1_Pooling/config.json": pooling_of("lasttoken")},
            {"is_causal": False},
            "looks ahead",
        ),
    ],
)
def test_files_say_what_is_pooled(
    files: dict[str, str], config: dict[str, Any], expected: ModelPooling | str
) -> None:
    found = read_pooling(files.get, {"hidden_size": 1024, **config})
    if isinstance(expected, str):
        assert not (found.embedding_size or found.scores) and expected in found.why_not
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("engine_args", "config", "expected"),
    [
        ({"runner": "pooling"}, {}, EMBEDDING),
        ({"runner": "pooling", "convert": "classify"}, {}, ModelPooling(has_head=True)),
        (
            {"hf_overrides": {"architectures": ["Qwen3ForSequenceClassification"]}},
            {"architectures": ["Qwen3ForCausalLM"]},
            ModelPooling(has_head=True),
        ),
        (
            {},
            {"architectures": ["BertForSequenceClassification"], "type_vocab_size": 2},
            "cross-encoder",
        ),
        ({}, {"classifier_from_token": ["no", "yes"]}, ModelPooling(scores=("yes", "no"))),
        ({}, {}, "started for answers"),
    ],
)
def test_engine_args_say_what_vllm_pools(
    engine_args: dict[str, Any],
    config: dict[str, Any],
    expected: ModelPooling | str,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1024, **config}))
    found = describe_foreign(tmp_path, engine_args).pooling
    assert expected in found.why_not if isinstance(expected, str) else found == expected
