"""`disagg doctor` on every node of a running Ray cluster. One actor per node does the checks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from disagg.app.node_actors import NodeActor, NodeFailed, actors_on_nodes
from disagg.kvtransfer.slab import HOST
from disagg.kvtransfer.ticket import Peer
from disagg.kvtransfer.ucx import interface_of
from disagg.tools.doctor.machine import Machine, check_machine, clock, here, num_gpus
from disagg.tools.doctor.report import Finding, NodeReport, TransferReport
from disagg.tools.doctor.transfer_probe import Figures
from disagg.tools.doctor.transfers import ProbeProcess, judge, measure_here

LOOK_TIMEOUT_S = 120.0
MEASURE_TIMEOUT_S = 300.0
NUM_CLOCK_LOOKS = 3
MAX_NODES_IN_PAIRS = 8  # with more nodes, each node is measured with the next one only


class NodeDoctor:
    """Checks the node on which it runs."""

    def __init__(self) -> None:
        self._probe: ProbeProcess | None = None

    def look(self, name: str) -> tuple[list[Finding], Machine]:
        return check_machine(), here(name)

    def now_s(self) -> float:
        return time.time()

    def measure_here(self, machine: Machine) -> list[TransferReport]:
        return measure_here(machine)

    def start_probe(self, name: str, ip: str) -> Peer:
        """Start a probe on this node, which ends with this actor. Raises `TransferFailed`."""
        self._probe = ProbeProcess(name, 0 if num_gpus() else HOST, interface_of(ip))
        return self._probe.peer()

    def measure(self, peer: Peer) -> Figures:
        assert self._probe is not None
        return self._probe.measure(peer)


class _Node(NamedTuple):
    machine: Machine
    actor: NodeActor


def examine(
    address: str, with_transfers: bool = True
) -> tuple[list[NodeReport], list[TransferReport]]:
    """Check all nodes of the cluster at `address`, and measure transfers between them.

    Raises:
        StartupError: no cluster answers at the address.
    """
    reports: list[NodeReport] = []
    nodes: list[_Node] = []
    with actors_on_nodes(address, NodeDoctor) as actors:
        for actor in actors:
            try:
                findings, machine = actor.call("look", actor.name, timeout_s=LOOK_TIMEOUT_S)
                findings.append(clock(_clock_offset_s(actor)))
                nodes.append(_Node(machine, actor))
            except NodeFailed as error:
                advice = "install the same versions of disagg, Python and Ray on the node as here"
                findings = [Finding("this node", f"the checks failed: {error}", "wrong", advice)]
            reports.append(NodeReport(actor.name, tuple(findings)))
        return reports, [*_within(nodes), *_between(nodes)] if with_transfers else []


def _clock_offset_s(actor: NodeActor) -> float:
    """The offset of a node's clock, from the fastest of several answers, as it is most accurate."""
    offsets: list[tuple[float, float]] = []
    for _ in range(NUM_CLOCK_LOOKS):
        sent_s = time.time()
        remote_s = actor.call("now_s", timeout_s=LOOK_TIMEOUT_S)
        received_s = time.time()
        offsets.append((received_s - sent_s, remote_s - (sent_s + received_s) / 2))
    return min(offsets)[1]


def _within(nodes: Sequence[_Node]) -> Iterator[TransferReport]:
    """Transfers between two processes of each node, one node after another."""
    for machine, actor in nodes:
        try:
            yield from actor.call("measure_here", machine, timeout_s=MEASURE_TIMEOUT_S)
        except NodeFailed as error:
            yield judge(machine, machine, Figures(error=str(error)))


def _between(nodes: Sequence[_Node]) -> Iterator[TransferReport]:
    """Transfers between pairs of nodes in both directions, one after another."""
    peers: list[Peer | NodeFailed] = []
    for machine, actor in nodes if len(nodes) > 1 else ():
        try:
            peers.append(
                actor.call("start_probe", machine.name, actor.ip, timeout_s=MEASURE_TIMEOUT_S)
            )
        except NodeFailed as error:
            peers.append(error)
    for source, reader in _pairs(len(peers)):
        figures = _pull(peers[source], nodes[reader].actor, peers[reader])
        yield judge(nodes[source].machine, nodes[reader].machine, figures, is_between_nodes=True)


def _pairs(num_nodes: int) -> list[tuple[int, int]]:
    if num_nodes <= MAX_NODES_IN_PAIRS:
        return list(itertools.permutations(range(num_nodes), 2))
    ring = [(i, (i + 1) % num_nodes) for i in range(num_nodes)]
    return ring + [(reader, source) for source, reader in ring]


def _pull(source: Peer | NodeFailed, reader: NodeActor, own: Peer | NodeFailed) -> Figures:
    """Measure a transfer from the probe `source` to `reader`, whose probe is `own`; an error of the
    start of either is the result."""
    try:
        for each in (source, own):
            if isinstance(each, NodeFailed):
                raise each
        figures: Figures = reader.call("measure", source, timeout_s=MEASURE_TIMEOUT_S)
        return figures
    except NodeFailed as error:
        return Figures(error=str(error))
