"""One running system for all fault tests: starting Ray is the most expensive part of them.

It ends with the last of them, before anybody else starts a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.system import Pool, System, running_system

# Few blocks, so that caches overflow, requests wait, and prefixes come back from the store; and
# tokens that take their time, so that prompts are worth computing elsewhere.
CREW = Pool(
    "crew", num_prefill=1, num_decode=3, engine=(("num_gpu_blocks_override", 256),), token_s=0.0003
)
LONE = Pool("lone", num_prefill=0, num_decode=1)


@pytest.fixture(scope="package")
def shared_system() -> Iterator[System]:
    with running_system(CREW, LONE) as system:
        yield system


@pytest.fixture
def system(shared_system: System) -> System:
    """Whole again, whatever the test before did to it."""
    shared_system.wait_whole()
    return shared_system
