"""`AsyncLLM`: a model in this process, for programs that have an event loop."""

from __future__ import annotations

import operator
import reprlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace as with_fields
from tqdm import tqdm

from disagg.api.apis import CHAT, COMPLETIONS, Api
from disagg.api.openai.fields import ChatRequest, CompletionRequest
from disagg.api.openai.requests import understand_chat, understand_completion
from disagg.api.request_spec import RequestSpec
from disagg.api.running_job import RunningJob
from disagg.api.served_model import ServedModel
from disagg.api.service import Caller
from disagg.batch.run import side_by_side
from disagg.errors import DisaggError
from disagg.llm.outputs import RequestOutput, request_output
from disagg.llm.own_fleet import local_config, num_ahead, own_fleet
from disagg.llm.params import DEFAULT_MAX_TOKENS, SamplingParams
from disagg.local import LocalCluster

# A text, its token ids, or a dict with one of them: `prompt` or `prompt_token_ids`.
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class Asked(msgspec.Struct, frozen=True):
    """A request as it would come by HTTP, and the text of its prompt."""

    api: Api
    fields: Mapping[str, Any]
    prompt: str | None = None


class AsyncLLM:
    """A model that answers in this process, as `disagg serve` would: with the same router, engine
    and API, but without HTTP.

        async with AsyncLLM("demo-small") as llm:
            outputs = await llm.generate(["1 + 1 =", "2 + 2 ="], SamplingParams(temperature=0))

    Args:
        model: as `disagg serve` takes it: a directory, a name of Hugging Face, a GGUF file, ...
        num_prefill, num_decode: number of workers of each role. They are threads of this process
            and share its device; one that does both is fastest unless you test disaggregation.
        settings: those of the engine with vLLM's names, such as `tensor_parallel_size`,
            `max_model_len`, `quantization`, `kv_cache_dtype`
            (docs/reference/configuration.md#engineconfig); and `revision`, `chat_template`,
            `tool_call_parser`, `reasoning_parser` of the model.

    Raises:
        StartupError: a setting is wrong (now), or the model cannot be loaded (at `start`).
    """

    def __init__(
        self, model: str, *, num_prefill: int = 0, num_decode: int = 1, **settings: Any
    ) -> None:
        self._config = local_config([model], num_prefill, num_decode, settings)
        self._name = self._config.tiers[0].name
        self._running = AsyncExitStack()
        self._cluster: LocalCluster | None = None

    async def start(self) -> AsyncLLM:
        """Load the model, which a first use downloads. Returns itself."""
        if self._cluster is None:
            self._cluster = await self._running.enter_async_context(own_fleet(self._config))
        return self

    async def close(self) -> None:
        """End the workers, and with them what still runs."""
        self._cluster = None
        await self._running.aclose()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def served_model(self) -> ServedModel:
        """Tokenizer, chat template and limits of the model."""
        return self._started().ingress.service.model(self._name)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts. Returns an output for each, in their order.

        Args:
            sampling_params: for all prompts, or one for each; None: the model's defaults.
            use_tqdm: whether a terminal shows the progress.

        Raises:
            RequestError: a prompt or parameter is wrong; the message says of which prompt.
        """
        every: Any = [prompts] if _is_prompt(prompts) else prompts
        return await self._ask_all(asked_text, every, sampling_params, {}, use_tqdm)

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. Returns an output for each, in their order.

        Args:
            fields: further ones of `/v1/chat/completions`, such as `tools`, `tool_choice`,
                `chat_template_kwargs`, `add_generation_prompt`, `reasoning_effort`.
        """
        every: Any = [messages] if _is_conversation(messages) else messages
        return await self._ask_all(asked_chat, every, sampling_params, fields, use_tqdm)

    async def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        **fields: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt, or a conversation. Each output has what is new since the last one.

        Closing the iterator ends the answer. `fields` are as in `chat`, for conversations.
        """
        ask: Any = asked_chat if _is_conversation(prompt) else asked_text
        asked = ask(prompt, sampling_params, fields)
        run = await self._prepare(asked)
        async with aclosing(run.batches()) as batches:
            async for batch in batches:
                yield request_output(run, batch, asked.prompt)

    async def _ask_all(
        self,
        ask: Callable[..., Asked],
        every: Sequence[Any],
        params: Params,
        fields: Mapping[str, Any],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Answer all, so many at a time as keep the workers busy."""
        each_params = _for_each(params, len(every))
        asked = [ask(*each, fields) for each in zip(every, each_params, strict=True)]
        outputs: list[RequestOutput | None] = [None] * len(asked)
        with tqdm(total=len(asked), unit="prompt", disable=None if use_tqdm else True) as bar:

            async def answer(item: tuple[int, Asked]) -> None:
                number, request = item
                try:
                    outputs[number] = await self._answer(request)
                except DisaggError as error:
                    if len(asked) > 1:
                        error.message = f"Prompt {number} of {len(asked)}: {error.message}"
                        error.args = (error.message,)
                    raise
                bar.update()

            await side_by_side(answer, _numbered(asked), num_ahead(self._started()))
        return [output for output in outputs if output is not None]

    async def _answer(self, asked: Asked) -> RequestOutput:
        run = await self._prepare(asked)
        run.keep()
        async with aclosing(run.batches()) as batches:
            async for _ in batches:
                pass
        return request_output(run, run.kept, asked.prompt)

    async def _prepare(self, asked: Asked) -> RunningJob:
        service = self._started().ingress.service
        caller = Caller(asked.api.id_prefix + secrets.token_hex(16))
        return await service.prepare(asked.api, msgspec.json.encode(asked.fields), caller)

    def _started(self) -> LocalCluster:
        if self._cluster is None:
            raise RuntimeError("The model is not loaded: use `async with`, or await start().")
        return self._cluster


