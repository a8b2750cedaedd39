"""A worker replica with the fake model and a back door for tests.

The back door is a Unix socket named after the process, in the model's directory: a line of JSON
in, a line out. Through it tests have every block recounted and faults put on wire and network.
A module of its own, since it alone needs Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from disagg.app.deployments import WorkerReplica
from disagg.config import ServeConfig, TierConfig
from disagg.messages import Role
from disagg.worker import kv_export
from disagg.worker.parts import Parts
from disagg.worker.worker import Worker
from tests.faults.fake_model import BACK_DOORS, fake_parts
from tests.faults.relay import Relay

if TYPE_CHECKING:
    from tests.faults.fake_wire import WireFaults

LEASE_S = 5.0  # instead of a minute: where a notification is lost, tests wait for its end


def parts_with_broken_wires(
    config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int, **unused: Any
) -> Parts:
    # Imports NIXL, and must do so when a real worker does: inside its process, after Serve.
    from tests.faults.fake_wire import broken_wires

    kv_export.HOLD_TTL_S = LEASE_S
    with broken_wires():
        return fake_parts(config, tier, worker_id, epoch)


class FakeReplica(WorkerReplica):
    build_parts = staticmethod(parts_with_broken_wires)

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServeConfig, tier_name: str, role: Role
    ) -> None:
        await super().__init__(config, tier_name, role)
        self._back_door = BackDoor(self._worker, role, config.tier(tier_name).directory)
        await self._back_door.open()


class BackDoor:
    """Answers questions about a worker, and puts faults on it."""

    def __init__(self, worker: Worker, role: Role, directory: Path) -> None:
        self._worker = worker
        self._role = role
        self._path = directory / BACK_DOORS / str(os.getpid())
        self._path.parent.mkdir(exist_ok=True)
        server = worker._server
        self._relay = Relay(server.record.host, server.record.port)

    async def open(self) -> None:
        server = self._worker._server
        server.record = msgspec.structs.replace(server.record, port=await self._relay.start())
        # Kept, since a server that nobody holds is closed.
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        try:
            answer = await self._answer(**asked)
        except Exception as error:
            answer = {"error": repr(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async def _answer(self, do: str, **arguments: Any) -> dict[str, Any]:
        faults, relay = _wire_faults(), self._relay
        match do:
            case "fail":
                faults.to_fail[arguments["kind"]] = arguments["times"]
            case "hang":
                faults.hangs = True
            case "befall":
                relay.befall(arguments["fate"], arguments["times"])
            case "delay":
                relay.delay_s = arguments["seconds"]
            case "cut":
                relay.cut()
            case "heal":
                faults.hangs = False
                faults.to_fail.update(dict.fromkeys(faults.to_fail, 0))
                relay.heal()
            case "write":
                return {"refused": _is_refused(self._path.parent.parent / "written")}
            case "state":
                return await self._state()
            case "names":
                hashes = await self._worker._ask(self._worker._engine.pool.hashes)
                return {"names": sorted(each.hex() for each in hashes)}
            case _:
                raise ValueError(f"{do!r} cannot be asked here")
        return {}

    async def _state(self) -> dict[str, Any]:
        """A recount of all blocks and holds, and what there is at this moment."""
        worker = self._worker
        state: dict[str, Any] = await worker._ask(lambda: _recount(worker))
        return {
            **state,
            "worker_id": worker.record.worker_id,
            "role": self._role,
            "happened": dict(_wire_faults().happened + self._relay.happened),
        }


def _wire_faults() -> WireFaults:
    from tests.faults.fake_wire import FakeBrokenWire

    return FakeBrokenWire.faults


def _recount(worker: Worker) -> dict[str, Any]:
    core = worker._core
    core.check()
    status = core.status()
    return {
        "num_blocks": status.num_blocks,
        "num_held_blocks": status.num_blocks - status.num_free_blocks,
        "num_holds": status.num_holds,
        "num_sequences": status.num_running + status.num_waiting,
        "num_streams": core._streams.num_open,
        "num_computed": worker._engine.runner.num_computed,  # type: ignore[attr-defined]
    }


def _is_refused(file: Path) -> bool:
    """Whether this process may not write to a file."""
    try:
        file.write_text("x")
    except OSError:
        return True
    file.unlink()
    return False
