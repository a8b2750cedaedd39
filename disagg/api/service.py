"""OpenAI requests to generate requests: the one place where a model's limits are applied.

Everything that can be wrong with a request is found here, before any worker hears of it. Knows
nothing of HTTP and nothing of where an answer is computed: that is `generate`.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from disagg import telemetry
from disagg.api.openai.answers import Choice, Explain, Generate, Job, RunningJob
from disagg.api.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from disagg.api.openai.structured_output import GrammarChecks, wanted_grammar
from disagg.api.openai.tool_calls import CallSyntax
from disagg.api.openai.tools import call_syntax, required_calls
from disagg.api.prompts import chat_tokens, check_ids, completion_tokens, text_tokens
from disagg.api.served_model import ServedModel
from disagg.blocks import hash_blocks, hash_root
from disagg.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, ModelNotFound
from disagg.messages import GenerateRequest, Grammar, SamplingParams

Number = TypeVar("Number", int, float)
Tokens = TypeVar("Tokens")

GREEDY_BELOW = 1e-5  # a temperature this small overflows the division and means greedy
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass(frozen=True)
class Caller:
    """What the HTTP side knows about a request besides its body."""

    request_id: str
    tenant: str = ""
    traceparent: str = ""
    waited_s: float = 0.0  # from its arrival until now
    min_priority: int = 0  # the lowest number it may ask for


class Service:
    """
    Args:
        models: served name -> model.
        generate: runs one request; its iterator is closed when the answer is no longer wanted.
        explain: what the cascade decided of a request that left its model open.
        default_timeout_s: from arrival to the last token.
        clock: seconds since the epoch.
        random_bits: number of bits -> a random integer, for seeds that clients leave open.
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

    def model(self, name: str | None) -> ServedModel:
        """The model a client asks for; it may be left out when only one is served.

        Raises:
            ModelNotFound: names the models there are.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise InvalidRequest(
                f"Missing required parameter: model; served: {', '.join(self.models)}.",
                code="missing_required_parameter",
                param="model",
            )
        found = self.models.get(name)
        if found is None:
            raise ModelNotFound(
                f"There is no model {name[:128]!r}; served: {', '.join(self.models)}.",
                param="model",
            )
        return found

    async def chat(self, request: ChatRequest, caller: Caller) -> RunningJob:
        """Check a chat request and make it ready to run. Raises `RequestError`."""
        model, deadline_unix_s = self.model(request.model), self._deadline(request, caller)
        calls = call_syntax(request, model)
        with telemetry.span("tokenize", caller.traceparent) as span:
            token_ids = await self._in_time(deadline_unix_s, chat_tokens(model, request))
            span.set("disagg.num_prompt_tokens", len(token_ids))
        limit = self._token_limit(model, [token_ids], request.token_limit, None, "messages")
        wanted = wanted_grammar(request, required_calls(request))
        grammar = await self._checked(wanted, model, deadline_unix_s)
        return self._run(
            request, caller, model, [token_ids], limit, deadline_unix_s, grammar, calls=calls
        )

    async def complete(self, request: CompletionRequest, caller: Caller) -> RunningJob:
        """Check a text completion request and make it ready to run. Raises `RequestError`."""
        model, deadline_unix_s = self.model(request.model), self._deadline(request, caller)
        with telemetry.span("tokenize", caller.traceparent) as span:
            token_lists, echoes = await self._in_time(
                deadline_unix_s, completion_tokens(model, request)
            )
            span.set("disagg.num_prompt_tokens", sum(map(len, token_lists)))
        limit = self._token_limit(
            model, token_lists, request.token_limit, DEFAULT_COMPLETION_TOKENS, "prompt"
        )
        grammar = await self._checked(wanted_grammar(request), model, deadline_unix_s)
        return self._run(
            request, caller, model, token_lists, limit, deadline_unix_s, grammar, echoes
        )

    async def tokenize(self, request: TokenizeRequest) -> tuple[ServedModel, list[int]]:
        model, deadline_unix_s = self.model(request.model), self._clock() + self._default_timeout_s
        if request.messages is not None:
            return model, await self._in_time(deadline_unix_s, chat_tokens(model, request))
        special = request.add_special_tokens is not False
        encoding = text_tokens(model, request.prompt or "", special)
        return model, await self._in_time(deadline_unix_s, encoding)

    def detokenize(self, request: DetokenizeRequest) -> str:
        model = self.model(request.model)
        check_ids(request.tokens, model, "tokens")
        return model.tokenizer.decode(request.tokens, skip_special_tokens=False)

    def _deadline(self, request: ChatRequest | CompletionRequest, caller: Caller) -> float:
        """When the answer must be complete, in Unix seconds; a client may ask for less time."""
        limit_s = self._default_timeout_s
        if request.timeout is not None:
            limit_s = min(request.timeout, limit_s)
        return self._clock() - caller.waited_s + limit_s

    async def _checked(
        self, wanted: tuple[str, Grammar] | None, model: ServedModel, deadline_unix_s: float
    ) -> Grammar | None:
        """What the answer must look like, if that can be done. Raises `InvalidRequest`."""
        if wanted is None:
            return None
        param, grammar = wanted
        checking = self._grammar_checks.check(param, grammar, model)
        await self._in_time(deadline_unix_s, checking, "its grammar was checked; make it simpler")
        return grammar

    async def _in_time(
        self,
        deadline_unix_s: float,
        work: Awaitable[Tokens],
        what: str = "its prompt was read; shorten the prompt",
    ) -> Tokens:
        """Raises `DeadlineExceeded`; what runs in a thread then has a limit of its own."""
        try:
            async with asyncio.timeout(deadline_unix_s - self._clock()):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(
                f"The request's deadline passed before {what} or allow more time."
            ) from None

    def _token_limit(
        self,
        model: ServedModel,
        token_lists: Sequence[Sequence[int]],
        asked: int | None,
        default: int | None,
        param: str,
    ) -> int:
        """The number of tokens each answer may have, which must fit behind every prompt."""
        longest = max(len(token_ids) for token_ids in token_lists)
        if not all(token_lists):
            raise InvalidRequest(
                f"Invalid {param}: the prompt has no tokens.", code="invalid_value", param=param
            )
        room = model.max_model_len - longest
        if room < 1:
            raise ContextLengthExceeded(
                f"The prompt has {longest} tokens; with at least one token of answer, the model"
                f" {model.name!r} takes at most {model.max_model_len - 1}. Shorten the prompt.",
                param=param,
            )
        if asked is not None and asked > room:
            raise ContextLengthExceeded(
                f"max_tokens is {asked}, but the model {model.name!r} takes"
                f" {model.max_model_len} tokens in all and the prompt has {longest}: at most"
                f" {room} are left for the answer.",
                param="max_tokens",
            )
        return asked if asked is not None else min(room, default or room)

    # Generate requests

    def _run(
        self,
        request: ChatRequest | CompletionRequest,
        caller: Caller,
        model: ServedModel,
        token_lists: Sequence[Sequence[int]],
        max_tokens: int,
        deadline_unix_s: float,
        grammar: Grammar | None,
        echoes: Sequence[str] = (),
        calls: CallSyntax | None = None,
    ) -> RunningJob:
        sampling = self._sampling(request, model, max_tokens, grammar)
        num_choices = request.n or 1
        choices: list[Choice] = []
        for token_ids in token_lists:
            made = self._generate_request(
                request, caller, model, token_ids, sampling, deadline_unix_s
            )
            for _ in range(num_choices):
                choices.append(self._choice(request, made, len(choices), calls))
        job = Job(
            id=caller.request_id,
            created_unix_s=int(self._clock()),
            model=model,
            choices=tuple(choices),
            num_choices=num_choices,
            num_logprobs=request.num_logprobs,
            include_usage=request.include_usage,
            echoes=tuple(echoes),
        )
        return RunningJob(job, self._generate, self._explain)

    def _generate_request(
        self,
        request: ChatRequest | CompletionRequest,
        caller: Caller,
        model: ServedModel,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        deadline_unix_s: float,
    ) -> GenerateRequest:
        unnamed = GenerateRequest(
            request_id=caller.request_id,
            model=model.name,
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            hash_root=b"",
            block_hashes=(),
            sampling=sampling,
            deadline_unix_s=deadline_unix_s,
            tenant=caller.tenant,
            priority=_priority(request, caller),
            traceparent=caller.traceparent,
            cache_salt=request.cache_salt or "",
        )
        return named(unnamed, model)

    @staticmethod
    def _choice(
        request: ChatRequest | CompletionRequest,
        made: GenerateRequest,
        index: int,
        calls: CallSyntax | None,
    ) -> Choice:
        """Choice `index` of a request: the first has its id and seed, the others derived ones."""
        if index > 0:
            made = replace(
                made,
                request_id=f"{made.request_id}-{index}",
                sampling=replace(made.sampling, seed=_derived_seed(made.sampling.seed, index)),
            )
        return Choice(
            index,
            made,
            stops=tuple(request.stop_strings),
            include_stop=bool(request.include_stop_str_in_output),
            # Some models mark their calls by control tokens.
            skip_special_tokens=calls is None and request.skip_special_tokens is not False,
            calls=calls,
        )

    def _sampling(
        self,
        request: ChatRequest | CompletionRequest,
        model: ServedModel,
        max_tokens: int,
        grammar: Grammar | None,
    ) -> SamplingParams:
        defaults = model.defaults
        stop_ids = request.stop_token_ids or []
        check_ids(stop_ids, model, "stop_token_ids")
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"Invalid min_tokens: {min_tokens} is above the {max_tokens} tokens that the"
                " answer may have.",
                code="invalid_value",
                param="min_tokens",
            )
        temperature = _given(request.temperature, defaults.temperature)
        top_k = max(0, _given(request.top_k, defaults.top_k))  # -1 is vLLM's "off"
        ends = () if request.ignore_eos else model.eos_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_k=min(top_k, model.vocab_size),
            top_p=_given(request.top_p, defaults.top_p),
            min_p=_given(request.min_p, defaults.min_p),
            repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            seed=request.seed if request.seed is not None else self._random_bits(63),
            logprobs=request.num_logprobs,
            stop_token_ids=tuple(dict.fromkeys((*ends, *stop_ids))),
            grammar=grammar,
        )


def named(request: GenerateRequest, model: ServedModel) -> GenerateRequest:
    """`request` for `model`, by which the names of its blocks are known there."""
    cache_tenant = f"{request.tenant}/{request.cache_salt}"
    root = hash_root(model.fingerprint, model.block_size, cache_tenant)
    hashes = tuple(hash_blocks(root, request.token_ids, model.block_size))
    return replace(
        request,
        model=model.name,
        hash_root=root,
        block_hashes=hashes,
        block_size=model.block_size,
    )


def _priority(request: ChatRequest | CompletionRequest, caller: Caller) -> int:
    if request.priority is None:
        return max(0, caller.min_priority)
    if request.priority < caller.min_priority:
        raise InvalidRequest(
            f"Invalid priority: {request.priority} is more urgent than {caller.min_priority}, the"
            " lowest number that your key may ask for.",
            code="invalid_value",
            param="priority",
        )
    return request.priority


def _derived_seed(seed: int, index: int) -> int:
    raw = seed.to_bytes(8, "little", signed=True) + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value
