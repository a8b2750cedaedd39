"""Who serves and who stands by, and that a place is taken the moment it is free."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from disagg.ingress.standby import Standby
from disagg.messages import WorkerStatus
from disagg.router.fleet import Fleet
from disagg.router.worker_view import Pool
from tests.links.fakes import make_record

IDLE = WorkerStatus(num_blocks=64, num_free_blocks=64)
DRAINING = msgspec.structs.replace(IDLE, accepting=False)
POOL: Pool = ("toy", "decode")


def sync(standby: Standby, epoch: int, status: WorkerStatus = IDLE) -> str:
    name = f"worker-{epoch}"
    standby.worker_synced(make_record(name, epoch=epoch), [b"block" * 3 + b"."], status)
    return name


def serving(fleet: Fleet) -> set[str]:
    return {name for name, worker in fleet.view().workers.items() if worker.accepting}


def pair(num_serving: int = 2) -> tuple[Fleet, Standby]:
    fleet = Fleet()
    return fleet, Standby(fleet, {POOL: num_serving})


def test_the_oldest_serve_in_whatever_order_they_come() -> None:
    fleet, standby = pair()
    for epoch in (3, 1, 4, 2):
        sync(standby, epoch)
    assert serving(fleet) == {"worker-1", "worker-2"}
    assert len(fleet.view().workers) == 4


def test_a_place_is_taken_when_a_worker_is_lost_or_drains() -> None:
    fleet, standby = pair()
    for epoch in (1, 2, 3, 4):
        sync(standby, epoch)
    standby.worker_lost("worker-1")
    assert serving(fleet) == {"worker-2", "worker-3"}
    standby.worker_stepped("worker-2", (), DRAINING)
    assert serving(fleet) == {"worker-3", "worker-4"}
    sync(standby, 5)
    assert serving(fleet) == {"worker-3", "worker-4"}, "a replacement stands by"


def test_load_and_cache_of_those_who_stand_by_are_known() -> None:
    fleet, standby = pair(num_serving=1)
    sync(standby, 1)
    sync(standby, 2)
    standby.worker_stepped("worker-2", (), msgspec.structs.replace(IDLE, num_free_blocks=7))
    assert fleet.view().workers["worker-2"].num_free_blocks == 7
    assert not fleet.view().workers["worker-2"].accepting
    standby.worker_lost("worker-1")
    assert serving(fleet) == {"worker-2"}
    assert set(fleet.index.match([b"block" * 3 + b"."])) == {"worker-2"}


def test_pools_are_apart_and_one_without_a_number_serves_as_a_whole() -> None:
    fleet, standby = pair(num_serving=1)
    others = ("a", "prefill", "toy"), ("b", "prefill", "toy"), ("c", "decode", "x")
    for name, role, model in others:
        standby.worker_synced(make_record(name, role=role, model=model), [], IDLE)
    sync(standby, 1)
    assert serving(fleet) == {"a", "b", "c", "worker-1"}


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(1, 5), st.sampled_from("sdbl"))))
def test_as_many_serve_as_should_and_can(num_serving: int, events: list[tuple[int, str]]) -> None:
    """Whatever workers do: sync, drain, come back to work, or get lost."""
    fleet, standby = pair(num_serving)
    able: dict[int, bool] = {}
    for epoch, what in events:
        name = f"worker-{epoch}"
        if what == "s":
            sync(standby, epoch)
            able[epoch] = True
        elif what == "l":
            standby.worker_lost(name)
            able.pop(epoch, None)
        else:
            standby.worker_stepped(name, (), DRAINING if what == "d" else IDLE)
            if epoch in able:
                able[epoch] = what == "b"
        oldest = sorted(each for each in able if able[each])[:num_serving]
        assert serving(fleet) == {f"worker-{each}" for each in oldest}
        assert set(fleet.view().workers) == {f"worker-{each}" for each in able}
