"""Turns the bytes of a request into `GenerateRequest`s in five steps, and runs them.

The steps are read, understand, tokenize, fit and name. An invalid request is refused here, before
it is sent to a worker: all functions raise `RequestError`. APIs differ in the first two steps and
in the format of answers (`apis`). Knows neither HTTP nor workers: `generate` is an argument.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from disagg import telemetry
from disagg.api.anthropic import CountTokensRequest, understand_count
from disagg.api.apis import Api
from disagg.api.images import RemoteImage, fetch_images
from disagg.api.json_body import off_loop, read_body
from disagg.api.openai.fields import (
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from disagg.api.openai.requests import understand_tokenize
from disagg.api.openai.structured_output import GrammarChecks
from disagg.api.prompts import tokenize_prompts
from disagg.api.refusals import invalid_value, too_long, unsupported
from disagg.api.request_spec import (
    Conversation,
    Prompt,
    RequestSlo,
    RequestSpec,
    Text,
    choose_slo,
)
from disagg.api.running_job import Explain, Generate, RunningJob, num_prompt_scores
from disagg.api.served_model import ServedModel
from disagg.blocks import hash_blocks, hash_image, hash_root, image_digest
from disagg.errors import DeadlineExceeded, InvalidRequest, ModelNotFound
from disagg.messages import GenerateRequest, Grammar, SamplingParams, Thinking
from disagg.text.answer_reader import prompt_tail
from disagg.text.tool_parsers.harmony import ANALYSIS, FINAL_THEN

Asked = TypeVar("Asked", TokenizeRequest, CountTokensRequest)

TOKEN_NBYTES = 4  # assumed size of a token id, to decide whether work on many of them blocks

IMAGES = "its images were fetched; send them as data: URLs"
PROMPT = "its prompt was tokenized; shorten the prompt"
GRAMMAR = "its grammar was checked; simplify the grammar"


class Caller(msgspec.Struct, frozen=True):
    """What the HTTP layer knows about a request besides its body."""

    request_id: str
    tenant: str = ""
    waited_s: float = 0.0  # time since the request arrived
    min_priority: int = 0  # lowest priority number that the request may set
    slo: RequestSlo = RequestSlo()  # SLOs from the request's headers
    least_slo: RequestSlo = RequestSlo()  # shortest SLOs that the tenant may set; 0: the model's
    timeout_s: float = 0.0  # the longest time limit that the request may set; 0: the server's


class AdapterTable(Protocol):
    """The LoRA adapters of an ingress; see `ingress.adapters.ServedAdapters`."""

    def all(self) -> list[ServedModel]: ...
    def find(self, name: str) -> ServedModel | None: ...
    async def load(self, name: str, path: str, model: str | None, *, in_place: bool) -> None: ...
    async def unload(self, name: str) -> None: ...


class Service:
    """Prepares and runs the requests of all APIs.

    Args:
        models: served name -> model.
        generate: runs one request; the caller closes its iterator to cancel the request.
        adapters: LoRA adapters, which clients name as models.
        explain: returns the cascade's decision on a request for the model "auto".
        default_timeout_s: time limit from the arrival of a request to its last token.
        clock: returns seconds since the epoch.
        random_bits: number of bits -> a random integer, for requests without a seed.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        generate: Generate,
        adapters: AdapterTable,
        *,
        explain: Explain = lambda request_id: None,
        default_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.models = models
        self._adapters = adapters
        self._generate = generate
        self._explain = explain
        self._default_timeout_s = default_timeout_s
        self._clock = clock
        self._random_bits = random_bits
        self._grammar_checks = GrammarChecks()

    async def prepare(
        self,
        api: Api,
        body: bytes,
        caller: Caller,
        begin: Callable[[RequestSpec], str] = lambda spec: "",
    ) -> RunningJob:
        """Check a request and make it ready to run.

        Args:
            begin: called as soon as it is known what the request asks for. Returns the traceparent
                of all work for it.
        """
        now = self._clock()

        def understand() -> RequestSpec:
            request: Any = read_body(body, api.request)
            spec = api.understand(request, self.model(request.model))
            return replace(spec, priority=priority_of(spec, caller.min_priority))

        spec = await off_loop(len(body), understand)
        traceparent = begin(spec)
        of_model = RequestSlo(*spec.model.slo_s)
        slo = choose_slo(spec.slo, caller.slo, caller.least_slo, of_model)
        most_s = caller.timeout_s or self._default_timeout_s
        deadline_unix_s = now - caller.waited_s + min(spec.timeout_s or most_s, most_s)
        next_step = IMAGES
        try:
            left_s = min(deadline_unix_s - self._clock(), self._default_timeout_s)
            async with asyncio.timeout(left_s):
                images = await fetch_images(_images_of(spec), spec.num_choices)
                next_step = PROMPT
                with telemetry.span("tokenize", traceparent) as span:
                    most = truncated_to(spec)
                    prompts = await tokenize_prompts(spec.prompts, spec.model, len(body), most)
                    span.set("disagg.num_prompt_tokens", sum(map(len, prompts)))
                next_step = GRAMMAR
                sampling = await fit(spec, prompts, self._grammar_checks)
        except TimeoutError:
            raise _too_late(next_step) from None
        seed = self._random_bits(63) if spec.seed is None else spec.seed
        common = GenerateRequest(
            request_id=caller.request_id,
            model=spec.model.worker_model,
            token_ids=(),
            num_prompt_tokens=0,
            hash_root=b"",
            block_hashes=(),
            sampling=replace(sampling, seed=seed),
            deadline_unix_s=deadline_unix_s,
            tenant=caller.tenant,
            priority=spec.priority or 0,
            traceparent=traceparent,
            cache_salt=spec.cache_salt,
            ttft_slo_s=slo.ttft_s,
            tpot_slo_s=slo.tpot_s,
            images=tuple(images),
        )
        nbytes = TOKEN_NBYTES * sum(map(len, prompts)) + sum(map(len, images))
        requests, echoes = await off_loop(nbytes, lambda: name_choices(spec, prompts, common))
        spec = replace(spec, prompts=())
        return RunningJob(
            caller.request_id, int(now), spec, requests, self._generate, self._explain, echoes
        )

    async def tokenize(self, body: bytes) -> bytes:
        """The response body of `/tokenize`."""
        asked = await self._tokenize(body, TokenizeRequest, understand_tokenize)
        request, model, token_ids = asked

        def answer() -> bytes:
            texts = None
            if request.return_token_strs:
                texts = [model.tokenizer.token_text(token_id) for token_id in token_ids]
            body = {"count": len(token_ids), "max_model_len": model.max_model_len}
            return msgspec.json.encode(body | {"tokens": token_ids, "token_strs": texts})

        return await off_loop(TOKEN_NBYTES * len(token_ids), answer)

    async def count_tokens(self, body: bytes) -> bytes:
        """The response body of `/v1/messages/count_tokens`."""
        _, _, token_ids = await self._tokenize(body, CountTokensRequest, understand_count)
        return msgspec.json.encode({"input_tokens": len(token_ids)})

    async def _tokenize(
        self,
        body: bytes,
        kind: type[Asked],
        understand: Callable[[Asked, ServedModel], Prompt],
    ) -> tuple[Asked, ServedModel, list[int]]:
        """A request for the tokens of one prompt, its model, and the tokens."""

        def find_prompt() -> tuple[Asked, ServedModel, Prompt]:
            request = read_body(body, kind)
            model = self.model(request.model)
            prompt = understand(request, model)
            if isinstance(prompt, Conversation) and prompt.images:
                raise InvalidRequest(
                    "Invalid messages: only an engine knows how many tokens an image has. Leave the"
                    " images out.",
                    code="unsupported_content",
                    param="messages",
                )
            return request, model, prompt

        request, model, prompt = await off_loop(len(body), find_prompt)
        try:
            async with asyncio.timeout(self._default_timeout_s):
                (token_ids,) = await tokenize_prompts([prompt], model, len(body))
        except TimeoutError:
            raise _too_late(PROMPT) from None
        return request, model, token_ids

    async def detokenize(self, body: bytes) -> bytes:
        """The response body of `/detokenize`."""

        def answer() -> bytes:
            request = read_body(body, DetokenizeRequest)
            model = self.model(request.model)
            check_ids(request.tokens, model, "tokens")
            text = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
            return msgspec.json.encode({"prompt": text})

        return await off_loop(len(body), answer)

    async def load_adapter(self, body: bytes) -> str:
        """Serve a LoRA adapter, `/v1/load_lora_adapter`. Returns a sentence."""
        asked = read_body(body, LoadAdapterRequest)
        names = asked.lora_name, asked.lora_path, asked.base_model
        await self._adapters.load(*names, in_place=asked.load_inplace)
        return f"Success: LoRA adapter '{asked.lora_name}' added successfully."

    async def unload_adapter(self, body: bytes) -> str:
        """Serve a LoRA adapter no more, `/v1/unload_lora_adapter`. Returns a sentence."""
        asked = read_body(body, UnloadAdapterRequest)
        await self._adapters.unload(asked.lora_name)
        return f"Success: LoRA adapter '{asked.lora_name}' removed successfully."

    def all_models(self) -> list[ServedModel]:
        """The models and adapters that clients may name."""
        return [*self.models.values(), *self._adapters.all()]

    def model(self, name: str | None) -> ServedModel:
        """Find a model by name, which may be None if only one model is served.

        Raises:
            InvalidRequest: the name is missing.
            ModelNotFound: there is no such model.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        served = f"this server has {', '.join(each.name for each in self.all_models())}."
        if name is None:
            raise InvalidRequest(
                f"Missing required parameter: model; {served}",
                code="missing_required_parameter",
                param="model",
            )
        full = (each for each in self.models.values() if name and each.full_name == name)
        found = self.models.get(name) or next(full, None) or self._adapters.find(name)
        if found is None:
            raise ModelNotFound(f"There is no model {name[:128]!r}; {served}", param="model")
        return found


def _images_of(spec: RequestSpec) -> Sequence[bytes | RemoteImage]:
    prompt = spec.prompts[0]
    return prompt.images if isinstance(prompt, Conversation) else ()


def priority_of(spec: RequestSpec, min_priority: int) -> int:
    """The priority of a request that may ask for `min_priority`."""
    if spec.priority is None:
        return max(spec.hinted_priority, min_priority)
    if spec.priority < min_priority:
        raise invalid_value(
            "priority",
            f"{spec.priority} is below {min_priority}, the lowest number that your API key allows.",
        )
    return spec.priority


def _too_late(next_step: str) -> DeadlineExceeded:
    """The error for a deadline that passed before the request was sent to a worker.

    A thread that still works on the request ends at its own time limit.
    """
    return DeadlineExceeded(
        f"The request's deadline passed before {next_step}, or increase the timeout."
    )


def name_choices(
    spec: RequestSpec, prompts: Sequence[Sequence[int]], common: GenerateRequest
) -> tuple[tuple[GenerateRequest, ...], tuple[str, ...]]:
    """Give each choice an id and a seed, and hash the blocks of each prompt.

    Returns the requests, and the texts of the prompts if they are to be repeated.

    Args:
        prompts: the token ids of each prompt.
        common: the request without its prompt; id and seed are of the first choice.
    """
    requests: list[GenerateRequest] = []
    for token_ids in prompts:
        whole = replace(common, token_ids=tuple(token_ids), num_prompt_tokens=len(token_ids))
        request, first = hash_request(whole, spec.model), len(requests)
        requests += [_choice(request, first + index) for index in range(spec.num_choices)]
    return tuple(requests), _texts(spec, prompts) if spec.echo else ()


def hash_request(request: GenerateRequest, model: ServedModel) -> GenerateRequest:
    """A copy of `request` for `model`, with that model's block hashes."""
    cache_tenant = f"{request.tenant}/{request.cache_salt}"
    digest = "" if model.adapter is None else model.adapter.digest
    root = hash_root(model.fingerprint, model.block_size, cache_tenant, digest)
    token_ids = request.token_ids
    if request.images and model.images is not None:
        begin = token_ids.index(model.images.mark_id)
        token_ids = token_ids[: begin - begin % model.block_size]
    hashes = hash_blocks(root, token_ids, model.block_size)
    if request.images:
        hashes.append(hash_image([root, *hashes][-1], image_digest(request.images[0])))
    return replace(
        request,
        model=model.worker_model,
        adapter=model.adapter,
        hash_root=root,
        block_hashes=tuple(hashes),
        block_size=model.block_size,
    )


