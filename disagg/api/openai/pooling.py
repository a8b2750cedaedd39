"""Embeddings, scores and reranking, with the fields of OpenAI, vLLM, Jina and Cohere.

Each text, or each query with a document, is one prompt without an answer. An embedding model scores
a pair by the cosine of both embeddings; a reranker reads both texts together, and answers with the
probability of its token for "yes", or with what its own head says (on vLLM).
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from disagg.api.openai.fields import Count, RequestFields
from disagg.api.openai.requests import check_truncated, read_prompts
from disagg.api.refusals import invalid_value, missing_parameter, unsupported
from disagg.api.request_spec import Conversation, Prompt, RequestSpec, Text, in_body
from disagg.api.running_job import RunningJob
from disagg.api.served_model import ServedModel
from disagg.messages import Pooling, SamplingParams

MAX_NUM_TEXTS = 2048  # of one request, as OpenAI has it
# Of all pairs that a reranker reads, as many as a body may have by default: a short request could
# have a gigabyte of prompts otherwise, because each has the whole query.
MAX_NUM_PAIR_CHARS = 16 << 20

Texts: TypeAlias = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_NUM_TEXTS)]


class PoolingFields(RequestFields, kw_only=True):
    """Fields that all three have in common."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    use_activation: bool | None = None  # false: a reranker's logit instead of its probability


