"""vLLM's own classes take what the worker says, and say what it reads. No engine is started.

Also for a version that this machine cannot run: its Python suffices.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from disagg.blocks import hash_blocks, hash_image, hash_root, image_digest
from disagg.config import ASSETS, EngineConfig, TierConfig
from disagg.kvtransfer.ticket import Peer
from disagg.messages import GenerateRequest, Grammar, KVEvent, SamplingParams
from disagg.worker.vllm import tickets
from disagg.worker.vllm.arguments import LEASE_S, engine_arguments
from disagg.worker.vllm.engine import (
    EngineListener,
    EngineSizes,
    EngineStep,
    VllmEngine,
    _output,
    _step,
)
from disagg.worker.vllm.prefixes import PrefixNames, read_batch, salt_of
from disagg.worker.vllm.requests import sampling_arguments
from tests.cli.test_ray_serve_llm import MODEL
from tests.links.fakes import until

BLOCK_SIZE = 32
ROOT = hash_root("model", BLOCK_SIZE, "tenant")


def request_of(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=tuple(range(5, 105)),
        num_prompt_tokens=100,
        hash_root=ROOT,
        block_hashes=(),
        sampling=SamplingParams(**{"max_tokens": 10, **sampling}),
        deadline_unix_s=1e9,
    )


def theirs(**sampling: Any) -> Any:
    """vLLM's parameters of a request, which checks them."""
    from vllm import SamplingParams as Theirs
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments = sampling_arguments(request_of(**sampling), 10, dict(tickets.ASK))
    if "structured_outputs" in arguments:
        arguments["structured_outputs"] = StructuredOutputsParams(**arguments["structured_outputs"])
    return Theirs(output_kind=RequestOutputKind.DELTA, **arguments)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's settings, from ours."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine = EngineConfig(
        backend="vllm",
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=64 << 20,
        engine_args={"max_logprobs": 30},
    )
    tier = TierConfig(model=str(ASSETS / "demo-small"), engine=engine)
    directory = str(tmp_path_factory.mktemp("sockets"))
    return AsyncEngineArgs(**engine_arguments(tier, directory)).create_engine_config()


def test_settings_arrive(config: Any) -> None:
    transfer, events = config.kv_transfer_config, config.kv_events_config
    assert (transfer.kv_connector, transfer.kv_load_failure_policy) == (
        "NixlConnector",
        "recompute",
    )
    assert transfer.get_from_extra_config("kv_lease_duration", 0) == LEASE_S
    assert events.enable_kv_cache_events and events.publisher == "zmq" and events.replay_endpoint
    assert config.scheduler_config.policy == "priority"
    assert config.cache_config.block_size == BLOCK_SIZE
    assert config.cache_config.kv_cache_memory_bytes == 64 << 20
    assert (config.model_config.max_model_len, config.model_config.max_logprobs) == (512, 30)
    assert config.observability_config.enable_logging_iteration_details


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 2**63 + 1},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
        {"bad_words_token_ids": ((3,),), "logit_bias": ((4, 1.5),), "allowed_token_ids": (4, 5)},
        {"stop_token_ids": (2,), "min_tokens": 3},
        {"grammar": Grammar("json", '{"type": "object"}')},
        {"grammar": Grammar("regex", "a+")},
        {"grammar": Grammar("choice", json.dumps(["a", "b"]))},
        {"grammar": Grammar("lark", 'start: "a"')},
    ],
    ids=[
        "plain",
        "drawn",
        "scores",
        "penalties",
        "bias",
        "stop",
        "json",
        "regex",
        "choice",
        "lark",
    ],
)
def test_every_sampling_parameter_is_taken(sampling: dict[str, Any]) -> None:
    params = theirs(**sampling)
    for name in ("temperature", "top_k", "top_p", "min_p", "min_tokens", "presence_penalty"):
        assert getattr(params, name) == getattr(request_of(**sampling).sampling, name), name
    assert params.max_tokens == 10 and params.ignore_eos and not params.detokenize
    assert params.extra_args["kv_transfer_params"] == tickets.ASK


