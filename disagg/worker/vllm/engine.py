"""vLLM's `AsyncLLM` as the worker needs it. Only this file imports vllm and zmq.

Its scheduler and model run in a process of its own. What it says of each step (tokens, seconds) and
of its cache (KV events) reaches the worker's event loop as calls of `on_step` and `on_kv_events`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from disagg.adapters import Adapter
from disagg.blocks import image_digest
from disagg.config import TierConfig
from disagg.errors import EngineCannot, StartupError, WorkerLost
from disagg.host import free_port
from disagg.messages import FinishReason, Pooling, TokenLogprobs
from disagg.worker.vllm.arguments import check_settings, check_version, engine_arguments
from disagg.worker.vllm.prefixes import TheirEvent, read_batch

log = logging.getLogger(__name__)

NUM_SEQUENCE_NBYTES = 8
# Of all images of a request: vLLM limits those of one only, and a file of 0.5 MB can have as many.
MOST_PIXELS = 1 << 28  # 0.8 GB as RGB


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """What the engine gets of a request.

    sampling: keyword arguments of vLLM's `SamplingParams`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    salt: str
    sampling: Mapping[str, Any]
    priority: int = 0
    adapter: Adapter | None = None
    images: tuple[bytes, ...] = ()
    pooling: Pooling | None = None  # what is wanted in place of an answer


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What a sequence gained, as `messages.TokenDelta` has it.

    num_prompt_tokens: those of images included.
    kv_transfer_params: with the last output, for another engine that wants its KV.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    pooled: bytes | None = None  # as `TokenDelta` has it


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of the engine: prompt tokens of so many sequences, tokens of answers, seconds."""

    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_decoding: int = 0
    seconds: float = 0.0
    num_running: int = 0
    kv_usage: float = 0.0
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What the engine has settled at its start.

    block_nbytes: of KV on all its devices, about.
    layout: equal where KV can be exchanged.
    """

    block_size: int
    num_blocks: int
    block_nbytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    layout: str


@dataclass(slots=True)
class EngineListener:
    """Whom the engine tells. Both are called on the event loop.

    on_kv_events: changes of the cache, in order; None: some were lost, and nothing is known now.
    """

    on_step: Callable[[EngineStep], None] = field(default=lambda step: None)
    on_kv_events: Callable[[list[TheirEvent] | None], None] = field(default=lambda events: None)


class ForeignEngine(Protocol):
    """What the worker uses; `FakeEngine` of the tests is another one."""

    sizes: EngineSizes
    listener: EngineListener

    def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        """Yield what the sequence gains. Closing the generator aborts the request.

        Raises:
            EngineCannot: vLLM refuses the request.
            WorkerLost: the engine's process is dead.
        """
        ...

    @property
    def is_dead(self) -> bool: ...

    async def close(self) -> None: ...


