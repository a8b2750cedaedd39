"""The compiled names of the prefix index: as its dicts in all they say, small, and hard to break.

Collected where they can be built (`conftest.py`).
"""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from functools import partial

import pytest

from disagg.kernels.cpu.library import BLOCK_NAMES
from disagg.router.block_names import NUM_SHARDS, BlockNames, CompiledNames, DictNames
from tests.kernels.compiled import loaded
from tests.router.test_prefix_index import NAMES, random_names


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return loaded(BLOCK_NAMES)


def test_a_name_takes_few_bytes(library: ctypes.CDLL) -> None:
    names = CompiledNames(1 << 30, library)
    empty, rng, sizes = names.nbytes, random.Random(11), []
    names.keep(1, 1)
    while names.num_names < 100_000:
        names.put(random_names(rng, 1000), [(1, 1000)])
        if names.num_names > 10_000:  # a shard of few names has room for eight
            sizes.append((names.nbytes - empty) / names.num_names)
    assert min(sizes) > 25 and max(sizes) < CompiledNames.ENTRY_NBYTES


def test_both_kinds_of_names_agree(library: ctypes.CDLL) -> None:
    compiled, dicts = CompiledNames(1 << 20, library), DictNames(1 << 20)
    kinds: tuple[BlockNames, ...] = compiled, dicts
    rng = random.Random(9)
    names = random_names(rng, 300)
    masks = [0, *(rng.getrandbits(200) | 1 << 150 for _ in range(5))]
    for number, mask in enumerate(masks):
        for each in kinds:
            each.keep(number, mask)
    for turn in range(2000):
        some = rng.choices(names, k=rng.randrange(1, 40))
        if rng.random() < 0.5:
            runs = [(rng.randrange(6), end) for end in range(1, len(some) + 1)]
            assert compiled.put(some, runs) == dicts.put(some, runs) == 0
        else:
            alive, among, start = rng.getrandbits(200), rng.getrandbits(300), rng.random()
            found = [each.match(some, alive) for each in kinds]
            places = [each.places[: each.num_places] for each in found]
            assert places[0] == places[1]
            depths = [[each.depths[place] for place in places[0]] for each in found]
            assert depths[0] == depths[1]
            first, second = (
                each.deepest(its, among, start, 12) for each, its in zip(kinds, found, strict=True)
            )
            assert first == second
            assert compiled.sets_of(some) == dicts.sets_of(some)
        if turn % 50 == 0:
            number, is_dead = rng.randrange(1, 6), rng.random() < 0.5
            for each in kinds:
                each.kill(number, is_dead)
                each.keep(number, masks[number] >> turn // 50)
                for shard in range(NUM_SHARDS):
                    each.purge(shard)
        assert compiled.counts(0, 6) == dicts.counts(0, 6)
        assert compiled.num_names == dicts.num_names


@pytest.mark.parametrize("is_compiled", [False, True])
def test_one_put_does_not_go_through_all_names_where_all_were_looked_up(
    library: ctypes.CDLL, is_compiled: bool
) -> None:
    """With room for 27 million names, an ingress would stand still for many seconds."""
    kind = partial(CompiledNames, library=library) if is_compiled else DictNames
    names, rng = kind(50_000 * kind(1).ENTRY_NBYTES), random.Random(12)
    names.keep(1, 1)
    asked = random_names(rng, 50_000)
    names.put(asked, [(1, len(asked))])
    assert names.match(asked, 1).depths[0] == 50_000
    assert 8 <= names.put(random_names(rng, 8), [(1, 8)]) < 100
    # The oldest were spared, and no others: so these leave first.
    names.put(random_names(rng, 4000), [(1, 4000)])
    assert sum(names.sets_of([name]) == [(1, 1)] for name in asked[:2000]) > 1900


def test_names_of_a_wrong_length_are_never_read(library: ctypes.CDLL) -> None:
    names = CompiledNames(1 << 20, library)
    for call in (names.sets_of, lambda some: names.match(some, 1)):
        with pytest.raises(ValueError, match="16 bytes each"):
            call([b"short", NAMES[0]])
    with pytest.raises(ValueError, match="16 bytes each"):
        names.put([b"short"], [(1, 1)])


REFUSED = """
import ctypes, random, resource, sys
from disagg.router import block_names
names, rng = block_names.CompiledNames(1 << 40, ctypes.CDLL(sys.argv[1])), random.Random(0)
names.keep(1, 1)
some = [rng.randbytes(16) for _ in range(500_000)]
join, joined = block_names._joined, b"".join(some)
block_names._joined = lambda names: joined  # so that only the table needs memory
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
no_limit = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 20), no_limit[1]))
num_evicted = names.put(some, [(1, len(some))])
resource.setrlimit(resource.RLIMIT_AS, no_limit)
block_names._joined = join
assert names.num_names + num_evicted == len(some)
assert 50_000 < names.num_names < 400_000, names.num_names
newest = some[-1000:]
assert sum(names.sets_of([name]) == [(1, 1)] for name in newest) > 900
"""


def test_memory_that_is_refused_costs_old_names_and_not_the_process(library: ctypes.CDLL) -> None:
    command = [sys.executable, "-c", REFUSED, library._name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