def _choice(request: GenerateRequest, index: int) -> GenerateRequest:
    """The request of choice `index`. Choices after the first have derived ids and seeds."""
    if index == 0:
        return request
    raw = request.sampling.seed.to_bytes(8, "little", signed=True) + index.to_bytes(4, "little")
    seed = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1
    sampling = replace(request.sampling, seed=seed)
    return replace(request, request_id=f"{request.request_id}-{index}", sampling=sampling)


def _texts(spec: RequestSpec, prompts: Sequence[Sequence[int]]) -> tuple[str, ...]:
    decode = spec.model.tokenizer.decode
    if spec.truncate_prompt_tokens is not None:
        return tuple(map(decode, prompts))
    pairs = zip(spec.prompts, prompts, strict=True)
    return tuple(prompt.text if isinstance(prompt, Text) else decode(ids) for prompt, ids in pairs)


MAX_PROMPT_SCORES = 1 << 19  # largest number of prompt log-probabilities in one response


def truncated_to(spec: RequestSpec) -> int | None:
    """The number of last tokens to which each prompt is cut; None if prompts are not cut."""
    if spec.truncate_prompt_tokens != -1:
        return spec.truncate_prompt_tokens
    for_answer = spec.max_tokens or spec.default_max_tokens or 1
    return max(1, spec.model.max_model_len - for_answer)