async def _numbered(asked: Sequence[Asked]) -> AsyncGenerator[tuple[int, Asked], None]:
    for item in enumerate(asked):
        yield item


def asked_text(prompt: Prompt, params: SamplingParams | None, fields: Mapping[str, Any]) -> Asked:
    """The request for the continuation of a prompt. Raises `TypeError` for what is none."""
    text: Any = prompt
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(text, str):
        try:
            text = [operator.index(token_id) for token_id in text]
        except TypeError:
            raise TypeError(
                f"A prompt is a text, a list of token ids, or a dict with prompt or"
                f" prompt_token_ids, not {reprlib.repr(prompt)}."
            ) from None
    asked = {"max_tokens": DEFAULT_MAX_TOKENS} if params is None else params.fields()
    wanted = {"prompt": text, **asked, **_checked(fields, CompletionRequest)}
    return Asked(_TEXT, wanted, text if isinstance(text, str) else None)


def asked_chat(
    messages: Messages, params: SamplingParams | None, fields: Mapping[str, Any]
) -> Asked:
    """The request for the answer to a conversation."""
    asked = {"max_tokens": DEFAULT_MAX_TOKENS} if params is None else params.chat_fields()
    return Asked(_CHAT, {"messages": messages, **asked, **_checked(fields, ChatRequest)})


def _checked(fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """`fields`, of which the API has each. By HTTP it ignores unknown ones, which clients send."""
    for name in fields.keys() - set(kind.__struct_fields__):
        raise TypeError(f"There is no field {name!r} of requests (docs/api.md#fields).")
    return fields


def _is_prompt(prompts: Any) -> bool:
    """Whether it is one prompt and not several."""
    return isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))


def _is_conversation(messages: Any) -> bool:
    """Whether it is one conversation: a list of messages."""
    is_list = not isinstance(messages, str | Mapping) and bool(messages)
    return is_list and isinstance(messages[0], Mapping)


def _for_each(params: Params, number: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * number
    if len(params) != number:
        raise ValueError(f"There are {number} prompts and {len(params)} sampling_params.")
    return params


def _in_full(spec: RequestSpec) -> RequestSpec:
    """With token ids, and without a limit of tokens unless it was set."""
    return with_fields(spec, return_token_ids=True, default_max_tokens=None)


_TEXT = replace(COMPLETIONS, understand=lambda *args: _in_full(understand_completion(*args)))
_CHAT = replace(CHAT, understand=lambda *args: _in_full(understand_chat(*args)))
