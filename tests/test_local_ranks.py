"""Workers of two ranks, in one cluster without Ray: their text is one engine's text."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from disagg import local
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.config_checks import parse_config
from disagg.engine.device import build
from disagg.engine.device.runner import ModelRunner
from disagg.errors import EngineFailed, StartupError
from disagg.kvtransfer.transport import PullDone
from disagg.local import LocalCluster
from disagg.models.communicator import Communicator
from disagg.rank_messages import PullBlocks, RankCapture, encode
from disagg.router.policy import choose_route
from disagg.router.route import Route
from disagg.time_model import StepTimeModel
from disagg.worker.check import check_tier
from disagg.worker.other_rank import LocalRank, Rank
from disagg.worker.parts import build_parts
from disagg.worker.ranks import Ranks
from disagg.worker.worker import Worker
from tests.e2e.single_engine import SingleEngine
from tests.kvtransfer.memory import Memory
from tests.links.fakes import until
from tests.test_local import ENGINE, LONG, body, chat, has_stepped, text, until_empty
from tests.test_local_cold_tier import PROMPT
from tests.test_local_cold_tier import chat as ask
from tests.test_local_host_tier import NUM_ATTEMPTS, OTHERS, comes_back, metric
from tests.tiny_model import tiny_parts, write_tiny_model

TWO = msgspec.structs.replace(ENGINE, tensor_parallel_size=2)


def config(
    model: Path, num_prefill_ranks: int | None = None, num_decode_ranks: int | None = None
) -> ServeConfig:
    tier = TierConfig(
        model=str(model),
        engine=TWO,
        prefill=PoolConfig(num_replicas=1, tensor_parallel_size=num_prefill_ranks),
        decode=PoolConfig(num_replicas=1, tensor_parallel_size=num_decode_ranks),
    )
    return ServeConfig(tiers=(tier,), transport="nixl", cluster_key="key")


@asynccontextmanager
async def cluster(
    model: Path, *num_ranks: int
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    async with local.running(config(model, *num_ranks), tiny_parts()) as running:
        app = httpx.ASGITransport(running.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            yield running, client


def processes(worker: Worker) -> list[subprocess.Popen[bytes]]:
    assert worker._ranks is not None
    return [process_of(other) for other in worker._ranks.others]


def process_of(other: Rank) -> subprocess.Popen[bytes]:
    assert isinstance(other, LocalRank)
    return other.process


def spied(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The bytes of a worker's pulls, and those from which it learns their times."""
    core, pulled, learned = worker._core, list[int](), list[int]()
    ended, observe = core._pull_ended, core._transfer_times.observe

    def spied_end(done: PullDone, now: float) -> None:
        pulled.append(0 if done.error else done.nbytes)
        ended(done, now)

    def spied_times(source_id: str, nbytes: int, seconds: float, lane: str) -> None:
        learned.append(nbytes)
        observe(source_id, nbytes, seconds, lane)

    monkeypatch.setattr(core, "_pull_ended", spied_end)
    monkeypatch.setattr(core._transfer_times, "observe", spied_times)
    return pulled, learned


def hand_over_if_possible(*arguments: Any) -> Route:
    """Choose the best route on which KV moves. Which kind is fastest depends on the machine: two
    ranks that share its cores are slower than one."""
    route = choose_route(*arguments)
    remote = [each for each in route.candidates if each.prefill is not None]
    return route.instead(remote[0], "KV is to move") if remote else route


def num_ranks(worker: Worker) -> int:
    return 1 if worker._ranks is None else 1 + len(worker._ranks.others)


async def pulls_between_unlike_sizes(
    running: LocalCluster, client: httpx.AsyncClient, reference: SingleEngine, content: str
) -> None:
    prefill, decode = running.workers
    assert {num_ranks(prefill), num_ranks(decode)} == {1, 2}
    for temperature in (0, 1):
        answer = await chat(client, content, temperature=temperature, seed=7)
        assert text(answer) == reference.chat(content, 24, temperature=temperature, seed=7)
    pulls = decode._core.status().pulls
    assert sum(each.num_ok for each in pulls), "nothing was pulled"
    assert_no_pull_failed(decode)


