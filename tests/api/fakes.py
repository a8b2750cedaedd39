"""A small byte-level tokenizer, models over it, and a stand-in for everything behind the API."""

from __future__ import annotations

import asyncio
import functools
import math
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from disagg.api.request_spec import RequestSpec
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError
from disagg.messages import (
    FinishReason,
    GenerateRequest,
    PutDelta,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from disagg.models.pooling import ModelPooling
from disagg.text.chat_template import ChatTemplate
from disagg.text.tokenizer import Tokenizer


class NoAdapters:
    """The table of an ingress that serves no LoRA adapters, and gets none."""

    def all(self) -> list[ServedModel]:
        return []

    def find(self, name: str) -> ServedModel | None:
        return None

    async def load(self, *args: object, **options: object) -> None:
        raise AssertionError("nobody loads one")

    async def unload(self, name: str) -> None:
        raise AssertionError("nobody unloads one")


CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>\\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog, again and again and again. "] * 40


def turns_template(call: str) -> str:
    """Shows messages as `role(reasoning content[call]...)`; `call` says what of each call `c`."""
    return (
        "{% for m in messages %}{{ m.role }}({{ m.reasoning_content ~ ' ' if m.reasoning_content }}"
        "{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}[" + call + "]{% endfor %}){% endfor %}"
    )


def byte_level_core() -> tokenizers.Tokenizer:
    """Merges on a few English words, every byte, three special tokens."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


def byte_fallback_core() -> tokenizers.Tokenizer:
    """As SentencePiece models come: words with a leading mark, bytes for all else."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "lo"]
    core = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return core


TOKENIZER = Tokenizer(byte_level_core())
END = 2  # <|im_end|>


_compiled = functools.cache(lambda source: ChatTemplate(source, {}))


def request_spec(sampling: SamplingParams, **changes: Any) -> RequestSpec:
    """Of `served_model`, for requests that are made by hand."""
    return RequestSpec(
        model=served_model(), prompts=(), prompt_param="prompt", sampling=sampling, **changes
    )


def served_model(
    name: str = "tiny",
    *,
    max_model_len: int = 512,
    template: str | None = CHATML,
    pooling: ModelPooling | None = None,
) -> ServedModel:
    return ServedModel(
        name=name,
        tokenizer=TOKENIZER,
        template=None if template is None else _compiled(template),
        fingerprint=f"fingerprint of {name}",
        vocab_size=TOKENIZER.num_ids,
        max_model_len=max_model_len,
        block_size=4,
        eos_token_ids=(END,),
        created_unix_s=7,
        pooling=pooling or ModelPooling(why_not="it answers."),
        scored_ids=(7, 5) if pooling is not None and pooling.scores else (),
    )


class FakeGenerate:
    """Says `text`, token by token, to every request.

    Args:
        fail_after: tokens before `error` is raised; None: never.
        pause: awaited before each token.
        per_delta: tokens per delta.
        finish: whether the end token follows; else the answer goes on until `max_tokens`.
    """

    def __init__(
        self,
        text: str = "the quick brown fox",
        *,
        fail_after: int | None = None,
        error: Exception | None = None,
        pause: Callable[[], asyncio.Future[None]] | None = None,
        per_delta: int = 1,
        finish: bool = True,
        num_cached_tokens: int = 0,
    ) -> None:
        self.token_ids = TOKENIZER.encode(text, add_special_tokens=False)
        self.fail_after = fail_after
        self.error = error or DisaggError("planted")
        self.pause = pause
        self.per_delta = per_delta
        self.finish = finish
        self.num_cached_tokens = num_cached_tokens
        self.requests: list[GenerateRequest] = []
        self.num_open = 0
        self.num_closed = 0

    async def __call__(self, request: GenerateRequest, put: PutDelta) -> None:
        self.requests.append(request)
        self.num_open += 1
        try:
            async for delta in self._deltas(request):
                put(delta)
        finally:
            self.num_open -= 1
            self.num_closed += 1

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        token_ids, reason = self._answer(request)
        for start in range(0, len(token_ids), self.per_delta):
            if self.fail_after is not None and start >= self.fail_after:
                raise self.error
            await (self.pause() if self.pause is not None else asyncio.sleep(0))
            ids = token_ids[start : start + self.per_delta]
            last = start + self.per_delta >= len(token_ids)
            yield TokenDelta(
                0,
                tuple(ids),
                reason if last else None,
                None if request.sampling.logprobs is None else _scores(ids, request),
                self.num_cached_tokens if start == 0 else 0,
                prompt_logprobs=_prompt_scores(request) if start == 0 else None,
                pooled=_pooled(request) if start == 0 else None,
            )

    def _answer(self, request: GenerateRequest) -> tuple[Sequence[int], FinishReason]:
        sampling = request.sampling
        ids = list(self.token_ids)
        if self.finish and END in sampling.stop_token_ids and len(ids) < sampling.max_tokens:
            return [*ids, END], "stop"
        while len(ids) < sampling.max_tokens:
            ids += self.token_ids
        return ids[: sampling.max_tokens], "length"


def _prompt_scores(request: GenerateRequest) -> tuple[TokenLogprobs, ...] | None:
    """Of the token at place i it is -i; one token more is the likeliest of each place."""
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    places = range(1, request.num_prompt_tokens)
    return tuple(TokenLogprobs(-i, ((7, -0.25),) * min(num_top, 1), i) for i in places)


def _pooled(request: GenerateRequest) -> bytes | None:
    """An embedding of two numbers, with an angle of a tenth of the number of tokens; or as the
    logits of two tokens 1 and half of the number of tokens."""
    pooling, num_tokens = request.sampling.pooling, request.num_prompt_tokens
    if pooling is None:
        return None
    numbers = (math.cos(num_tokens / 10), math.sin(num_tokens / 10))
    return array("f", (num_tokens / 2, 1.0) if pooling.token_ids else numbers).tobytes()


def _scores(token_ids: Sequence[int], request: GenerateRequest) -> tuple[TokenLogprobs, ...]:
    num_top = request.sampling.logprobs or 0
    return tuple(
        TokenLogprobs(-0.5, tuple((token_id, -0.5 - rank) for rank in range(num_top)))
        for token_id in token_ids
    )