def test_blocks_of_its_cache_get_our_names() -> None:
    """From vLLM's own pool of blocks, through its events as they are sent."""
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    pool = BlockPool(4, True, BLOCK_SIZE, enable_kv_cache_events=True)
    names, tokens = PrefixNames(), list(range(5, 105))
    request = Request(
        "r",
        tokens,
        theirs(),
        None,
        cache_salt=salt_of(ROOT),
        block_hasher=get_request_block_hasher(BLOCK_SIZE, hash_function),
    )

    def told() -> tuple[KVEvent, ...]:
        batch = KVEventBatch(ts=1.0, events=pool.take_events(), data_parallel_rank=0)
        return names.apply(read_batch(msgspec.msgpack.encode(batch)))

    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 2, BLOCK_SIZE, 0)
    ours = tuple(hash_blocks(ROOT, tokens, BLOCK_SIZE))
    assert told() == (KVEvent("stored", ours[:2]),)
    pool.cache_full_blocks(request, blocks, 2, 3, BLOCK_SIZE, 0)
    assert told() == (KVEvent("stored", ours[2:3]),)
    pool.free_blocks(reversed(blocks))
    pool.get_new_blocks(1)
    (gone,) = told()
    assert gone.kind == "removed" and set(gone.block_hashes) <= set(ours)
    pool.free_blocks([])
    assert names.all()


@pytest.mark.parametrize("begin", [BLOCK_SIZE, BLOCK_SIZE + 8])
def test_blocks_with_an_image_get_the_name_that_a_request_has(begin: int) -> None:
    """The image begins in the second block or at its border, and ends in the third."""
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    digest, tokens = image_digest(b"cat"), [*range(5, 5 + begin), *[7] * 40, *range(50, 80)]
    place = PlaceholderRange(offset=begin, length=40)
    request = Request(
        "r",
        tokens,
        theirs(),
        None,
        cache_salt=salt_of(ROOT),
        mm_features=[MultiModalFeatureSpec(None, "image", digest, place)],
        block_hasher=get_request_block_hasher(BLOCK_SIZE, hash_function),
    )
    pool = BlockPool(4, True, BLOCK_SIZE, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(3), 0, 3, BLOCK_SIZE, 0)
    batch = KVEventBatch(ts=1.0, events=pool.take_events(), data_parallel_rank=0)
    (told,) = PrefixNames().apply(read_batch(msgspec.msgpack.encode(batch)))
    (first,) = hash_blocks(ROOT, tokens[:BLOCK_SIZE], BLOCK_SIZE)
    begins = hash_image(first, digest)
    assert told.block_hashes == (first, begins, hash_image(begins, digest))


def test_ray_serve_llm_takes_the_model_whose_settings_are_read() -> None:
    from ray.serve.llm import LLMConfig

    read = LLMConfig.model_validate(MODEL)
    assert read.lora_config.max_num_adapters_per_replica == 8
    assert read.engine_kwargs["tensor_parallel_size"] == 2


@pytest.mark.parametrize(("num_kept", "is_whole"), [(10_000, True), (1, False)])
async def test_lost_events_are_replayed_or_all_is_forgotten(
    num_kept: int, is_whole: bool, tmp_path: Path
) -> None:
    """Events that vLLM published before the worker listened."""
    from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher

    publisher = ZmqEventPublisher(
        0, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", buffer_steps=num_kept
    )
    sent: list[int] = []
    heard: list[int | None] = []

    def tell() -> None:
        sent.append(len(sent))
        event = BlockRemoved(block_hashes=[sent[-1]], medium="GPU")
        publisher.publish(KVEventBatch(ts=1.0, events=[event]))

    def hear(events: list[Any] | None) -> None:
        heard.extend([None] if events is None else [each.block_hashes[0] for each in events])

    for _ in range(3):
        tell()
    await until(lambda: publisher._event_queue.empty())
    listener = EngineListener(on_kv_events=hear)
    llm = SimpleNamespace(errored=False, shutdown=lambda: None)
    engine = VllmEngine(llm, cast("EngineSizes", None), listener, str(tmp_path))
    try:
        while not heard:
            tell()
            await asyncio.sleep(0.05)
        tell()
        await until(lambda: heard[-1] == sent[-1])
        assert not engine.is_dead
    finally:
        await engine.close()
        publisher.shutdown()
    if is_whole:
        assert heard == sent
    else:
        assert heard[0] is None and heard[1:] == sent[-len(heard) + 1 :]