def assert_no_pull_failed(worker: Worker) -> None:
    pulls = worker._core.status().pulls
    assert not sum(each.num_failed + each.num_torn for each in pulls), pulls


async def replace_worker(running: LocalCluster, old: Worker, num_ranks: int) -> Worker:
    (tier,) = config(running.config.tiers[0].directory, num_ranks, num_ranks).tiers
    await running.stop_worker(old)
    new = await running.start_worker(tier, old.record.role)
    await running.wait_ready()
    return new


async def test_text_is_one_engines_text_until_a_rank_dies_and_after(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one rank to two, from two to two, where one dies, and from two to one."""
    reference = SingleEngine(model, ENGINE)
    async with cluster(model, 1, 2) as (running, client):
        monkeypatch.setattr(running.ingress.dispatcher, "_choose_route", hand_over_if_possible)
        await pulls_between_unlike_sizes(running, client, reference, "to two: " + LONG)
        prefill = await replace_worker(running, running.workers[0], 2)
        decode = next(each for each in running.workers if each is not prefill)
        assert num_ranks(prefill) == num_ranks(decode) == 2
        await pulls_of_all_ranks(running, client, reference, spied(decode, monkeypatch))

        scored = await chat(client, "scored: " + LONG, prompt_logprobs=1)
        assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]
        assert text(scored) == reference.chat("scored: " + LONG, 24)
        texts = [f"{i}: {LONG}" for i in range(6)]
        embedded = await client.post("/v1/embeddings", json={"input": texts})
        for one, each in zip(texts, embedded.json()["data"], strict=True):
            assert each["embedding"] == pytest.approx(reference.embedding(one), abs=1e-4)

        (other,) = processes(prefill)
        await loses_a_rank(running, client, reference, decode)
        prefill.check_health()
        assert other.poll() is None

        await replace_worker(running, decode, 1)
        await pulls_between_unlike_sizes(running, client, reference, "to one: " + LONG)
    assert other.wait(10) == 0


async def pulls_of_all_ranks(
    running: LocalCluster,
    client: httpx.AsyncClient,
    reference: SingleEngine,
    spied: tuple[list[int], list[int]],
) -> None:
    wanted = [
        (content, temperature, seed)
        for content in ("short", LONG, "another one: " + LONG)
        for temperature, seed in ((0.0, 0), (1.0, 7))
    ]
    answers = await asyncio.gather(
        *(chat(client, content, temperature=t, seed=s) for content, t, s in wanted)
    )
    for answer, (content, temperature, seed) in zip(answers, wanted, strict=True):
        assert text(answer) == reference.chat(content, 24, temperature=temperature, seed=seed)
    pulled, learned = spied
    assert pulled, "nothing was pulled"
    assert pulled == [2 * nbytes for nbytes in learned]  # pulls are predicted of one rank
    for worker in running.workers:
        assert_no_pull_failed(worker)
        await until_empty(worker)


async def loses_a_rank(
    running: LocalCluster, client: httpx.AsyncClient, reference: SingleEngine, decode: Worker
) -> None:
    """While it decodes: its request moves, and it reports that its engine failed."""
    num_steps = decode._thread.num_turns
    asked = body("last: " + LONG, 100, ignore_eos=True)
    moving = asyncio.create_task(client.post("/v1/chat/completions", json=asked))
    await until(lambda: has_stepped(decode) and decode._thread.num_turns > num_steps + 5)
    (lost,) = processes(decode)
    lost.kill()
    moved = await moving
    assert moved.status_code == 200, moved.text
    assert text(moved.json()) == reference.chat("last: " + LONG, 100, ignore_eos=True)
    # As if the worker's only process had been killed: it may happen to a request again.
    decisions = running.ingress.dispatcher.decision(moved.json()["id"])
    assert any("worker_lost" in d.because for d in decisions), decisions
    assert not any("engine_failed" in d.because for d in decisions), decisions
    await until(lambda: decode._thread.failed is not None)
    with pytest.raises(EngineFailed):
        decode.check_health()


async def test_an_evicted_prefix_comes_back_from_the_host_memory_of_all_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have int8 weights. And then, without work, the worker ends with a rank."""
    monkeypatch.setattr(StepTimeModel, "prefill_s", lambda model, num_new, num_before=0: 10.0)
    few = msgspec.structs.replace(
        TWO, num_gpu_blocks_override=40, kv_offloading_size=0.1, quantization="int8"
    )
    (tier,) = config(model).tiers
    tier = msgspec.structs.replace(
        tier, served_model_name="tiny", engine=few, prefill=PoolConfig(num_replicas=0)
    )
    reference = SingleEngine(model, msgspec.structs.replace(ENGINE, quantization="int8"))
    answers = {content: reference.chat(content, 8) for content in (PROMPT, *OTHERS)}
    async with (
        local.running(msgspec.structs.replace(config(model), tiers=(tier,))) as running,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(running.ingress.app), base_url="http://local", timeout=60
        ) as client,
    ):
        assert await ask(client, PROMPT) == (answers[PROMPT], 0)
        for _ in range(NUM_ATTEMPTS):
            if (num_cached := await comes_back(running, client, answers)) > 300:
                break
        assert num_cached > 300
        metrics = (await client.get("/metrics")).text
        assert metric(metrics, "blocks_total", 'outcome="loaded"') >= num_cached // 16
        (worker,) = running.workers
        await worker.check()

        (lost,) = processes(worker)
        worker.check_health()
        lost.send_signal(signal.SIGTERM)
        await until(lambda: worker._thread.failed is not None)
        with pytest.raises(EngineFailed, match=r"rank 1 of 2 ended with exit status -15"):
            worker.check_health()


