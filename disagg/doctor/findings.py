"""The doctor's report: each check, what it found, and the one line to change if it is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from disagg.config import TransferPrior

Status = Literal["ok", "warn", "wrong"]


class Finding(msgspec.Struct, frozen=True):
    """One check on one machine.

    Attributes:
        check: its name, the same on every machine: "open files".
        found: what is there, in words and numbers.
        status: "warn" where serving works but is slower or less safe than it could be; "wrong"
            where it does not work.
        change: the one line to change, a command or a setting; empty where nothing is wrong.
    """

    check: str
    found: str
    status: Status = "ok"
    change: str = ""


class NodeReport(msgspec.Struct, frozen=True):
    """One machine. `name` is its host name, with Ray's name of the node in a cluster."""

    name: str
    findings: tuple[Finding, ...]


class TransferReport(msgspec.Struct, frozen=True):
    """KV that `reader` pulled from `source`, as a decode worker pulls it from a prefill worker.

    Attributes:
        memory: "host", or the names of the GPUs.
        lane: what UCX chose for the read: "cma", "rc_mlx5", "tcp".
        latency_s: median for one block of 64 KiB.
        bytes_per_s: median of pulls of 64 MiB.
        limit_bytes_per_s: what the hardware between the two could do; None where nothing says so.
        limit_source: where that figure is from.
        ucx: the reader's version of UCX, and the modules of transports that it could load.
        finding: the verdict.
    """

    source: str
    reader: str
    memory: str
    finding: Finding
    lane: str = ""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    limit_bytes_per_s: float | None = None
    limit_source: str = ""
    ucx: str = ""
    is_between_nodes: bool = False


class DoctorReport(msgspec.Struct, frozen=True):
    """Everything that was looked at."""

    nodes: tuple[NodeReport, ...]
    transfers: tuple[TransferReport, ...] = ()
    models: tuple[Finding, ...] = ()

    def findings(self) -> Iterator[Finding]:
        for node in self.nodes:
            yield from node.findings
        yield from (transfer.finding for transfer in self.transfers)
        yield from self.models

    @property
    def transfer_prior(self) -> TransferPrior | None:
        """The slowest transfer between two nodes, or within one where there is only one."""
        done = [each for each in self.transfers if each.latency_s and each.bytes_per_s]
        between = [each for each in done if each.is_between_nodes]
        if not done:
            return None
        slowest = min(between or done, key=lambda each: each.bytes_per_s or 0.0)
        assert slowest.latency_s is not None and slowest.bytes_per_s is not None
        return TransferPrior(latency_s=slowest.latency_s, bytes_per_s=slowest.bytes_per_s)

    @property
    def is_healthy(self) -> bool:
        return is_healthy(self.findings())


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.status != "wrong" for finding in findings)
