"""Measures KV transfers between two probes, and compares them with the limit of the hardware."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import msgspec

from disagg.errors import TransferFailed
from disagg.kvtransfer.slab import HOST
from disagg.kvtransfer.ticket import Peer
from disagg.kvtransfer.ucx import LOOPBACK
from disagg.tools.doctor.machine import Machine
from disagg.tools.doctor.report import Finding, TransferReport
from disagg.tools.doctor.transfer_probe import Figures

START_TIMEOUT_S = 60.0
MEASURE_TIMEOUT_S = 120.0
LEAST_SHARE = 0.3  # share of the hardware's limit below which a transfer is suspiciously slow


class ProbeProcess:
    """A probe on this machine.

    Args:
        device_id: the GPU whose memory is measured; -1 for host memory.
        interface: network interface for UCX; None lets UCX choose.
    """

    def __init__(self, name: str, device_id: int, interface: str | None = LOOPBACK) -> None:
        command = [sys.executable, "-m", "disagg.tools.doctor.transfer_probe", name, str(device_id)]
        self._process = subprocess.Popen(
            [*command, interface or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def peer(self) -> Peer:
        """The peer record with which other probes reach it. Raises `TransferFailed`."""
        line = self._line(START_TIMEOUT_S)
        try:
            return msgspec.json.decode(line, type=Peer)
        except msgspec.ValidationError:
            raise TransferFailed(msgspec.json.decode(line, type=Figures).error) from None

    def measure(self, peer: Peer) -> Figures:
        """Pull from another probe. Errors are in the figures and are not raised."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(peer) + b"\n")
            return msgspec.json.decode(self._line(MEASURE_TIMEOUT_S), type=Figures)
        except (OSError, TransferFailed) as error:
            return Figures(error=str(error))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _line(self, timeout_s: float) -> bytes:
        """The next line of JSON. NIXL may print other lines, which are skipped."""
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + timeout_s, b""
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                break
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                status = self._process.wait()
                raise TransferFailed(f"the measuring process ended with status {status}")
            line += piece
            while b"\n" in line:
                first, _, line = line.partition(b"\n")
                if first.startswith(b"{"):
                    return first
        raise TransferFailed(f"the measuring process did not answer within {timeout_s:.0f} s")


def judge(
    source: Machine, reader: Machine, figures: Figures, is_between_nodes: bool = False
) -> TransferReport:
    """Judge a measurement between two machines."""
    memory = "GPU" if source.num_gpus and reader.num_gpus else "host"
    check = f"KV from {source.name} to {reader.name}"
    if figures.error:
        finding = Finding(
            check,
            f"NIXL transfers fail: {figures.error}",
            "wrong",
            "open the ports between the two machines (docs/security.md)",
        )
        return TransferReport(source.name, reader.name, memory, finding)
    limit, limit_source = _limit(source, reader, figures)
    lane = figures.lane or "an unknown lane"
    speed = f"{figures.bytes_per_s / 1e9:.2f} GB/s, {figures.latency_s * 1e6:.0f} us, by {lane}"
    finding = Finding(check, speed)
    if advice := _better_lane(source, reader, figures.lane):
        finding = Finding(check, speed, "warn", advice)
    elif limit and figures.bytes_per_s < LEAST_SHARE * limit:
        share = f"{speed}: {figures.bytes_per_s / limit:.0%} of {limit_source}"
        finding = Finding(check, share, "warn", "stop other load and measure again")
    return TransferReport(
        source.name,
        reader.name,
        memory,
        finding,
        figures.lane,
        figures.latency_s,
        figures.bytes_per_s,
        limit,
        limit_source,
        figures.ucx,
        is_between_nodes,
    )


def measure_here(machine: Machine) -> list[TransferReport]:
    """Transfers between two processes of this machine, in both directions, on GPUs if possible."""
    devices = (0, min(1, machine.num_gpus - 1)) if machine.num_gpus else (HOST, HOST)
    sides = [
        msgspec.structs.replace(machine, name=f"{machine.name} ({part})") for part in ("a", "b")
    ]
    probes: list[ProbeProcess] = []
    try:
        for side, device in zip(sides, devices, strict=True):
            probes.append(ProbeProcess(side.name, device))
        peers = [probe.peer() for probe in probes]
        return [
            judge(sides[0], sides[1], probes[1].measure(peers[0])),
            judge(sides[1], sides[0], probes[0].measure(peers[1])),
        ]
    except TransferFailed as error:
        return [judge(sides[0], sides[1], Figures(error=error.message))]
    finally:
        for probe in probes:
            probe.close()


def _limit(source: Machine, reader: Machine, figures: Figures) -> tuple[float | None, str]:
    """Bytes per second that the hardware between the two could reach, and the limiting hardware."""
    if source.host == reader.host:
        if figures.copy_bytes_per_s is None:
            return None, ""
        return figures.copy_bytes_per_s, "a plain copy in memory"
    slower = min(source, reader, key=lambda machine: machine.link_bytes_per_s)
    if not slower.link_bytes_per_s:
        return None, ""
    gigabits = slower.link_bytes_per_s * 8 / 1e9
    return slower.link_bytes_per_s, f"the {gigabits:.0f} Gb/s of {slower.link_name}"


def _better_lane(source: Machine, reader: Machine, lane: str) -> str:
    """How to make UCX use a faster transport that the hardware has; "" if there is none."""
    if "tcp" not in lane:
        return ""
    if source.host == reader.host:
        if source.num_gpus and reader.num_gpus:
            return "include cuda_ipc in UCX_TLS; run containers with --ipc=host"
        return "allow process_vm_readv: --cap-add=SYS_PTRACE, and one PID namespace for workers"
    if source.has_rdma and reader.has_rdma:
        return "let UCX use RDMA: pass /dev/infiniband to containers, and set ulimit -l unlimited"
    return ""
