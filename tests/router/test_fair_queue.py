"""Properties of the order in which tenants are served, over random histories."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from disagg.router.fair_queue import FairQueue, Waiter
from tests.grids import examples

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}
MOST_S = 8.0
_numbers = itertools.count()

costs = st.floats(0.1, MOST_S)
tenants = st.sampled_from(sorted(WEIGHTS))


def waiter(
    tenant: str,
    cost_s: float = 1.0,
    nbytes: int = 10,
    *,
    priority: int = 0,
    deadline_s: float = 0.0,
) -> Waiter:
    return Waiter(tenant, cost_s, nbytes, (priority, deadline_s, next(_numbers)))


def new_queue() -> FairQueue[Waiter]:
    return FairQueue(WEIGHTS.__getitem__)


def turn(queue: FairQueue[Waiter]) -> Waiter:
    first = queue.first()
    assert first is not None
    queue.serve(first)
    return first


@given(st.lists(st.tuples(tenants, costs), min_size=1), st.integers(0, 20))
def test_everybody_who_waits_is_served_once_and_nothing_is_left(
    arrivals: list[tuple[str, float]], num_before: int
) -> None:
    """Work conserving: as long as somebody waits there is a first one."""
    queue = new_queue()
    pushed = [waiter(tenant, cost_s) for tenant, cost_s in arrivals]
    served = []
    for each in pushed:
        queue.push(each)
        if len(queue) > num_before:
            served.append(turn(queue))
    while len(queue):
        served.append(turn(queue))
    assert sorted(map(id, served)) == sorted(map(id, pushed))
    assert (queue.first(), queue.nbytes, queue.num_by_tenant()) == (None, 0, {})


@examples(66)
@given(
    st.lists(costs, min_size=15, max_size=30),
    st.lists(costs, min_size=15, max_size=30),
    st.lists(costs, min_size=45, max_size=60),
    st.lists(st.tuples(tenants, costs), max_size=10),
)
def test_tenants_that_wait_all_the_time_are_served_by_their_weights(
    a: list[float], b: list[float], c: list[float], before: list[tuple[str, float]]
) -> None:
    """At every moment, whatever had been served before (theorem 4.4 of Sheng et al.): for its
    weight no tenant is ahead of another by more than one of the largest requests of each."""
    queue = new_queue()
    for tenant, cost_s in before:
        queue.pass_by(tenant, cost_s)
    for tenant, own in (("a", a), ("b", b), ("c", c)):
        for cost_s in own:
            queue.push(waiter(tenant, cost_s))
    start = {name: queue._tenants[name].served_s for name in WEIGHTS}
    spread = max(start.values()) - min(start.values())
    # What was served while nobody waited is not held against anybody; sums of floats are rounded.
    assert spread <= MOST_S + 1e-9
    served = dict.fromkeys(WEIGHTS, 0.0)
    while len(queue.num_by_tenant()) == len(WEIGHTS):
        each = turn(queue)
        served[each.tenant] += each.cost_s
        shares = [served[name] / weight for name, weight in WEIGHTS.items()]
        assert max(shares) - min(shares) <= 2 * MOST_S + spread + 1e-6


@given(st.lists(costs, min_size=1, max_size=40), costs)
def test_nobody_starves_behind_a_flood(flood: list[float], cost_s: float) -> None:
    """However many come after it, whoever waits is served after a bounded amount of work."""
    queue = new_queue()
    for each in flood:
        queue.push(waiter("a", each))
    mine = waiter("b", cost_s)
    queue.push(mine)
    before_s = 0.0
    while (one := turn(queue)) is not mine:
        before_s += one.cost_s
        queue.push(waiter("a", MOST_S))
        assert before_s <= 2 * MOST_S


@examples(100)
@given(
    st.lists(
        st.tuples(tenants, costs, st.integers(-2, 2), st.integers(0, 5), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_the_queue_counts_what_is_in_it(
    steps: list[tuple[str, float, int, int, bool]],
) -> None:
    """Bytes, lengths and work, recounted after each arrival, turn and departure."""
    queue = new_queue()
    here: list[Waiter] = []
    for tenant, cost_s, priority, deadline_s, comes in steps:
        if comes or not here:
            one = waiter(tenant, cost_s, 7, priority=priority, deadline_s=float(deadline_s))
            queue.push(one)
            here.append(one)
        elif deadline_s % 2:
            here.remove(turn(queue))
        else:
            gone = here.pop(deadline_s % len(here))
            queue.remove(gone)
            queue.remove(gone)  # once more means nothing
        assert sorted(map(id, queue)) == sorted(map(id, here))
        assert len(queue) == len(here)
        assert queue.nbytes == 7 * len(here)
        last = waiter("a", 1.0, priority=99, deadline_s=1e9)
        assert abs(queue.ahead_s(last) - sum(each.cost_s for each in here)) < 1e-6
    for one in here:
        queue.remove(one)
    assert not any(tenant.waiting or tenant.waiting_s for tenant in queue._tenants.values())


@given(
    st.lists(st.tuples(tenants, st.integers(-2, 2)), min_size=2, max_size=30),
)
def test_a_lower_number_goes_first_whoever_asks(arrivals: list[tuple[str, int]]) -> None:
    queue = new_queue()
    for tenant, priority in arrivals:
        queue.push(waiter(tenant, priority=priority))
    served = [turn(queue).priority for _ in arrivals]
    assert served == sorted(served)


def test_of_one_tenant_the_earliest_deadline_goes_first() -> None:
    queue = new_queue()
    late, soon, too = (waiter("a", deadline_s=each) for each in (9.0, 3.0, 9.0))
    for each in (late, soon, too):
        queue.push(each)
    assert [turn(queue) for _ in range(3)] == [soon, late, too]


@examples(66)
@given(st.lists(st.tuples(tenants, costs), min_size=1, max_size=30), tenants, costs)
def test_what_is_said_to_be_ahead_is_what_comes_before(
    arrivals: list[tuple[str, float]], tenant: str, cost_s: float
) -> None:
    """But for one request of each other tenant, which cannot be cut in two."""
    queue = new_queue()
    for name, each_s in arrivals:
        queue.push(waiter(name, each_s))
    mine = waiter(tenant, cost_s)
    predicted_s = queue.ahead_s(mine)
    queue.push(mine)
    before_s = 0.0
    while (each := turn(queue)) is not mine:
        before_s += each.cost_s
    assert abs(before_s - predicted_s) <= (len(WEIGHTS) - 1) * MOST_S + 1e-6


def test_what_a_request_took_counts_and_not_what_was_expected() -> None:
    queue = new_queue()
    for tenant in "ab":
        for _ in range(4):
            queue.push(waiter(tenant))
    assert turn(queue).tenant == "a"
    queue.correct("a", 2.0)  # it took three times as much
    assert [turn(queue).tenant for _ in range(4)] == ["b", "b", "b", "a"]


def test_whoever_takes_the_most_room_for_its_weight_is_found() -> None:
    queue = new_queue()
    for tenant, num in (("a", 3), ("c", 8)):
        for _ in range(num):
            queue.push(waiter(tenant))
    last = queue.longest()
    assert last is not None and last.tenant == "a"
    assert queue.room_taken("c", 20) == 100 / 3
    assert [each for each in queue if each.tenant == "a"][-1] is last
