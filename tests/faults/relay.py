"""A network that misbehaves: a relay in front of a worker's link server, in user space.

A cut neither closes nor refuses anything: nothing arrives any more, in either direction, until it
heals. Frames to the ingress can be late, dropped, doubled or swapped with their successor, which
no TCP does, but a broken sender might.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Literal, TypeAlias

from disagg.links.connection import HEADER

Fate: TypeAlias = Literal["drop", "double", "swap"]


class Relay:
    """Everything runs on the loop that called `start`.

    delay_s: how late each frame to the ingress is.
    """

    def __init__(self, host: str, port: int) -> None:
        self.delay_s = 0.0
        self.happened: Counter[str] = Counter()
        self._behind = host, port
        self._fates: deque[Fate] = deque()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Returns the port to use instead of the server's."""
        self._server = await asyncio.start_server(self._accept, self._behind[0])
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        self._is_open.clear()

    def heal(self) -> None:
        self.delay_s = 0.0
        self._fates.clear()
        self._is_open.set()

    def befall(self, fate: Fate, num_frames: int) -> None:
        """Let the next frames to an ingress meet that fate."""
        self._fates.extend([fate] * num_frames)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._pass()
        behind = await asyncio.open_connection(*self._behind)
        up = asyncio.create_task(self._carry(reader, behind[1]))
        down = asyncio.create_task(self._carry_frames(behind[0], writer))
        self._tasks |= {up, down}
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        for task in (up, down):
            self._tasks.discard(task)
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        writer.close()
        behind[1].close()

    async def _pass(self) -> None:
        if not self._is_open.is_set():
            self.happened["cut"] += 1
            await self._is_open.wait()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            await self._pass()
            writer.write(chunk)
            await writer.drain()
        await self._pass()  # an end is news too, and no news passes a cut

    async def _carry_frames(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Frames are read while others are on their way: a late one does not delay the next."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        reading = asyncio.create_task(self._read_frames(reader, under_way))
        try:
            while frame := await self._arrived(under_way):
                await self._pass()
                writer.write(frame)
                await writer.drain()
            await self._pass()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_frames(
        self, reader: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        """Puts each frame with the time at which it arrives, and an empty one after the last."""
        now = asyncio.get_running_loop().time
        try:
            while True:
                for frame in await self._next_frames(reader):
                    if self.delay_s:
                        self.happened["delay"] += 1
                    under_way.put_nowait((now() + self.delay_s, frame))
        except (asyncio.IncompleteReadError, ConnectionError):
            under_way.put_nowait((now(), b""))

    async def _arrived(self, under_way: asyncio.Queue[tuple[float, bytes]]) -> bytes:
        arrives_at, frame = await under_way.get()
        await asyncio.sleep(max(0.0, arrives_at - asyncio.get_running_loop().time()))
        return frame

    async def _next_frames(self, reader: asyncio.StreamReader) -> list[bytes]:
        frame = await _read_frame(reader)
        if not self._fates:
            return [frame]
        fate = self._fates.popleft()
        self.happened[fate] += 1
        if fate == "drop":
            return []
        if fate == "double":
            return [frame, frame]
        return [await _read_frame(reader), frame]


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(HEADER.size)
    (nbytes,) = HEADER.unpack(head)
    return head + await reader.readexactly(nbytes)