def test_a_start_that_fails_on_a_rank_names_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match=r"^rank 1 of 2 ended .* exit status 1,"):
        build_parts(config(model), config(model).tiers[0], "failing", 1)


def test_a_rank_that_cannot_load_is_named_by_the_first_that_waits_for_it(tmp_path: Path) -> None:
    """For the scale of a row, of which each has some columns."""
    damaged = write_tiny_model(tmp_path)
    tensors = load_file(damaged / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][0, -1] = np.nan  # a column of the second
    save_file(tensors, damaged / "model.safetensors")
    (tier,) = config(damaged).tiers
    engine = msgspec.structs.replace(tier.engine, quantization="int8")
    tier = msgspec.structs.replace(tier, engine=engine)
    with pytest.raises(StartupError, match=rf"^rank 1 of 2 cannot start: {name} .* holds NaN"):
        build_parts(config(damaged), tier, "damaged", 1)


def test_a_rank_that_ends_by_itself_is_a_failed_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ranks = Ranks(config(model), config(model).tiers[0], "failing", 1)
    assert isinstance(ranks.diagnose(RuntimeError("the step's")), EngineFailed)
    ranks.close()


def test_ranks_that_cannot_all_be_started_leave_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, begin = list[subprocess.Popen[bytes]](), subprocess.Popen[bytes]

    def refuse_the_second(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError("planted: too many processes")
        started.append(begin(*arguments, **named))
        return started[0]

    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(subprocess, "Popen", refuse_the_second)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = msgspec.structs.replace(TWO, tensor_parallel_size=3)
    tier = msgspec.structs.replace(config(model).tiers[0], engine=engine)
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        Ranks(config(model), tier, "unlucky", 1)
    assert started[0].returncode is not None
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert not list(tmp_path.iterdir())


def test_a_warm_up_that_would_wait_for_a_dead_rank_ends_the_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", ended.put)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(Rank, "wait_ready", lambda rank: None)
    ranks = Ranks(config(model), config(model).tiers[0], "failing", 1)
    ranks.may_hang = True  # as with NCCL
    ranks.allocate(4, 1)
    assert ended.get(timeout=60) == 1
    ranks.close()


def test_a_rank_that_fails_while_graphs_are_captured_ends_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it fails since a CPU captures none. The first rank waits for it, as NCCL would."""
    ended: queue.Queue[int] = queue.Queue()
    meet, statuses = Ranks.meet, list[int | None]()

    def meet_by_what_hangs(ranks: Ranks, device_type: str) -> Communicator:
        communicator = meet(ranks, device_type)
        ranks.may_hang = True
        return communicator

    def capture(runner: ModelRunner, *_: object) -> NoReturn:
        assert isinstance(runner.followers, Ranks)
        runner.followers.follow(RankCapture(4))
        assert ended.get(timeout=60) == 1
        statuses.extend(process_of(other).poll() for other in runner.followers.others)
        raise StartupError("the process would have ended")

    monkeypatch.setattr(Ranks, "meet", meet_by_what_hangs)
    monkeypatch.setattr(build, "_warm_up", capture)
    monkeypatch.setattr(os, "_exit", ended.put)
    with pytest.raises(StartupError, match="would have ended"):
        build_parts(config(model), config(model).tiers[0], "capturing", 1)
    assert statuses == [1]


def test_ranks_end_with_a_first_rank_that_fails_while_they_wait_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Rank] = []

    def fail(*arguments: object) -> NoReturn:
        raise MemoryError("planted")

    def step_alone(runner: ModelRunner, *_: object) -> NoReturn:
        assert isinstance(runner.followers, Ranks)
        others.extend(runner.followers.others)
        monkeypatch.setattr(runner, "_forward", fail)
        runner.warm_up(8, 1)
        raise AssertionError("it computed nothing")

    monkeypatch.setattr(build, "_warm_up", step_alone)
    with pytest.raises(MemoryError):
        build_parts(config(model), config(model).tiers[0], "alone", 1)
    assert [process_of(other).poll() for other in others] == [0]


def test_a_pull_on_a_rank_that_is_gone_is_no_error_of_its_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank writes to the blocks already, so they must not be freed."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ranks = Ranks(config(model), config(model).tiers[0], "gone", 1)
    (gone,) = ranks.others
    process_of(gone).wait()
    gone.tell(encode(PullBlocks(1, Memory("source").ticket("t", [3]), 0, [0])))
    assert gone.take_reports() == [] and not gone.wait(60.0)
    assert isinstance(ranks.diagnose(RuntimeError("a step's")), EngineFailed)
    ranks.close()


PROGRAM = """
import sys
from pathlib import Path
from tests.test_local_ranks import config
from disagg.worker.parts import build_parts

parts = build_parts(config(Path(sys.argv[1])), config(Path(sys.argv[1])).tiers[0], "worker", 1)
print(parts.ranks.others[0].process.pid, flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_their_worker(model: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        rank = os.pidfd_open(int(worker.stdout.readline()))
        worker.kill()
        worker.wait()
    with os.fdopen(rank) as opened:
        asyncio.run(_readable(opened.fileno()))


async def _readable(fd: int) -> None:
    """A file of a process can be read once it has ended."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    await asyncio.wait_for(ended.wait(), 60)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 3}, r"size = 3 does not divide .* 4 \(heads\) / 3 = 1\.33"),
        ({"tensor_parallel_size": 4}, "= 4 needs a CPU core for each rank .* has 3"),
        (
            {"tensor_parallel_size": 4, "quantization": "int4"},
            "int4' is not possible with .* = 4: 32 neighbouring columns .* would have 16 columns",
        ),
        ({"quantization": "packed", "device": "cpu"}, "is not quantised, so nothing is packed"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    model: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    engine = msgspec.structs.replace(TWO, **changes)
    with pytest.raises(StartupError, match=words):
        check_tier(msgspec.structs.replace(config(model).tiers[0], engine=engine))


def test_cores_of_other_machines_are_not_those_of_this_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    engine = msgspec.structs.replace(TWO, device="cpu")
    tier = msgspec.structs.replace(config(model).tiers[0], engine=engine)
    assert check_tier(tier, is_here=False) > 0


def test_transport_local_is_refused(model: Path) -> None:
    raw = {
        "tiers": [{"model": str(model), "engine": {"tensor_parallel_size": 2}}],
        "transport": "local",
        "cluster_key": "key",
    }
    with pytest.raises(StartupError, match="workers of 2 ranks, which are processes"):
        parse_config(raw)
