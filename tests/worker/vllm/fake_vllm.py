"""A stand-in for vLLM's engine: a "model" whose next token follows from all tokens before it, and
the rules of vLLM's prefix cache and NixlConnector as its source (0.32) has them.

KV that is wrong is noticed: an engine that is given blocks of another prompt, too few blocks, or
blocks after the end of their lease goes on with other tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from disagg.blocks import image_digest
from disagg.config import TierConfig
from disagg.errors import WorkerLost
from disagg.messages import TokenLogprobs
from disagg.worker.vllm.engine import (
    EngineListener,
    EngineOutput,
    EnginePrompt,
    EngineSizes,
    EngineStep,
)
from disagg.worker.vllm.prefixes import AllBlocksCleared, BlockStored

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 256, 512
NUM_TOKENS = 200  # of the tiny model's ids those that are text
IMAGE_MARK, NUM_IMAGE_TOKENS = 258, 40  # <|endoftext|>, which becomes so many tokens
EMBEDDING_SIZE = 128  # of the tiny model
_numbers = count()


def embedding(token_ids: tuple[int, ...]) -> bytes:
    return array("f", [next_token(token_ids), *[0.0] * (EMBEDDING_SIZE - 1)]).tobytes()


def score(token_ids: tuple[int, ...]) -> bytes:
    return array("f", [next_token(token_ids) / 256]).tobytes()


def next_token(token_ids: tuple[int, ...], adapter: str = "") -> int:
    digest = hashlib.blake2b(f"{token_ids}{adapter}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % NUM_TOKENS


def expanded(token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[int, ...]:
    """The prompt with each image's tokens, here negative numbers that stand for what it shows."""
    left = iter(images)
    tokens: list[int] = []
    for token_id in token_ids:
        is_mark = token_id == IMAGE_MARK
        tokens += [_shown(next(left))] * NUM_IMAGE_TOKENS if is_mark else [token_id]
    return tuple(tokens)


def _shown(image: bytes) -> int:
    return -2 - int(image_digest(image)[:12], 16)


def answer(prompt: tuple[int, ...], num_new: int, adapter: str = "") -> list[int]:
    """The answer of one engine that has no other's KV. adapter: its digest."""
    tokens = prompt
    for _ in range(num_new):
        tokens = (*tokens, next_token(tokens, adapter))
    return list(tokens[len(prompt) :])


