from __future__ import annotations

import math
from functools import cache

import msgspec
import pytest

from disagg.config import AutoscalingConfig
from disagg.engine.engine import Engine
from disagg.errors import RequestError
from disagg.messages import Role
from disagg.tools.sim import simulated_worker, simulation
from disagg.tools.sim.baselines import OURS, POLICIES
from disagg.tools.sim.config import Fault, SimConfig
from disagg.tools.sim.loads import make_load
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulated_worker import WorkerSpec
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest

LOAD = make_load("conversations", 8.0, 40, seed=5)
SMALL = SimConfig(num_prefill=2, num_decode=2, num_blocks=96, max_num_seqs=8)


@cache
def played(config: SimConfig) -> SimReport:
    """`LOAD` on a fleet, once for all tests."""
    return simulate(config, LOAD)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_runs_are_equal_to_the_bit_and_all_is_served(policy: str) -> None:
    config = msgspec.structs.replace(SMALL, policy=policy)
    report = played(config)
    assert report == simulate(config, LOAD)
    assert (report.num_requests, report.num_failed) == (len(LOAD), 0)
    wanted = sum(each.num_output_tokens for each in LOAD)
    assert report.output_tokens_per_s * report.duration_s == pytest.approx(wanted)


def test_another_seed_is_another_run() -> None:
    config = msgspec.structs.replace(SMALL, policy="two-choices")
    assert played(config) != played(msgspec.structs.replace(config, seed=1))


@pytest.mark.parametrize("tpot_slo_s", [math.inf, 0.01])
def test_names_of_workers_decide_nothing(
    monkeypatch: pytest.MonkeyPatch, tpot_slo_s: float
) -> None:
    config = msgspec.structs.replace(SMALL, tpot_slo_s=tpot_slo_s)
    report, worker = played(config), SimConfig.worker

    def in_reverse(self: SimConfig, role: Role, number: int, most: int) -> WorkerSpec:
        spec = worker(self, role, number, most)
        return msgspec.structs.replace(spec, worker_id=f"{9 - number}-{role}")

    monkeypatch.setattr(SimConfig, "worker", in_reverse)
    assert simulate(config, LOAD) == report


def test_with_a_tpot_slo_the_split_into_roles_decides_nothing() -> None:
    config = msgspec.structs.replace(SMALL, tpot_slo_s=0.01)
    other = msgspec.structs.replace(config, num_prefill=1, num_decode=3)
    of_pools = {"imbalance": 0.0, "utilisation": 0.0, "worker_hours": 0.0}
    one, two = (msgspec.structs.replace(played(each), **of_pools) for each in (config, other))
    assert one == two


@pytest.mark.parametrize("seed", [4, 6, 10])
@pytest.mark.parametrize(
    ("policy", "num_decode", "num_blocks"),
    [
        ("round-robin", 0, 24),  # too few blocks, so that KV is pulled again and again
        ("round-robin", 2, 24),  # the same; equal pulls end at the same moment
        ("least-loaded", 2, 96),
        (OURS, 2, 48),  # learns from each step, and sees when the running ones began
    ],
)
def test_runs_of_steps_change_nothing(
    monkeypatch: pytest.MonkeyPatch, policy: str, num_decode: int, num_blocks: int, seed: int
) -> None:
    """Against the same simulation with each decode step planned and applied by the scheduler."""
    some = make_load("conversations", 8.0, 100, seed=seed)[:25]
    config = msgspec.structs.replace(
        SMALL, policy=policy, num_decode=num_decode, num_blocks=num_blocks, block_size=256
    )
    num_steps = count_steps(monkeypatch)
    in_runs = simulate(config, some)
    num_with_runs = num_steps.pop()
    monkeypatch.setattr(simulated_worker, "num_alike", lambda engine: 0)
    num_steps.append(0)
    one_by_one = simulate(config, some)
    assert num_steps[0] > 1.1 * num_with_runs
    busy = pytest.approx(one_by_one.utilisation, rel=1e-9)  # a sum of other summands
    assert in_runs.utilisation == busy
    assert msgspec.structs.replace(in_runs, utilisation=one_by_one.utilisation) == one_by_one


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted = [0]
    step = Engine.step

    def counting(self: Engine) -> object:
        counted[0] += 1
        return step(self)

    monkeypatch.setattr(Engine, "step", counting)
    return counted


def test_decode_workers_may_have_more_room() -> None:
    config = msgspec.structs.replace(SMALL, num_blocks=4, decode_num_blocks=96)
    assert config.worker("prefill", 0, 512).num_blocks == 4
    assert config.worker("decode", 0, 512).num_blocks == 96
    at_once = [TraceRequest(0.0, 512, 200)] * 8
    assert (
        simulate(config, at_once).tpot_p95_s
        < 0.5
        * simulate(msgspec.structs.replace(config, decode_num_blocks=None), at_once).tpot_p95_s
    )


def test_one_request_takes_what_the_model_says() -> None:
    config = SimConfig(num_prefill=1, num_decode=0, max_num_batched_tokens=1024)
    per_step, per_token, per_attended, per_sequence, per_context, _ = config.times.coefficients
    report = simulate(config, [TraceRequest(0.0, 2000, 3)])
    attended = 2000 * 2001 / 2
    first_s = 2 * per_step + 2000 * per_token + attended * per_attended
    decode_s = per_step + per_sequence + per_context * 2001.5
    assert report.ttft_p50_s == pytest.approx(first_s)
    assert report.tpot_p50_s == pytest.approx(decode_s)