def test_its_connector_issues_what_a_ticket_carries(config: Any) -> None:
    """One engine's parameters, through a ticket, make another one wait for the prompt's KV."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler,
    )
    from vllm.v1.request import Request, RequestStatus

    cache = SimpleNamespace(
        transfer_groups=[],
        kv_cache_groups=[],
        has_mamba_layers=False,
        select_transfer_block_ids=lambda blocks: blocks,
    )
    prefill, decode = (NixlPullConnectorScheduler(config, name, cache) for name in "pd")
    tokens = list(range(5, 105))
    asked = Request("r", tokens, theirs(), None)
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    asked.num_computed_tokens = len(tokens)
    is_kept, params = prefill.request_finished(asked, ([1, 2, 3, 4],))
    assert is_kept and params["remote_engine_id"] == "p"
    peer = Peer("w", 1, "vllm", "layout", 8, 1024, 0, 0, -1, b"")
    ticket = tickets.issue(peer, "t", len(tokens), 100.0, params)
    redeemed = tickets.redeem(ticket, peer, len(tokens) + 1, 0.0)
    continued = Request("d", [*tokens, 7], theirs(), None)
    continued.kv_transfer_params = redeemed
    assert decode.get_num_new_matched_tokens(continued, 0) == (len(tokens) + 1, True)


def test_its_statistics_and_outputs_are_read() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.stats import IterationStats, SchedulerIterationDetails, SchedulerStats

    details = SchedulerIterationDetails(0, 2, 64, 3, 3, 1500.0)
    stats = SchedulerStats(num_running_reqs=5, kv_cache_usage=0.5, iteration_details=details)
    assert _step(stats, IterationStats()) == EngineStep(2, 64, 3, 1.5, 5, 0.5, 0)
    assert _step(SchedulerStats(), None) == EngineStep()
    completion = CompletionOutput(0, "", [7, 8], None, None, finish_reason="length")
    output = RequestOutput(
        "r", None, [1], None, [completion], True, num_cached_tokens=4, kv_transfer_params={"a": 1}
    )
    read = _output(output, {"logprobs": None, "prompt_logprobs": None})
    assert (read.token_ids, read.finish_reason, read.num_cached_tokens) == ((7, 8), "length", 4)
    assert read.kv_transfer_params == {"a": 1}


def test_its_engine_is_called_as_it_is_declared() -> None:
    from vllm import PoolingParams, TokensPrompt
    from vllm.exceptions import GenerationError
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
    from vllm.v1.metrics.loggers import StatLoggerBase

    asked = [(AsyncLLM.generate, theirs()), (AsyncLLM.encode, PoolingParams(task="embed"))]
    for call, params in asked:
        prompt = TokensPrompt(prompt_token_ids=[1])
        inspect.signature(call).bind(None, prompt, params, "r", priority=0, lora_request=None)
    inspect.signature(AsyncLLM.from_engine_args).bind(object(), stat_loggers=[])
    inspect.signature(StatLoggerBase.record).bind(None, None, None, None, 0)
    assert isinstance(inspect.getattr_static(AsyncLLM, "errored"), property)
    assert callable(AsyncLLM.shutdown) and callable(LoRARequest)
    for error in (EngineDeadError, EngineGenerateError, GenerationError):
        assert issubclass(error, Exception)
    assert LoRARequest("a", 1, str(Path("adapter"))).lora_int_id == 1
