"""The server process: starts Ray, deploys the application, watches it, and stops everything.

    python -m disagg.cli.server_process FD     (reads the Order from stdin, writes Reports to FD)

It is a separate process so that the parent can always handle signals: Ray replaces signal
handlers, waits inside C++ and ends its process when it loses its node. It stops when the parent
tells it to, and at once when the parent has died.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
import urllib.error
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from disagg.app.probe import ask_here
from disagg.capacity.device_plan import DevicePlan, plan_devices, unsized_tiers
from disagg.capacity.node_check import check_nodes
from disagg.cli.embedded_redis import EmbeddedRedis, keep_running
from disagg.cli.lines import StartLog
from disagg.cli.process_tree import end_run_elsewhere, join_run, keep_logs
from disagg.cli.ray_environment import PROXY_TIMEOUT_S, prepare_environment
from disagg.cli.reports import READY, STOP, Failed, Order, Phase, Reports
from disagg.cli.start_checks import (
    check_before_ray,
    check_models,
    check_serve_address,
    hold_port,
)
from disagg.config import AUTO, ServeConfig, TierConfig, url_of
from disagg.devices import Gpus, gpus_here
from disagg.errors import DisaggError, StartupError
from disagg.imports import uncollected_imports
from disagg.messages import StartsByPool
from disagg.worker.check import cpu_steps_sentence

if TYPE_CHECKING:
    from disagg.app.cluster import Cluster

READY_TIMEOUT_S = 600.0
RAY_TIMEOUT_S = 180.0  # for four attempts; a machine at full load needs one or two
SERVE_TIMEOUT_S = PROXY_TIMEOUT_S + 30.0
TOO_LATE = (
    f"Ray Serve did not start within {SERVE_TIMEOUT_S:.0f} s; check whether the machines are"
    " overloaded."
)
END_OTHER_TIMEOUT_S = 75.0  # longer than the 60 s that Serve has to delete an application
REPLACED = (
    "Another `disagg serve` or `serve deploy` has replaced the application on the cluster; it keeps"
    " running."
)
JOIN_TIMEOUT_S = 60.0  # for a busy machine: the cluster's head has already answered a check


class Orders:
    """Listens to the parent process. When the parent dies, it ends the whole run at once."""

    def __init__(self, pipe: BinaryIO, order: Order) -> None:
        self.stop = threading.Event()
        self._pipe = pipe
        self._order = order
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        while self._pipe.readline() == STOP:
            self.stop.set()
        directory = Path(self._order.directory)
        keep_logs(directory, Path(self._order.log_directory))
        end_run_elsewhere(directory)
        os._exit(1)


def main() -> int:
    reports = Reports(int(sys.argv[1]))
    os.set_inheritable(int(sys.argv[1]), False)
    # Children inherit standard input, and they must not read from the parent's pipe.
    pipe = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    order = msgspec.json.decode(pipe.readline(), type=Order)
    join_run(Path(order.directory))
    orders = Orders(pipe, order)
    try:
        return serve(order, reports, orders.stop)
    except DisaggError as error:
        reports.send(Failed(error.message, error.param))
        return 2
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        cause = f"{type(error).__name__}: {first_line}"
        reports.send(
            Failed(
                f"The server process failed unexpectedly: {cause:.300} (the traceback is in"
                f" {order.log_directory}/server.log)",
                is_refusal=False,
            )
        )
        return 1


def serve(order: Order, reports: Reports, stop: threading.Event) -> int:
    """Check, start, serve and stop; returns the exit status. Raises `StartupError`."""
    directory, is_here = Path(order.directory), order.ray_address is None
    check_before_ray(order)
    with ExitStack() as cleanup:
        plan = DevicePlan(order.config)
        if is_here:
            cleanup.enter_context(hold_port(order.config.http))
            plan = _plan(order.config, gpus_here(), order, reports)
        tell = partial(reports.say, "weights")
        check_models(plan.config, plan.gpu_nbytes, is_here, plan.gpu_name, tell)
        of_ours = [tier for tier in plan.config.tiers if tier.engine.backend == "disagg"]
        if is_here and not plan.device_ids and of_ours:
            sentence = cpu_steps_sentence(of_ours)
            reports.say("cpu_kernels", f"Decode steps on this CPU: {sentence}.")
        config, redis = _with_store(plan.config, cleanup, directory)
        if redis is not None:
            reports.say(
                "store",
                "Workers store evicted KV blocks in an embedded Redis server of"
                f" {config.cold_tier_nbytes >> 20} MiB (--cold-tier-bytes, --no-redis).",
            )
        cluster = _cluster(order)
        cleanup.callback(cluster.stop)
        _connect(cluster, order, plan.device_ids, reports)
        if not is_here:
            if not _check_cluster(cluster, order, config, reports, stop):
                return 0
            config = _plan(config, cluster.gpus(), order, reports).config
            check_nodes(config, cluster.nodes())
        reports.send(Phase("starting Ray Serve", SERVE_TIMEOUT_S, TOO_LATE, not is_here))
        cluster.start(config.http)
        reports.send(Phase("starting workers"))
        cluster.deploy(config)
        log = StartLog(pool_sizes(config))

        def tell_progress(pools: StartsByPool) -> None:
            for line in log.news(pools):
                reports.say("progress", line)

        cluster.wait(tell_progress, READY_TIMEOUT_S, stop)
        body = None if stop.is_set() else _wait_until_ready(config, stop)
        cluster.leave()
        if body is None:
            return 0
        url, pools = url_of(config.http), body["pools"]
        seconds = time.monotonic() - order.began_s
        reports.say(READY, ready_line(url, pools, seconds), url=url, pools=pools)
        if config.http.ui:
            reports.say("page", f"\n  {url}/ui  (chat, fleet and planner, in a browser)")
        model = config.tiers[0].name if config.cascade is None else AUTO
        example = curl_example(url, model, has_key=not config.http.is_open)
        reports.say("example", f"\n  {example}\n")
        watch = cluster.watch(reports.say, stop)
        if redis is None:
            stop.wait()
        else:
            keep_running(redis, stop, lambda sentence: reports.say("redis", sentence))
        if watch.broken:
            reports.send(Failed(watch.broken, is_refusal=False))
            return 1
        if not is_here and cluster.is_replaced():
            reports.say("replaced", REPLACED)
        else:
            num_ended, num_cut = cluster.drain(config.drain_s)
            cut = f"; {num_cut} ran out of time and ended with an error" if num_cut else ""
            reports.say(
                "drained",
                f"{num_ended} running requests have finished{cut}.",
                num_ended=num_ended,
                num_cut=num_cut,
            )
        watch.close()
    return 0


def _check_cluster(
    cluster: Cluster, order: Order, config: ServeConfig, reports: Reports, stop: threading.Event
) -> bool:
    """Check that a running Serve has our address, and that no application has our name.

    With `replace`, the application of our name is ended first, if the cluster could have ours.

    Returns:
        False if told to stop before that application had ended. It serves again.

    Raises:
        StartupError: Serve has another address, or there is such an application.
    """
    check_serve_address(order.config, cluster.http_address())
    if order.replace:
        every = cluster.gpus(only_free=False)
        unsized = unsized_tiers(order.raw_config, order.config)
        check_nodes(plan_devices(config, every, unsized).config, cluster.nodes())
        drain_s = order.config.drain_s
        name = "ending the application that runs there"
        limit_s = drain_s + END_OTHER_TIMEOUT_S
        too_late = f"The application on the cluster did not end within {limit_s:.0f} s."
        reports.send(Phase(name, limit_s, too_late))
        if cluster.end_other(drain_s, stop):
            reports.say("ended_other", "The application that ran on the cluster has ended.")
        elif stop.is_set():
            reports.say("kept_other", "The application on the cluster serves again.")
            return False
    cluster.check_is_free()
    return True


def ready_line(url: str, pools: Mapping[str, Any], seconds: float) -> str:
    """Args:
    pools: the pools of each model, as in the response to `GET /ready`.
    """
    words = "; ".join(
        f"{name}: {pool['num_prefill']} prefill + {pool['num_decode']} decode,"
        f" {pool['num_kv_blocks']} KV blocks of {pool['block_size']} tokens, steps of up to"
        f" {pool['max_num_seqs']} sequences and {pool['max_num_batched_tokens']} tokens"
        for name, pool in pools.items()
    )
    return f"ready after {seconds:.0f} s: {url}/v1  ({words})"


def curl_example(url: str, model: str, *, has_key: bool) -> str:
    body = {
        "model": model,
        "messages": [
            {
                "role": "user",
                "content": "The code of Anna is 4821. The code of Peter is 1937."
                " What is the code of Anna?",
            }
        ],
        "stream": True,
        "temperature": 0,
    }
    key = ' -H "Authorization: Bearer $DISAGG_API_KEY"' if has_key else ""
    return (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key}"
        f" -d '{json.dumps(body)}'"
    )


def pool_sizes(config: ServeConfig) -> dict[str, int]:
    """Number of workers of each pool that starts with workers."""
    return {
        f"{tier.name}-{role}": pool.num_replicas
        for tier in config.tiers
        for role, pool in tier.pools.items()
        if pool.num_replicas > 0
    }


def _plan(config: ServeConfig, gpus: Gpus, order: Order, reports: Reports) -> DevicePlan:
    """Assign workers to devices, and report the assignment."""
    plan = plan_devices(config, gpus, unsized_tiers(order.raw_config, config))
    reports.say("devices", plan.line)
    return plan


def _connect(cluster: Cluster, order: Order, device_ids: Sequence[str], reports: Reports) -> None:
    if order.ray_address is None:
        phase = Phase(
            "starting Ray",
            RAY_TIMEOUT_S,
            f"Ray did not start within {RAY_TIMEOUT_S:.0f} s; check whether the machine is"
            " overloaded.",
            may_stand_still=False,
        )
    else:
        phase = Phase(
            f"joining the Ray cluster at {order.ray_address}",
            JOIN_TIMEOUT_S,
            f"Could not join the Ray cluster at {order.ray_address} within {JOIN_TIMEOUT_S:.0f} s;"
            f" check it with `ray status --address {order.ray_address}`.",
        )
    reports.send(phase)
    cluster.connect(device_ids)
    # Ray has installed its own handlers, with which SIGTERM prints a stack trace.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def _with_store(
    config: ServeConfig, cleanup: ExitStack, directory: Path
) -> tuple[ServeConfig, EmbeddedRedis | None]:
    has_use = any(tier.engine.enable_prefix_caching for tier in config.tiers)
    if config.redis_url is not None or not config.cold_tier_nbytes or not has_use:
        return config, None
    redis = EmbeddedRedis(directory / "redis", max_memory_nbytes=config.cold_tier_nbytes)
    cleanup.enter_context(redis)
    return msgspec.structs.replace(config, redis_url=redis.url), redis


def _cluster(order: Order) -> Cluster:
    prepare_environment(order)
    with uncollected_imports():
        from disagg.app.cluster import Cluster

    return Cluster(order.ray_address, Path(order.directory))


def _wait_until_ready(config: ServeConfig, stop: threading.Event) -> dict[str, Any] | None:
    """Wait until every ingress reaches every worker.

    Returns:
        The body of `GET /ready`; None if told to stop.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    last = "none"
    complete: set[str] = set()  # ids of complete ingresses; the proxy picks the one that answers
    while time.monotonic() < deadline and not stop.wait(0.1):
        try:
            with ask_here(f"{url_of(config.http)}/ready", 5) as answer:
                body: dict[str, Any] = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            last = error.read().decode(errors="replace")[:500]
        except (OSError, ValueError) as error:
            last = str(error)
        else:
            last = str(body)
            if all(_is_complete(tier, body["pools"][tier.name]) for tier in config.tiers):
                complete.add(body["ingress"])
            if len(complete) == config.num_ingress:
                return body
    if stop.is_set():
        return None
    raise StartupError(
        f"The workers run, but the server was not ready after {READY_TIMEOUT_S:.0f} s; the last"
        f" response of GET /ready was: {last}."
    )


def _is_complete(tier: TierConfig, pool: dict[str, int]) -> bool:
    num_prefill, num_decode = tier.prefill.num_replicas, tier.decode.num_replicas
    return pool["num_prefill"] >= num_prefill and pool["num_decode"] >= num_decode


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Ray's threads may keep a normal exit from ending