async def fit(
    spec: RequestSpec, prompts: Sequence[Sequence[int]], checks: GrammarChecks
) -> SamplingParams:
    """The complete sampling parameters for `prompts` (token ids), except for the seed.

    Raises:
        ContextLengthExceeded: a prompt, or a prompt and its answer together, is too long.
        Overloaded: too many grammars are being checked.
    """
    model, sampling, grammar = spec.model, spec.sampling, None
    max_tokens = _max_tokens(spec, prompts)
    num_scores = sum(num_prompt_scores(sampling, len(each)) for each in prompts)
    if num_scores * spec.num_choices > MAX_PROMPT_SCORES:
        raise invalid_value(
            "prompt_logprobs",
            f"the response would have {num_scores * spec.num_choices} log-probabilities of"
            f" prompt tokens; at most {MAX_PROMPT_SCORES} are allowed. Send several requests.",
        )
    for token_ids in prompts:
        check_ids(token_ids, model, spec.prompt_param)
    num_images = len(_images_of(spec))
    if model.images is not None and prompts[0].count(model.images.mark_id) < num_images:
        raise invalid_value("messages", "the chat template does not show all of the images.")
    # The model's end tokens are not checked: their ids may be above those allowed in prompts.
    stops = [number for number in sampling.stop_token_ids if number not in model.eos_token_ids]
    check_ids(stops, model, "stop_token_ids")
    check_ids([token_id for token_id, _ in sampling.logit_bias], model, "logit_bias")
    check_ids(sampling.allowed_token_ids, model, "allowed_token_ids")
    bad_words = _tokens_of_words(spec.bad_words, model)
    _check_some_allowed(sampling, bad_words)
    if sampling.min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens",
            f"{sampling.min_tokens} is above {max_tokens}, the largest number of tokens of the"
            " answer.",
        )
    if spec.grammar is not None:
        param, grammar = spec.grammar
        await checks.check(param, grammar, model)
    top_k = min(sampling.top_k, model.vocab_size)
    return replace(
        sampling,
        max_tokens=max_tokens,
        top_k=top_k,
        grammar=grammar,
        thinking=thinking_of(spec, grammar, prompts[0]),
        bad_words_token_ids=bad_words,
    )


