"""Turns the bytes of a request into `GenerateRequest`s in five steps, and runs them.

The steps are read, understand, tokenize, fit and name. An invalid request is refused here, before
it is sent to a worker. APIs differ in the first two steps and in the format of answers (`apis`).
Knows neither HTTP nor workers: the function `generate` is an argument.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from msgspec.structs import replace

from disagg import telemetry
from disagg.api.anthropic.requests import read_count, understand_count
from disagg.api.apis import Api, ApiRequest
from disagg.api.choices import Caller, name_choices
from disagg.api.fit import check_ids, fit, truncated_to
from disagg.api.off_loop import off_loop
from disagg.api.openai.requests import (
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
    read_request,
    understand_tokenize,
)
from disagg.api.openai.structured_output import GrammarChecks
from disagg.api.prompts import tokenize_prompts
from disagg.api.refusals import invalid_value
from disagg.api.request_spec import Prompt, RequestSpec
from disagg.api.running_job import Explain, Generate, RunningJob
from disagg.api.served_model import ServedModel
from disagg.api.slo import RequestSlo, choose_slo
from disagg.errors import DeadlineExceeded, InvalidRequest, ModelNotFound

TOKEN_NBYTES = 4  # assumed size of a token id, to decide whether work on many of them blocks

PROMPT = "its prompt was tokenized; shorten the prompt"
GRAMMAR = "its grammar was checked; simplify the grammar"


class Service:
    """Prepares and runs the requests of all APIs.

    Args:
        models: served name -> model.
        generate: runs one request; the caller closes its iterator to cancel the request.
        explain: returns the cascade's decision on a request for the model "auto".
        default_timeout_s: time limit from the arrival of a request to its last token.
        clock: returns seconds since the epoch.
        random_bits: number of bits -> a random integer, for requests without a seed.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        generate: Generate,
        *,
        explain: Explain = lambda request_id: None,
        default_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.models = models
        self._generate = generate
        self._explain = explain
        self._default_timeout_s = default_timeout_s
        self._clock = clock
        self._random_bits = random_bits
        self._grammar_checks = GrammarChecks()

    async def prepare(
        self,
        api: Api[ApiRequest],
        body: bytes,
        caller: Caller,
        begin: Callable[[RequestSpec], str] = lambda spec: "",
    ) -> RunningJob:
        """Check a request and make it ready to run. Raises `RequestError`.

        Args:
            begin: called as soon as it is known what the request asks for. Returns the traceparent
                of all work for it.
        """
        now = self._clock()

        def understand() -> RequestSpec:
            request = api.read(body)
            return api.understand(request, self.model(request.model), caller.min_priority)

        spec = await off_loop(len(body), understand)
        traceparent = begin(spec)
        of_model = RequestSlo(*spec.model.slo_s)
        slo = choose_slo(spec.slo, caller.slo, caller.least_slo, of_model)
        timeout_s = min(spec.timeout_s or self._default_timeout_s, self._default_timeout_s)
        deadline_unix_s = now - caller.waited_s + timeout_s
        next_step = PROMPT
        try:
            async with asyncio.timeout(deadline_unix_s - self._clock()):
                with telemetry.span("tokenize", traceparent) as span:
                    most = truncated_to(spec)
                    prompts = await tokenize_prompts(spec.prompts, spec.model, len(body), most)
                    span.set("disagg.num_prompt_tokens", sum(map(len, prompts)))
                next_step = GRAMMAR
                sampling = await fit(spec, prompts, self._grammar_checks)
        except TimeoutError:
            raise _too_late(next_step) from None
        seed = self._random_bits(63) if spec.seed is None else spec.seed
        named = partial(
            name_choices,
            spec,
            prompts,
            replace(sampling, seed=seed),
            caller,
            traceparent,
            slo=slo,
            created_unix_s=now,
            deadline_unix_s=deadline_unix_s,
        )
        job = await off_loop(TOKEN_NBYTES * sum(map(len, prompts)), named)
        return RunningJob(job, self._generate, self._explain)

    async def tokenize(self, body: bytes) -> bytes:
        """The response body of `/tokenize`. Raises `RequestError`."""

        def understand() -> tuple[TokenizeRequest, ServedModel, Prompt]:
            request = read_request(body, TokenizeRequest)
            model = self.model(request.model)
            return request, model, understand_tokenize(request, model)

        request, model, prompt = await off_loop(len(body), understand)
        token_ids = await self._tokenised(prompt, model, len(body))

        def answer() -> bytes:
            texts = None
            if request.return_token_strs:
                texts = [model.tokenizer.token_text(token_id) for token_id in token_ids]
            body = {"count": len(token_ids), "max_model_len": model.max_model_len}
            return msgspec.json.encode(body | {"tokens": token_ids, "token_strs": texts})

        return await off_loop(TOKEN_NBYTES * len(token_ids), answer)

    async def count_tokens(self, body: bytes) -> bytes:
        """The response body of `/v1/messages/count_tokens`. Raises `RequestError`."""

        def understand() -> tuple[ServedModel, Prompt]:
            request = read_count(body)
            model = self.model(request.model)
            return model, understand_count(request, model)

        model, prompt = await off_loop(len(body), understand)
        token_ids = await self._tokenised(prompt, model, len(body))
        return msgspec.json.encode({"input_tokens": len(token_ids)})

    async def _tokenised(self, prompt: Prompt, model: ServedModel, nbytes: int) -> list[int]:
        """Tokenize one prompt, with a time limit."""
        try:
            async with asyncio.timeout(self._default_timeout_s):
                (token_ids,) = await tokenize_prompts([prompt], model, nbytes)
        except TimeoutError:
            raise _too_late(PROMPT) from None
        return token_ids

    async def embeddings(self, body: bytes) -> bytes:
        """Refuse a request to `/v1/embeddings`. Raises `RequestError` always."""
        request = await off_loop(len(body), lambda: read_request(body, EmbeddingsRequest))
        raise invalid_value(
            "model",
            f"{self.model(request.model).name!r} is a generative model without a pooling head, so"
            " it cannot compute embeddings.",
        )

    async def detokenize(self, body: bytes) -> bytes:
        """The response body of `/detokenize`. Raises `RequestError`."""

        def answer() -> bytes:
            request = read_request(body, DetokenizeRequest)
            model = self.model(request.model)
            check_ids(request.tokens, model, "tokens")
            text = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
            return msgspec.json.encode({"prompt": text})

        return await off_loop(len(body), answer)

    def model(self, name: str | None) -> ServedModel:
        """Find a model by name. The name may be None if only one model is served.

        Raises:
            InvalidRequest: the name is missing.
            ModelNotFound: there is no such model; the message lists the served models.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        served = f"this server has {', '.join(self.models)}."
        if name is None:
            raise InvalidRequest(
                f"Missing required parameter: model; {served}",
                code="missing_required_parameter",
                param="model",
            )
        found = self.models.get(name) or self._by_full_name(name)
        if found is None:
            raise ModelNotFound(f"There is no model {name[:128]!r}; {served}", param="model")
        return found

    def _by_full_name(self, name: str) -> ServedModel | None:
        named = (each for each in self.models.values() if name and each.full_name == name)
        return next(named, None)


def _too_late(next_step: str) -> DeadlineExceeded:
    """The error for a deadline that passed before the request was sent to a worker.

    A thread that still works on the request ends at its own time limit.
    """
    return DeadlineExceeded(
        f"The request's deadline passed before {next_step}, or increase the timeout."
    )