class VllmEngine:
    """vLLM in this process and its own. Make one with `start`."""

    def __init__(
        self, llm: Any, sizes: EngineSizes, listener: EngineListener, directory: str
    ) -> None:
        self.sizes = sizes
        self.listener = listener
        self._llm = llm
        self._directory = directory
        self._adapters: dict[str, int] = {}  # the number of each digest
        self._events = asyncio.create_task(self._read_events())

    @classmethod
    async def start(cls, tier: TierConfig, host: str) -> VllmEngine:
        """Load the model. It takes as long as vLLM's start.

        Args:
            host: address at which decode workers reach this machine.

        Raises:
            StartupError: vLLM is not installed, of another version, or refuses the settings.
        """
        version = check_version()
        check_settings(tier.engine)
        directory = tempfile.mkdtemp(prefix="disagg-vllm-")
        arguments = engine_arguments(tier, directory)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # On CPUs: the threads that the worker's environment names, on no core of their own.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        listener = EngineListener()
        loop = asyncio.get_running_loop()
        try:
            llm = await loop.run_in_executor(None, _build, arguments, listener)
        except Exception as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise StartupError(
                f"vLLM {version} could not start: {error}", param="engine"
            ) from error
        return cls(llm, _sizes(llm, tier, version), listener, directory)

    @property
    def is_dead(self) -> bool:
        return bool(self._llm.errored) or self._events.done()

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.exceptions import GenerationError
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        arguments = dict(prompt.sampling)
        try:
            if "structured_outputs" in arguments:
                given = arguments["structured_outputs"]
                arguments["structured_outputs"] = StructuredOutputsParams(**given)
            params = SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
            tokens = TokensPrompt(prompt_token_ids=list(prompt.token_ids), cache_salt=prompt.salt)
            if prompt.images:
                tokens.update(await asyncio.to_thread(_images, prompt.images))
            call = self._llm.generate
            if prompt.pooling is not None:
                call, params = self._llm.encode, _pooling_params(prompt.pooling)
            outputs = call(
                tokens,
                params,
                prompt.request_id,
                priority=prompt.priority,
                lora_request=None if prompt.adapter is None else self._lora(prompt.adapter),
            )
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield (
                        _output(output, prompt.sampling)
                        if prompt.pooling is None
                        else _pooled(output, prompt.pooling)
                    )
        except (EngineDeadError, EngineGenerateError, GenerationError) as error:
            raise WorkerLost(f"The vLLM engine of this worker has failed: {error!r}.") from error
        except (ValueError, TypeError) as error:
            raise EngineCannot(f"vLLM refuses this request: {error}.") from error

    def _lora(self, adapter: Adapter) -> Any:
        """vLLM loads it when it is first asked for, and tells adapters apart by number and name."""
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(adapter.digest, len(self._adapters) + 1)
        return LoRARequest(f"{adapter.name}@{adapter.digest}", number, adapter.path)

    async def close(self) -> None:
        self._events.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._llm.shutdown)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _read_events(self) -> None:
        """Pass KV events on, and ask for those that are missing."""
        import zmq
        import zmq.asyncio

        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as events:
            events.set_hwm(0)
            events.subscribe(b"")
            events.connect(f"ipc://{self._directory}/events")
            expected = 0
            while True:
                _, raw_number, payload = await events.recv_multipart()
                number = int.from_bytes(raw_number, "big")
                if number > expected:
                    for missed in await self._replay(context, expected, number):
                        self.listener.on_kv_events(missed)
                if number >= expected:
                    self.listener.on_kv_events(read_batch(payload))
                    expected = number + 1

    async def _replay(self, context: Any, first: int, end: int) -> list[list[TheirEvent] | None]:
        """The batches from `first` on before `end`; None in the place of lost ones."""
        import zmq

        found: dict[int, list[TheirEvent]] = {}
        with context.socket(zmq.DEALER) as replay:  # a REQ socket hears the first batch only
            replay.connect(f"ipc://{self._directory}/replay")
            await replay.send_multipart((b"", first.to_bytes(NUM_SEQUENCE_NBYTES, "big")))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    while True:
                        raw_number, payload = (await replay.recv_multipart())[-2:]
                        number = int.from_bytes(raw_number, "big", signed=True)
                        if number < 0:
                            break
                        found[number] = read_batch(payload)
        log.warning("KV events %d to %d came late; %d were replayed.", first, end, len(found))
        if all(number in found for number in range(first, end)):
            return [found[number] for number in range(first, end)]
        return [None]


def _images(files: Sequence[bytes]) -> dict[str, Any]:
    """What a prompt has besides its tokens: images, under names that KV events repeat."""
    from PIL import Image
    from vllm.multimodal.media import ImageMediaIO

    try:
        sizes = [Image.open(io.BytesIO(data)).size for data in files]  # reads their heads only
        if sum(map(math.prod, sizes)) > MOST_PIXELS:
            raise ValueError(f"together they have more than {MOST_PIXELS} pixels")
        read = [ImageMediaIO().load_bytes(data) for data in files]
    except Exception as error:  # PIL has many, also for images that are too large
        why = re.sub(r" <[^>]*>", "", str(error))  # where PIL has an object and its address
        raise EngineCannot(f"The images cannot be read: {why}.", param="messages") from error
    return {
        "multi_modal_data": {"image": read},
        "multi_modal_uuids": {"image": [image_digest(data) for data in files]},
    }