def check_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Check that token ids are in the model's vocabulary."""
    if token_ids and (largest := max(token_ids)) >= model.vocab_size:
        # A tokenizer may have added tokens that the model does not have.
        tokenizer = model.tokenizer
        is_known = largest < tokenizer.num_ids
        named = f" ({tokenizer.token_text(largest)[:64]!r})" if is_known else ""
        raise invalid_value(
            param,
            f"token id {largest}{named} is not below {model.vocab_size}, the vocabulary size of"
            f" {model.name!r}.",
        )


def _tokens_of_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The token sequences of bad words, both with and without a space before the word.

    Left out are a sequence that ends with a token that is forbidden by itself, and one that the
    model cannot write: a tokenizer may have tokens, such as an added [PAD], that the model has not.
    """
    encode = model.tokenizer.encode
    texts = [text for word in words for text in (word, f" {word}")]
    encoded = {tuple(encode(text, add_special_tokens=False)) for text in texts} - {()}
    found = {word for word in encoded if max(word) < model.vocab_size}
    single = {word[0] for word in found if len(word) == 1}
    return tuple(sorted(word for word in found if len(word) == 1 or word[-1] not in single))


def _check_some_allowed(sampling: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
    """Check that some token can be chosen."""
    allowed = set(sampling.allowed_token_ids)
    if allowed and allowed <= {word[0] for word in bad_words if len(word) == 1}:
        raise invalid_value("bad_words", "they forbid all of allowed_token_ids.")
    if allowed and sampling.min_tokens and allowed <= set(sampling.stop_token_ids):
        raise invalid_value(
            "min_tokens", "it cannot be reached, because all of allowed_token_ids end the answer."
        )


def _max_tokens(spec: RequestSpec, prompts: Sequence[Sequence[int]]) -> int:
    """The largest number of tokens of each answer. It must fit after every prompt."""
    model, param, max_tokens = spec.model, spec.prompt_param, spec.max_tokens
    if not all(prompts):
        raise invalid_value(param, "the prompt has no tokens.")
    longest = max(map(len, prompts))
    room = model.max_model_len - longest
    if room < 1:
        raise too_long(
            f"The prompt is too long: it has {longest} tokens, and one of answer must fit.",
            model.max_model_len,
            param,
        )
    if max_tokens is not None and max_tokens > room:
        alone = max_tokens >= model.max_model_len
        raise too_long(
            f"{'max_tokens is too large' if alone else 'The prompt is too long for max_tokens'}:"
            f" max_tokens is {max_tokens}, the prompt has {longest} tokens, and at most {room} are"
            " left for the answer.",
            model.max_model_len,
            "max_tokens",
        )
    return max_tokens if max_tokens is not None else min(room, spec.default_max_tokens or room)


def thinking_of(
    spec: RequestSpec, grammar: Grammar | None, token_ids: Sequence[int]
) -> Thinking | None:
    """The reasoning settings of a request with the prompt `token_ids`; None if there are none.

    A budget is refused if the model's marks are ordinary text, or tokens that it does not have.
    """
    reasoning = spec.syntax.reasoning if spec.syntax else None
    budget = spec.thinking_token_budget
    if reasoning is None or (grammar is None and budget is None):
        return None
    model = spec.model
    marks = reasoning.ends[:1]
    if reasoning.is_harmony:
        marks = (*marks, reasoning.forced_end, FINAL_THEN)
    if any(token_id >= model.vocab_size for mark in marks for token_id in _ids(model, mark)):
        _refuse_budget(spec, "with a token that its weights do not have")
        return None
    if reasoning.is_harmony:
        return Thinking(
            starts=(_ids(model, ANALYSIS),),
            end=_ids(model, reasoning.ends[0]),
            forced_end=_ids(model, reasoning.forced_end),
            then=_ids(model, FINAL_THEN),
            is_framed=True,
            budget=budget,
        )
    end = _ids(model, reasoning.ends[0])
    if len(end) > 1:  # a model may write the same text with other tokens
        _refuse_budget(spec, "with ordinary text instead of a special token")
        return None
    tail = prompt_tail(model.tokenizer, token_ids)
    if grammar is not None and reasoning.is_closed(tail):
        return None  # the answer starts at once, without reasoning
    # Some models write a line break before a mark.
    starts = tuple(_ids(model, br + mark) for mark in reasoning.starts for br in ("", "\n"))
    return Thinking(
        starts=starts,
        end=end,
        forced_end=end,
        is_open=reasoning.is_open(tail),
        budget=budget,
    )


def _refuse_budget(spec: RequestSpec, ends: str) -> None:
    if spec.thinking_token_budget is not None:
        raise unsupported(
            "thinking_token_budget", f"The model {spec.model.name!r} ends its reasoning {ends}."
        )


def _ids(model: ServedModel, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))
