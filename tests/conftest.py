"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import beside
from tests.grids import examples

# Of this process and of all that it starts. Threads of one product in several processes at a time
# only wait for each other; and hundreds of processes import the package, whose bytecode is kept.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No time limit for an example: machines are shared and tests must not measure them. In CI the
# examples are the same each time, so that a red run is always the change's; elsewhere they explore.
PROFILE = examples(30, deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.register_profile("disagg", PROFILE)
settings.load_profile("disagg")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes when each test ran, for `tests.beside`."""
    began_s = time.monotonic()
    done = yield
    if file := os.environ.get(beside.TIMES):
        beside.note(file, item.nodeid, began_s, time.monotonic())
    return done


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-order",
        type=int,
        metavar="SEED",
        help="shuffle directories, their files, and the tests of each",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """No test may need another before it. The tests of a file stay together, as their fixtures do,
    and so do the files of a directory. In any order those marked `last` come last of their file or
    directory, the one with 1 before that with 2."""
    if config.option.random_order is not None:
        random.Random(config.option.random_order).shuffle(items)
    directories = {path: n for n, path in enumerate(dict.fromkeys(i.path.parent for i in items))}
    files = {path: n for n, path in enumerate(dict.fromkeys(item.path for item in items))}

    def place(item: pytest.Item) -> tuple[int, bool, int, int]:
        mark = item.get_closest_marker("last")
        ends_directory = mark is not None and mark.kwargs.get("of") == "directory"
        last = 0 if mark is None else mark.args[0]
        return directories[item.path.parent], ends_directory, files[item.path], last

    items.sort(key=place)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Imports leave 200,000 objects, which stay. Looking at all of them for garbage again and again
    took a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model, which tests leave as it is."""
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def no_room_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission leaves no blocks for later, so that many are preempted."""
    from disagg.engine.sched.engine_admission import EngineAdmission

    monkeypatch.setattr(
        EngineAdmission, "leaves_room", lambda self, num_blocks: num_blocks <= self._pool.num_free
    )


@pytest.fixture(autouse=True, scope="session")
def _workers_alike_are_measured_once() -> Iterator[None]:
    """Each worker of a fleet in this process would compute prompts to measure its steps. That would
    take a quarter of the time of such tests."""
    if "disagg.worker.parts" not in sys.modules:  # no collected test builds a worker
        yield
        return
    from disagg.worker.first_steps import first_steps

    measured: dict[tuple[Any, ...], Any] = {}

    def measure_once(engine: Any, timer: Any, prior: Any) -> Any:
        scheduler, pool = engine.scheduler, engine.pool
        room = scheduler.max_model_len, pool.num_blocks, pool.block_size
        alike = type(engine.runner), room, prior.coefficients  # which depend on the model's shape
        if alike not in measured:
            measured[alike] = first_steps(engine, timer, prior)
        return measured[alike]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("disagg.worker.parts.first_steps", measure_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _new_blocks_are_nan() -> Iterator[None]:
    """KV that is read and was never written shows as NaN in every test with a real model."""
    if "disagg.engine.device.runner" not in sys.modules:  # collected: nobody here runs a model
        yield
        return
    from tests.poison import poison_new_blocks

    with pytest.MonkeyPatch.context() as monkeypatch:
        poison_new_blocks(monkeypatch)
        yield
