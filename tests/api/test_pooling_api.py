"""Embeddings, scores and reranking as clients see them; `FakeGenerate` says what is pooled."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from disagg.messages import Pooling
from disagg.models.pooling import ModelPooling
from tests.api.apps import http_client, make_app, openai_client
from tests.api.fakes import TOKENIZER, FakeGenerate, served_model

EMBEDDING = ModelPooling(embedding_size=2)
RERANKER = ModelPooling(scores=(7, 5))
ROLES = (
    "{% for m in messages %}{{ 'Q:' if m.role == 'query' else 'D:' if m.role == 'document' }}"
    "{{ m.content }}{% endfor %}"
)
QUICK, FOX = "the quick", "the quick brown fox"


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def angle(text: str) -> float:
    return num_tokens(text) / 10


async def post(
    path: str, pooling: ModelPooling, template: str | None = None, **body: Any
) -> tuple[int, Any, FakeGenerate]:
    generate = FakeGenerate()
    app = make_app(generate, served_model(pooling=pooling, template=template))
    async with http_client(app) as client:
        reply = await client.post(path, json=body)
    return reply.status_code, reply.json(), generate


async def test_openais_client_gets_each_texts_embedding() -> None:
    generate = FakeGenerate()
    app = make_app(generate, served_model(pooling=EMBEDDING))
    async with openai_client(app) as client:
        encodings: tuple[Any, ...] = ("float", openai.omit)  # without one it asks for base64
        for encoding in encodings:
            found = await client.embeddings.create(
                model="tiny", input=[FOX, QUICK], encoding_format=encoding
            )
            assert [each.index for each in found.data] == [0, 1]
            for each, text in zip(found.data, (FOX, QUICK), strict=True):
                expected = [math.cos(angle(text)), math.sin(angle(text))]
                assert each.embedding == pytest.approx(expected, abs=1e-6)
            assert found.usage.prompt_tokens == num_tokens(FOX) + num_tokens(QUICK)
        ids = await client.embeddings.create(model="tiny", input=[5, 6, 7], dimensions=1)
    assert ids.data[0].embedding == [1.0]
    sampling = [request.sampling for request in generate.requests]
    assert all((each.pooling, each.max_tokens) == (Pooling(), 1) for each in sampling)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("first", "second"), [(QUICK, [FOX, QUICK]), ([FOX, QUICK], FOX), ([FOX, QUICK], [QUICK, FOX])]
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_embeddings_score_pairs_by_their_cosine(
    path: str, first: Any, second: Any, names: tuple[str, str]
) -> None:
    fields = dict(zip(names, (first, second), strict=True))
    status, body, generate = await post(path, EMBEDDING, **fields)
    assert status == 200, body
    lists = [each if isinstance(each, list) else [each] * 2 for each in (first, second)]
    expected = [math.cos(angle(a) - angle(b)) for a, b in zip(*lists, strict=True)]
    assert [each["score"] for each in body["data"]] == pytest.approx(expected, abs=1e-6)
    single = isinstance(first, str) or isinstance(second, str)
    assert len(generate.requests) == (3 if single else 4), "one text is embedded once"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_best_first(path: str) -> None:
    documents = [FOX, {"text": QUICK}, FOX + FOX]
    status, body, generate = await post(path, RERANKER, query=QUICK, documents=documents, top_n=2)
    assert status == 200, body
    texts = [QUICK + FOX, QUICK + QUICK, QUICK + FOX + FOX]
    logits = [num_tokens(text) / 2 - 1 for text in texts]
    assert [each["index"] for each in body["results"]] == [2, 0]
    for each in body["results"]:
        probability = 1 / (1 + math.exp(-logits[each["index"]]))
        assert each["relevance_score"] == pytest.approx(probability)
    assert [each["document"]["text"] for each in body["results"]] == [FOX + FOX, FOX]
    assert body["usage"]["total_tokens"] == sum(map(num_tokens, texts))
    assert {request.sampling.pooling for request in generate.requests} == {Pooling((7, 5))}


async def test_a_rerankers_logits_are_shown_on_demand() -> None:
    asked: dict[str, Any] = {"text_1": QUICK, "text_2": FOX, "use_activation": False}
    _, body, _ = await post("/v1/score", RERANKER, **asked)
    assert body["data"][0]["score"] == pytest.approx(num_tokens(QUICK + FOX) / 2 - 1)


async def test_a_template_with_both_roles_writes_the_prompt() -> None:
    """And control tokens in a document stay text, as in a chat."""
    document = "<|im_end|>" + FOX
    _, _, generate = await post(
        "/rerank", RERANKER, template=ROLES, query=QUICK, documents=[document]
    )
    (request,) = generate.requests
    assert TOKENIZER.decode(list(request.token_ids)) == f"Q:{QUICK}D:{document}"
    assert 2 not in request.token_ids


@pytest.mark.parametrize(
    ("path", "pooling", "body", "param"),
    [
        ("/v1/embeddings", None, {"input": "a"}, "model"),
        ("/v1/embeddings", RERANKER, {"input": "a"}, "model"),
        ("/v1/score", None, {"text_1": "a", "text_2": "b"}, "model"),
        ("/v1/embeddings", EMBEDDING, {}, "input"),
        ("/v1/embeddings", EMBEDDING, {"input": []}, "input"),
        ("/v1/embeddings", EMBEDDING, {"input": ["a", 5]}, "input[1]"),
        ("/v1/embeddings", EMBEDDING, {"input": ""}, "input"),
        ("/v1/embeddings", EMBEDDING, {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", EMBEDDING, {"input": "a", "dimensions": 3}, "dimensions"),
        ("/v1/embeddings", EMBEDDING, {"input": [320]}, "input"),
        ("/v1/embeddings", EMBEDDING, {"input": "a", "normalize": False}, "normalize"),
        ("/v1/embeddings", EMBEDDING, {"input": "a", "use_activation": False}, "use_activation"),
        (
            "/v1/embeddings",
            EMBEDDING,
            {"input": "a", "truncate_prompt_tokens": 512},
            "truncate_prompt_tokens",
        ),
        ("/v1/score", EMBEDDING, {"text_1": "a"}, "text_2"),
        ("/v1/score", EMBEDDING, {"text_1": ["a"] * 2, "text_2": ["b"] * 3}, "text_2"),
        ("/rerank", EMBEDDING, {"query": "a", "documents": []}, "documents"),
        ("/rerank", RERANKER, {"query": "a" * 8200, "documents": ["b"] * 2048}, "documents"),
        (
            "/rerank",
            RERANKER,
            {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 4},
            "truncate_prompt_tokens",
        ),
    ],
)
async def test_wrong_requests_are_refused_in_words(
    path: str, pooling: ModelPooling | None, body: Any, param: str
) -> None:
    pooling = pooling or ModelPooling(why_not="it answers.")
    status, reply, generate = await post(path, pooling, **body)
    assert status == 400, reply
    assert reply["error"]["param"] == param, reply
    assert not generate.requests
    if param == "model":
        assert "cannot" in reply["error"]["message"]


async def test_long_inputs_are_cut_at_their_beginning() -> None:
    asked: dict[str, Any] = {"input": FOX, "truncate_prompt_tokens": 2}
    _, body, generate = await post("/v1/embeddings", EMBEDDING, **asked)
    ids = TOKENIZER.encode(FOX, add_special_tokens=False)
    assert body["usage"]["prompt_tokens"] == 2
    assert list(generate.requests[0].token_ids) == ids[-2:]
