"""Faults: each is put on, proves that it took effect, and is taken away.

A fault that does nothing makes a test that cannot fail. So `verify` looks at the victim, not at
what `inject` believes that it did, and raises `NoEffect`; `test_faults.py` aims every kind at a
wrong target and expects that.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil

from disagg.cli.embedded_redis import EmbeddedRedis
from tests.faults.relay import Fate
from tests.faults.system import Member

EFFECT_TIMEOUT_S = 60.0


class NoEffect(AssertionError):
    """A fault was put on, and its victim is as well as before."""


class Fault(ABC):
    """Something that goes wrong, once or for a while."""

    @abstractmethod
    def inject(self) -> None: ...

    @abstractmethod
    def is_in_effect(self) -> bool:
        """Judged by the victim alone."""

    @abstractmethod
    def heal(self) -> None:
        """Take it away. May be repeated."""

    def verify(self, timeout_s: float = EFFECT_TIMEOUT_S) -> None:
        """Raises `NoEffect` unless the victim shows the fault in time."""
        ends_at = time.monotonic() + timeout_s
        while not self.is_in_effect():
            if time.monotonic() > ends_at:
                raise NoEffect(f"{self!r} had no effect")
            time.sleep(0.01)


@asynccontextmanager
async def suffered(fault: Fault) -> AsyncIterator[None]:
    """The block runs under the fault, which is verified before it and healed after it.

    Verified in a thread, since clients of this loop may be what the fault shows itself to.
    """
    fault.inject()
    try:
        await asyncio.to_thread(fault.verify)
        yield
    finally:
        fault.heal()


class Killed(Fault):
    """SIGKILL. Healing is others' business: whoever supervises the process starts another."""

    def __init__(self, victim: psutil.Process) -> None:
        self._victim = victim

    def inject(self) -> None:
        self._victim.kill()

    def is_in_effect(self) -> bool:
        try:
            return self._victim.status() == psutil.STATUS_ZOMBIE or not self._victim.is_running()
        except psutil.NoSuchProcess:
            return True

    def heal(self) -> None: ...


class Frozen(Fault):
    """SIGSTOP: alive, with open sockets, and silent."""

    def __init__(self, victim: psutil.Process) -> None:
        self._victim = victim

    def inject(self) -> None:
        self._victim.send_signal(signal.SIGSTOP)

    def is_in_effect(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return self._victim.status() == psutil.STATUS_STOPPED
        return False

    def heal(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._victim.send_signal(signal.SIGCONT)


class HeadDown(Fault):
    """The GCS is killed; healed by another one on the same address and the same Redis."""

    def __init__(self, head: psutil.Process) -> None:
        self._head = head
        self._command, self._environment = head.cmdline(), head.environ()
        self._successor: subprocess.Popen[bytes] | None = None

    def inject(self) -> None:
        self._head.kill()

    def is_in_effect(self) -> bool:
        return Killed(self._head).is_in_effect()

    def heal(self) -> None:
        if self._successor is None:
            self._successor = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def end(self) -> None:
        if self._successor is not None:
            self._successor.kill()
            self._successor.wait()


class RedisDown(Fault):
    """Redis is killed, and comes back empty at the same address."""

    def __init__(self, redis: EmbeddedRedis) -> None:
        self._redis = redis
        self._is_down = False

    def inject(self) -> None:
        psutil.Process(self._redis.pid).kill()
        self._is_down = True

    def is_in_effect(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._redis.socket)) == errno.ECONNREFUSED

    def heal(self) -> None:
        if self._is_down:
            self._redis.stop()
            self._redis.start()
            self._is_down = False


class FullDisk(Fault):
    """No file of a worker may grow, as on a full disk."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def inject(self) -> None:
        self._limit(0)

    def is_in_effect(self) -> bool:
        return bool(self._member.ask("write")["refused"])

    def heal(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, nbytes: int) -> None:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            _, hard = resource.prlimit(self._member.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self._member.pid, resource.RLIMIT_FSIZE, (nbytes, hard))


class _ThroughBackDoor(Fault):
    """Put on by the worker itself, which counts how often it happened."""

    def __init__(self, member: Member, sign: str, least: int, do: str, **arguments: Any) -> None:
        self._member = member
        self._sign, self._least = sign, least
        self._do, self._arguments = do, arguments
        self._before = self._num_happened()

    def inject(self) -> None:
        self._member.ask(self._do, **self._arguments)

    def is_in_effect(self) -> bool:
        return self._num_happened() - self._before >= self._least

    def heal(self) -> None:
        with suppress(OSError):
            self._member.ask("heal")

    def _num_happened(self) -> int:
        happened: dict[str, int] = self._member.state()["happened"]
        return happened.get(self._sign, 0)


class Cut(_ThroughBackDoor):
    """Nothing passes between a worker and its ingresses, and nobody is told."""

    def __init__(self, member: Member) -> None:
        super().__init__(member, "cut", 1, "cut")


class Late(_ThroughBackDoor):
    """Every frame from a worker comes late."""

    def __init__(self, member: Member, seconds: float) -> None:
        super().__init__(member, "delay", 1, "delay", seconds=seconds)


class BadFrames(_ThroughBackDoor):
    """The next frames from a worker are dropped, doubled, or swapped with their successors."""

    def __init__(self, member: Member, fate: Fate, times: int = 1) -> None:
        super().__init__(member, fate, times, "befall", fate=fate, times=times)


class BadTransfers(_ThroughBackDoor):
    """The next posts, looks or notifications of a worker's transfers fail: `fake_wire.KINDS`."""

    def __init__(self, member: Member, kind: str, times: int = 1) -> None:
        super().__init__(member, kind, times, "fail", kind=kind, times=times)


class HungTransfers(_ThroughBackDoor):
    """No transfer of a worker ends, as if its peers were cut off."""

    def __init__(self, member: Member) -> None:
        super().__init__(member, "hang", 1, "hang")