def _build(arguments: dict[str, Any], listener: EngineListener) -> Any:
    """In a thread, as it takes up to minutes."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Steps(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is not None:
                listener.on_step(_step(scheduler_stats, iteration_stats))

        def log_engine_initialized(self) -> None:
            pass

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Steps])


def _step(stats: Any, iteration: Any) -> EngineStep:
    details = stats.iteration_details
    num_preempted = 0 if iteration is None else iteration.num_preempted_reqs
    if details is None or details.is_dummy:
        return EngineStep(
            num_running=stats.num_running_reqs,
            kv_usage=stats.kv_cache_usage,
            num_preempted=num_preempted,
        )
    return EngineStep(
        details.num_ctx_requests,
        details.num_ctx_tokens,
        details.num_generation_tokens,
        details.elapsed_ms / 1e3,
        stats.num_running_reqs,
        stats.kv_cache_usage,
        num_preempted,
    )


def _sizes(llm: Any, tier: TierConfig, version: str) -> EngineSizes:
    config = llm.vllm_config
    cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
    layout = (
        f"vllm-{version}:{model.model}:{model.dtype}:{cache.cache_dtype}:{cache.block_size}"
        f":{tier.engine.tensor_parallel_size}"
    )
    heads = model.get_num_kv_heads(config.parallel_config) * model.get_head_size()
    layers = model.get_num_layers(config.parallel_config)
    ranks = config.parallel_config.tensor_parallel_size
    token_nbytes = 2 * heads * layers * ranks * model.dtype.itemsize  # keys and values
    return EngineSizes(
        cache.block_size,
        cache.num_gpu_blocks,
        cache.block_size * token_nbytes,
        model.max_model_len,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        layout,
    )


def _output(output: Any, sampling: Mapping[str, Any]) -> EngineOutput:
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    reason = completion.finish_reason
    if reason not in (None, "stop", "length"):  # "abort", "error"
        raise WorkerLost(f"vLLM ended the request: {reason}.")
    prompt_rows = output.prompt_logprobs
    return EngineOutput(
        token_ids,
        reason,
        _logprobs(token_ids, completion.logprobs, sampling["logprobs"]),
        _logprobs(
            output.prompt_token_ids[1:],
            prompt_rows and prompt_rows[1:],  # the first token has none
            sampling["prompt_logprobs"],
        ),
        num_cached_tokens=output.num_cached_tokens or 0,
        num_prompt_tokens=len(output.prompt_token_ids),
        kv_transfer_params=output.kv_transfer_params if reason is not None else None,
    )


def _pooling_params(asked: Pooling) -> Any:
    from vllm import PoolingParams

    if not asked.head:
        return PoolingParams(task="embed")
    return PoolingParams(task="classify", use_activation=asked.head == "score")


def _pooled(output: Any, asked: Pooling) -> EngineOutput:
    numbers = output.outputs.data.float().numpy().astype("<f4")
    if asked.head and numbers.size != 1:
        raise EngineCannot(
            f"This model tells {numbers.size} classes of texts apart; one that scores pairs has"
            " a single number."
        )
    return EngineOutput(
        finish_reason="length",
        num_cached_tokens=output.num_cached_tokens or 0,
        pooled=numbers.tobytes(),
    )


def _logprobs(
    token_ids: Sequence[int], rows: Any, num_top: int | None
) -> tuple[TokenLogprobs, ...] | None:
    """Of each token, and of the most likely ones in its place; vLLM gives both in one table."""
    if not rows or num_top is None:
        return None
    found = []
    for token_id, row in zip(token_ids, rows, strict=True):
        likely = sorted(row.items(), key=lambda entry: entry[1].rank)[:num_top]
        top = tuple((each, entry.logprob) for each, entry in likely)
        found.append(TokenLogprobs(row[token_id].logprob, top, row[token_id].rank))
    return tuple(found)