class EmbeddingsRequest(PoolingFields, kw_only=True):
    input: str | list[Any]  # as the `prompt` of a completion
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    add_special_tokens: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """`queries` and `documents` are newer names of `text_1` and `text_2`."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class RerankDocument(msgspec.Struct):
    text: str


class RerankRequest(PoolingFields, kw_only=True):
    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_NUM_TEXTS)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None


class Pairs(msgspec.Struct, frozen=True):
    """The texts of a request whose pairs are scored: each query with its document.

    A single query, or a single document, belongs to all of the others.
    """

    queries: Sequence[str]
    documents: Sequence[str]

    @property
    def indices(self) -> list[tuple[int, int]]:
        """Which query and which document each pair has."""
        num_queries, num_documents = len(self.queries), len(self.documents)
        numbers = range(max(num_queries, num_documents))
        return [(number % num_queries, number % num_documents) for number in numbers]


class _Repeated(msgspec.Struct, frozen=True):
    """A request whose texts are in pairs."""

    request: ScoreRequest | RerankRequest
    pairs: Pairs


def understand_embeddings(request: EmbeddingsRequest, model: ServedModel) -> RequestSpec:
    """Convert a request for embeddings."""
    most = model.pooling.embedding_size
    if not most:
        raise _no("compute embeddings", model)
    if (request.dimensions or 0) > most:
        raise invalid_value("dimensions", f"the model's embeddings have {most} numbers.")
    if request.use_activation is False:
        raise unsupported("use_activation", "Embeddings are of length 1 here.")
    special = request.add_special_tokens is not False
    prompts = read_prompts(request.input, "input", special, MAX_NUM_TEXTS)
    return _spec(request, model, prompts, "input", Pooling(), request)


def understand_score(request: ScoreRequest, model: ServedModel) -> RequestSpec:
    """Convert a request for scores, as `understand_embeddings`."""
    queries = _texts(request.text_1, request.queries, "text_1")
    documents = _texts(request.text_2, request.documents, "text_2")
    if len(queries) != len(documents) and 1 not in (len(queries), len(documents)):
        raise invalid_value(
            "text_2",
            f"{len(queries)} and {len(documents)} texts form no pairs; send equally many, or only"
            " one of one kind.",
        )
    return _of_pairs(request, model, Pairs(queries, documents), "text_2")


def understand_rerank(request: RerankRequest, model: ServedModel) -> RequestSpec:
    """Convert a request for the order of documents, as `understand_embeddings`."""
    documents = [each if isinstance(each, str) else each.text for each in request.documents]
    pairs = Pairs([request.query], documents)
    return _of_pairs(request, model, pairs, "documents")


def embeddings_body(run: RunningJob) -> bytes:
    request: EmbeddingsRequest = run.spec.repeated
    shown: list[Any] = []
    for answer in run.kept:
        vector = _shortened(_floats(answer.pooled), request.dimensions)
        if request.encoding_format == "base64":
            shown.append(base64.b64encode(_little(vector).tobytes()).decode())
        else:
            # One vector at a time, or other threads wait for millions of numbers in one call.
            shown.append(msgspec.Raw(msgspec.json.encode(vector.tolist())))
    found = [
        {"index": index, "object": "embedding", "embedding": each}
        for index, each in enumerate(shown)
    ]
    return _body(run, {"object": "list", "data": found})


def score_body(run: RunningJob) -> bytes:
    found = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(_scores(run))
    ]
    return _body(run, {"object": "list", "data": found})


def rerank_body(run: RunningJob) -> bytes:
    """The best documents, best first. Equal ones keep their order."""
    repeated: _Repeated = run.spec.repeated
    request, pairs = repeated.request, repeated.pairs
    assert isinstance(request, RerankRequest)
    ranked = sorted(enumerate(_scores(run)), key=lambda pair: -pair[1])
    shows = request.return_documents is not False
    found = [
        {"index": index, "relevance_score": score}
        | ({"document": {"text": pairs.documents[index]}} if shows else {})
        for index, score in ranked[: request.top_n or len(ranked)]
    ]
    return _body(run, {"results": found})


def _of_pairs(
    request: ScoreRequest | RerankRequest,
    model: ServedModel,
    pairs: Pairs,
    param: str,
) -> RequestSpec:
    if request.truncate_prompt_tokens is not None:
        raise unsupported(
            "truncate_prompt_tokens",
            "A pair that is cut at its beginning has lost its query; send shorter documents.",
        )
    prompts: list[Prompt]
    if model.pooling.scores or model.pooling.has_head:
        together = [(pairs.queries[i], pairs.documents[j]) for i, j in pairs.indices]
        num_chars = sum(len(query) + len(document) for query, document in together)
        if num_chars > MAX_NUM_PAIR_CHARS:
            raise invalid_value(
                param,
                f"the pairs have {num_chars} characters, each with its whole query; at most"
                f" {MAX_NUM_PAIR_CHARS} are allowed. Send several requests.",
            )
        prompts = [_together(query, document, model) for query, document in together]
        pooling = Pooling(model.scored_ids)
        if model.pooling.has_head:
            pooling = Pooling(head="logit" if request.use_activation is False else "score")
    elif model.pooling.embedding_size:
        prompts = [Text(text) for text in (*pairs.queries, *pairs.documents)]
        pooling = Pooling()
    else:
        raise _no("score texts", model)
    repeated = _Repeated(request, pairs)
    return _spec(request, model, prompts, param, pooling, repeated)


def _together(query: str, document: str, model: ServedModel) -> Prompt:
    """One prompt of both: by the chat template if that knows them, otherwise one after the other.

    vLLM and Sentence Transformers have the same roles in the templates of rerankers.
    """
    if model.template is None or not model.template.judges_documents:
        return Text(query + document)
    texts = {"query": query, "document": document}
    return Conversation([{"role": role, "content": text} for role, text in texts.items()])


def _spec(
    request: PoolingFields,
    model: ServedModel,
    prompts: Sequence[Prompt],
    param: str,
    pooling: Pooling,
    repeated: Any,
) -> RequestSpec:
    check_truncated(request.truncate_prompt_tokens, model)
    return RequestSpec(
        model=model,
        prompts=prompts,
        prompt_param=param,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling),
        max_tokens=1,
        only_prompt=True,
        repeated=repeated,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        timeout_s=request.timeout,
        priority=request.priority,
        slo=in_body(request.slo_ttft_ms, None),
        cache_salt=request.cache_salt or "",
    )


def _no(what: str, model: ServedModel) -> Exception:
    why = model.pooling.why_not or "it is a reranker."
    return invalid_value("model", f"{model.name!r} cannot {what}: {why}")


def _texts(older: Texts | None, newer: Texts | None, param: str) -> list[str]:
    texts = newer if older is None else older
    if texts is None:
        raise missing_parameter(param)
    return [texts] if isinstance(texts, str) else texts


def _scores(run: RunningJob) -> list[float]:
    """The score of each pair."""
    repeated: _Repeated = run.spec.repeated
    request, pairs = repeated.request, repeated.pairs
    pooled = [_floats(answer.pooled) for answer in run.kept]
    asked = run.spec.sampling.pooling
    assert asked is not None
    if asked.head:
        return [each[0] for each in pooled]
    if not asked.token_ids:
        queries, documents = pooled[: len(pairs.queries)], pooled[len(pairs.queries) :]
        return [sum(map(mul, queries[i], documents[j])) for i, j in pairs.indices]
    logits = [each[0] - sum(each[1:]) for each in pooled]
    return logits if request.use_activation is False else list(map(_probability, logits))


def _probability(logit: float) -> float:
    """The logistic function, without overflow."""
    power = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else power) / (1.0 + power)


def _shortened(vector: array[float], dimensions: int | None) -> array[float]:
    """The first numbers of an embedding, again at length 1."""
    if dimensions is None or dimensions == len(vector):
        return vector
    first = vector[:dimensions]
    length = math.sqrt(sum(map(mul, first, first)))
    return array("f", [each / length for each in first]) if length else first


def _floats(pooled: bytes | None) -> array[float]:
    assert pooled is not None, "a worker returns what it was asked for"
    return _little(array("f", pooled))


def _little(numbers: array[float]) -> array[float]:
    """From little-endian numbers to the machine's, and back."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers


def _body(run: RunningJob, fields: dict[str, Any]) -> bytes:
    num_tokens = run.num_prompt_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    head = {"id": run.id, "created": run.created_unix_s, "model": run.model_name, "usage": usage}
    return msgspec.json.encode(head | fields)