def test_a_shared_prefix_is_computed_once() -> None:
    trace = [TraceRequest(10.0 * n, 1024, 2, (5, 6)) for n in range(3)]
    config = SimConfig(num_prefill=2, num_decode=0)
    report = simulate(config, trace)
    assert report.hit_percent == pytest.approx(100 * 2 / 6)  # a prompt's last token is computed
    spread = simulate(msgspec.structs.replace(config, policy="round-robin"), trace[:2])
    assert spread.hit_percent == 0.0


def test_requests_that_never_fit_are_counted_as_failed() -> None:
    report = simulate(SMALL, [TraceRequest(0.0, 512 * 200, 2), TraceRequest(0.0, 100, 2)])
    assert (report.num_requests, report.num_failed) == (2, 1)


@pytest.mark.parametrize("worker_id", ["prefill-1", "decode-0"])
def test_a_worker_that_dies_costs_time_only(worker_id: str) -> None:
    config = msgspec.structs.replace(SMALL, policy="least-loaded", speed=8.0)
    fault = Fault(worker_id, at_s=2.0, for_s=4.0)
    load = make_load("conversations", 8.0, 100, seed=5)
    hurt = simulate(msgspec.structs.replace(config, faults=(fault,)), load)
    well = simulate(config, load)
    assert hurt.num_failed == 0
    wanted = well.output_tokens_per_s * well.duration_s
    assert hurt.output_tokens_per_s * hurt.duration_s == pytest.approx(wanted)
    assert hurt.ttft_p99_s > well.ttft_p99_s or hurt.tpot_p99_s > well.tpot_p99_s
    # A worker and its replacement count as one, for the seconds that they lived.
    assert hurt.utilisation * hurt.duration_s > 0.9 * well.utilisation * well.duration_s
    assert hurt.imbalance < 1.3 * well.imbalance


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prefill": 0},
        {"policy": "sorcery"},
        {"num_ingress": 0},
        {"num_ingress": 2, "scale_prefill": AutoscalingConfig(min_replicas=1, max_replicas=3)},
    ],
)
def test_a_fleet_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        simulate(SimConfig(**wrong), LOAD)  # type: ignore[arg-type]


def test_our_policy_finds_more_than_turns_do() -> None:
    ours = played(SMALL)
    turns = played(msgspec.structs.replace(SMALL, policy="round-robin"))
    assert ours.policy == OURS
    assert ours.hit_percent > turns.hit_percent


@pytest.mark.parametrize("interval_s", [0.0, 0.1])
def test_several_ingresses_serve_all_though_each_knows_only_what_it_hears(
    monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> None:
    """Reports are bounded in rate as in a large fleet; a worker dies meanwhile."""
    monkeypatch.setattr(simulation, "report_interval_s", lambda number: interval_s)
    config = msgspec.structs.replace(
        SMALL, num_ingress=3, faults=(Fault("decode-0", at_s=2.0, for_s=1.0),)
    )
    report = simulate(config, LOAD)
    assert report == simulate(config, LOAD)
    assert (report.num_requests, report.num_failed) == (len(LOAD), 0)
    one = simulate(msgspec.structs.replace(config, num_ingress=1), LOAD)
    assert report.hit_percent > 0.9 * one.hit_percent


@pytest.mark.parametrize("interval_s", [0.0, 0.5])
@pytest.mark.parametrize(("num_workers", "later_s"), [(2, 0.01), (8, 0.0), (40, 0.0)])
def test_an_ingress_avoids_the_worker_to_which_another_sends_a_prompt(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, num_workers: int, later_s: float
) -> None:
    """Pairs of prompts: the second in the middle of the first one's first step, or both at once."""
    monkeypatch.setattr(simulation, "report_interval_s", lambda number: interval_s)
    arrivals_s = [10.0 * pair + each_s for pair in range(20) for each_s in (0.0, later_s)]
    pairs = [TraceRequest(arrival_s, 4096, 2) for arrival_s in arrivals_s]
    config = SimConfig(num_prefill=num_workers, num_decode=0, num_ingress=2)
    report = simulate(config, pairs)
    assert report.ttft_p99_s == pytest.approx(report.ttft_p50_s)


def test_a_refused_request_comes_back_and_its_ttft_counts_from_the_first_time() -> None:
    """Twice what the fleet can do for half a minute: who comes back later is served, and late."""
    load = make_load("completions", 40.0, 400, seed=1)
    config = SimConfig(num_prefill=1, num_decode=1, fair_queue=True, ttft_slo_s=0.5)
    once, again = (
        simulate(msgspec.structs.replace(config, num_retries=number), load) for number in (0, 20)
    )
    assert once.refused_percent > 20.0 and once.num_failed == once.refused_percent * 4
    assert again.num_failed < 0.5 * once.num_failed
    assert once.ttft_p99_s < 1.0 < again.ttft_p99_s
    assert once.long_refused_percent > 100.0 / 7.0
