"""The report of `disagg doctor`: each check, what it found, and how to fix a problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from disagg.config import TransferPrior

Status = Literal["ok", "warn", "wrong"]


class Finding(msgspec.Struct, frozen=True):
    """The result of one check on one machine.

    Attributes:
        check: name of the check, the same on every machine, such as "open files".
        found: what the check found, in words and numbers.
        status: "warn" if serving works but is slower or less safe than it could be; "wrong" if it
            does not work.
        change: a command or a setting that fixes the problem; "" if there is no problem.
    """

    check: str
    found: str
    status: Status = "ok"
    change: str = ""

    @classmethod
    def judged(
        cls, check: str, found: str, is_bad: bool, change: str, status: Status = "warn"
    ) -> Finding:
        """With `status` and `change` if it is bad, otherwise in order."""
        return cls(check, found, status, change) if is_bad else cls(check, found)


class NodeReport(msgspec.Struct, frozen=True):
    """The findings on one machine. `name` is its host name, on a cluster with its node id."""

    name: str
    findings: tuple[Finding, ...]


class TransferReport(msgspec.Struct, frozen=True):
    """A measured transfer: `reader` pulled KV from `source`, as a decode worker does.

    Attributes:
        memory: "host" or "GPU".
        lane: the UCX transport of the read: "cma", "rc_mlx5", "tcp".
        latency_s: median time of a pull of one block of 64 KiB.
        bytes_per_s: median rate of pulls of 64 MiB.
        limit_bytes_per_s: rate that the hardware between the two could reach; None if unknown.
        limit_source: the hardware that sets this limit.
        ucx: the reader's version of UCX, and the transport modules that it could load.
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
    """The whole report. `disagg serve --doctor-report` reads its `transfer_prior`."""

    nodes: tuple[NodeReport, ...]
    transfers: tuple[TransferReport, ...] = ()
    models: tuple[Finding, ...] = ()
    transfer_prior: TransferPrior | None = None

    def findings(self) -> Iterator[Finding]:
        for node in self.nodes:
            yield from node.findings
        yield from (transfer.finding for transfer in self.transfers)
        yield from self.models

    @property
    def wrong(self) -> list[Finding]:
        return [finding for finding in self.findings() if finding.status == "wrong"]


def slowest(transfers: Iterable[TransferReport]) -> TransferPrior | None:
    """The slowest transfer between two nodes, or within a node if there is only one."""
    done = [each for each in transfers if each.latency_s and each.bytes_per_s]
    if not done:
        return None
    between = [each for each in done if each.is_between_nodes]
    found = min(between or done, key=lambda each: each.bytes_per_s or 0.0)
    assert found.latency_s is not None and found.bytes_per_s is not None
    return TransferPrior(latency_s=found.latency_s, bytes_per_s=found.bytes_per_s)