@dataclass
class FakeVllm:
    """A `ForeignEngine`, which tests put in the place of `VllmEngine`."""

    engines: ClassVar[dict[str, FakeVllm]] = {}

    name: str
    sizes: EngineSizes
    listener: EngineListener = field(default_factory=EngineListener)
    is_dead: bool = False
    num_aborted: int = 0
    num_imported: int = 0  # requests whose KV came from another engine
    seen: list[EnginePrompt] = field(default_factory=list)
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)  # tokens whose KV a lease holds
    cached: dict[str, list[str]] = field(default_factory=dict)  # salt -> names of its blocks
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    stops_at: int | None = None  # tokens after which it waits for `may_go_on`
    num_waits: int = 0

    @classmethod
    async def start(cls, tier: TierConfig, host: str) -> FakeVllm:
        name = f"engine-{next(_numbers)}"
        sizes = EngineSizes(BLOCK_SIZE, NUM_BLOCKS, 1024, MAX_MODEL_LEN, 8, 1024, "fake")
        cls.engines[name] = made = cls(name, sizes)
        made.may_go_on.set()
        return made

    async def close(self) -> None:
        self.is_dead = True

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        self.seen.append(prompt)
        if prompt.pooling is not None:
            pooled = score if prompt.pooling.head else embedding
            yield EngineOutput(finish_reason="length", pooled=pooled(prompt.token_ids))
            return
        extra = prompt.sampling.get("extra_args", {}).get("kv_transfer_params", {})
        tokens = whole = expanded(prompt.token_ids, prompt.images)
        adapter = "" if prompt.adapter is None else prompt.adapter.digest
        if extra.get("do_remote_prefill") and not self._import(tokens, extra):
            tokens = (-1, *tokens)  # wrong KV: nothing is as it should be from here on
        num_cached = self._find(prompt.salt, whole)
        given: list[int] = []
        is_done = False
        try:
            while not is_done:
                await asyncio.sleep(0)
                if self.stops_at is not None and len(given) >= self.stops_at:
                    self.num_waits += 1
                    await self.may_go_on.wait()
                if self.is_dead:
                    raise WorkerLost("The vLLM engine of this worker has failed.")
                token = next_token(tokens, adapter)
                tokens = (*tokens, token)
                given.append(token)
                self._cache(prompt, tokens[-len(whole) - len(given) : -1])
                is_stop = token in prompt.sampling["stop_token_ids"]
                is_done = is_stop or len(given) == prompt.sampling["max_tokens"]
                num_prompt = len(whole) if len(given) == 1 else 0
                self.listener.on_step(EngineStep(bool(num_prompt), num_prompt, 1, 1e-3, 1, 0.1))
                scores = TokenLogprobs(-1.0) if prompt.sampling["logprobs"] is not None else None
                reason = ("stop" if is_stop else "length") if is_done else None
                params = self._keep(tokens[:-1]) if extra.get("do_remote_decode") else None
                yield EngineOutput(
                    (token,),
                    reason,  # type: ignore[arg-type]
                    None if scores is None else (scores,),
                    num_cached_tokens=num_cached,
                    num_prompt_tokens=len(whole),
                    kv_transfer_params=params if is_done else None,
                )
        finally:
            self.num_aborted += not is_done

    def clear_cache(self) -> None:
        self.cached.clear()
        self.listener.on_kv_events([AllBlocksCleared()])

    def end_leases(self) -> None:
        """The blocks are used again, for other tokens."""
        self.kept = {name: (0,) * len(tokens) for name, tokens in self.kept.items()}

    def _keep(self, tokens: tuple[int, ...]) -> dict[str, Any]:
        name = f"request-{next(_numbers)}"
        self.kept[name] = tokens
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.name,
            "remote_request_id": name,
            "remote_block_ids": [list(range(num_blocks))],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_num_tokens": len(tokens),
        }

    def _import(self, tokens: tuple[int, ...], params: dict[str, Any]) -> bool:
        kept = self.engines[params["remote_engine_id"]].kept[params["remote_request_id"]]
        self.num_imported += 1
        has_blocks = -(-len(kept) // BLOCK_SIZE) >= -(-len(tokens) // BLOCK_SIZE)
        return has_blocks and kept[: len(tokens) - 1] == tokens[:-1]

    def _find(self, salt: str, tokens: tuple[int, ...]) -> int:
        num_cached = 0
        cached = self.cached.get(salt, [])
        for name in self._names(tokens[:-1]):
            if name not in cached:
                break
            num_cached += BLOCK_SIZE
        return num_cached

    def _names(self, tokens: tuple[int, ...]) -> list[str]:
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        return [repr(tokens[:end]) for end in ends]

    def _cache(self, prompt: EnginePrompt, tokens: tuple[int, ...]) -> None:
        cached = self.cached.setdefault(prompt.salt, [])
        for number, name in enumerate(self._names(tokens)):
            if name in cached:
                continue
            cached.append(name)
            first = number * BLOCK_SIZE
            parent = repr(tokens[:first]) if first else None
            block = tokens[first : first + BLOCK_SIZE]
            keys: list[Any] = []
            for image in prompt.images:
                if _shown(image) in block:
                    offset = tokens.index(_shown(image)) - first
                    keys.append(["mm", image_digest(image), offset])
            keys += [prompt.salt] if parent is None else []
            event = BlockStored(
                [hash((prompt.salt, name))],
                None if parent is None else hash((prompt.salt, parent)),
                [IMAGE_MARK if token < 0 else token for token in block],
                BLOCK_SIZE,
                "GPU",
                [keys or None],
            )
            self.listener.on_kv_events([event])
