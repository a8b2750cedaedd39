"""Embeddings and scores of a whole fleet are those of transformers, whatever runs beside.

The checkpoints are saved as embedding models are published: the decoder without its head.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional

from disagg import local
from disagg.config import EngineConfig, PoolConfig, ServeConfig, TierConfig
from disagg.local import LocalCluster
from disagg.worker.worker import Worker
from tests.tiny_model import tiny_parts, write_module, write_tiny_model

ENGINE = EngineConfig(
    dtype="float32", num_threads=1, num_gpu_blocks_override=64, max_model_len=512, max_num_seqs=8
)
KINDS = ("embedding", "reranker")
ROLES = (
    "{% for m in messages %}{{ 'Q' if m.role == 'query' else 'D' if m.role == 'document' }}"
    " {{ m.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of each kind."""
    directory = tmp_path_factory.mktemp("pooling")
    embedding, reranker = (write_tiny_model(directory / kind) for kind in KINDS)
    weights = load_file(embedding / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in weights.items()}
    save_file(bare, embedding / "model.safetensors", {"format": "pt"})
    write_module(reranker, "LogitScore", true_token_id=65, false_token_id=66)
    (reranker / "chat_template.jinja").write_text(ROLES)
    return directory


@pytest.fixture(scope="module")
def oracles(place: Path) -> dict[str, Any]:
    kinds = {"embedding": transformers.Qwen3Model, "reranker": transformers.Qwen3ForCausalLM}
    return {name: kind.from_pretrained(place / name).eval() for name, kind in kinds.items()}


@asynccontextmanager
async def fleet(
    place: Path,
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    tiers = tuple(
        TierConfig(
            model=str(place / kind),
            engine=ENGINE,
            prefill=PoolConfig(num_replicas=1),
            decode=PoolConfig(num_replicas=1),
            ttft_slo_s=None,
        )
        for kind in KINDS
    )
    config = ServeConfig(tiers=tiers, transport="local", cluster_key="key")
    async with local.running(config, tiny_parts()) as running:
        app = httpx.ASGITransport(running.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            yield running, client
            for worker in running.workers:
                assert isinstance(worker, Worker)
                await worker.check()


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def texts() -> list[str]:
    rng = random.Random(3)
    long = "a text with so many blocks that it is best computed by a worker for prompts: " * 4
    return ["short", long, long + "and more", *(long[: rng.randrange(1, 300)] for _ in range(9))]


async def test_embeddings_and_scores_are_those_of_transformers_beside_answers(
    place: Path, oracles: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.from_file(str(place / "embedding" / "tokenizer.json"))

    @torch.no_grad()
    def embedding(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer.encode(text).ids])
        hidden = oracles["embedding"](ids).last_hidden_state[0, -1]
        return functional.normalize(hidden, dim=0)

    @torch.no_grad()
    def probability(query: str, document: str) -> float:
        ids = tokenizer.encode(f"Q {query}\nD {document}\n").ids
        logits = oracles["reranker"](torch.tensor([ids])).logits[0, -1]
        return float((logits[65] - logits[66]).sigmoid())

    async with fleet(place) as (_, client):
        for _ in range(2):  # the second time prefixes are cached
            chat = [
                post(client, "/v1/completions", model=kind, prompt=text, max_tokens=30)
                for kind in KINDS
                for text in texts()[:3]
            ]
            embedded, ranked, scored, *_ = await asyncio.gather(
                post(client, "/v1/embeddings", model="embedding", input=texts()),
                post(client, "/v1/rerank", model="reranker", query="which?", documents=texts()),
                post(client, "/v1/score", model="embedding", text_1=texts()[0], text_2=texts()),
                *chat,
            )
            found = torch.tensor([each["embedding"] for each in embedded["data"]])
            expected = torch.stack([embedding(text) for text in texts()])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            cosines = torch.tensor([each["score"] for each in scored["data"]])
            torch.testing.assert_close(cosines, expected @ expected[0], atol=1e-4, rtol=0)
            for each in ranked["results"]:
                one = probability("which?", texts()[each["index"]])
                assert each["relevance_score"] == pytest.approx(one, abs=1e-4)
            shown = [each["relevance_score"] for each in ranked["results"]]
            assert shown == sorted(shown, reverse=True) and shown[0] - shown[-1] > 0.1
