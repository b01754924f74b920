"""Any workload: every promise holds at every step, everybody ends once, nothing is left."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kvalet.actors.decisions.preemption import POLICIES
from kvalet.actors.decisions.replay import audit, replay
from kvalet.protocol import events as e
from kvalet.protocol.commands import Settings
from tests.decisions import promises
from tests.decisions.driver import World

LEAVE_ON: list[type[e.AnyEvent] | None] = [
    *([None] * 8),
    *(e.LeaseQueued, e.LeaseGranted, e.LeaseExtended, e.LeaseParking, e.LeaseParked),
    *(e.LeaseResumed, e.LeaseEnded),
]
BOUNDED = settings(
    max_examples=250,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Visitor:
    """One request of a workload and the tick at which it comes."""

    at: int
    prompt: int
    target: int
    cap: int | None
    pausable: bool
    seats: int
    park_every: int
    leave_on: type[e.AnyEvent] | None
    leave_after: int | None


visitors = st.builds(
    Visitor,
    at=st.integers(0, 200),
    prompt=st.integers(1, 250),
    target=st.integers(1, 500),
    cap=st.one_of(st.none(), st.integers(1, 600)),
    pausable=st.sampled_from([True, True, True, False]),
    seats=st.sampled_from([1, 1, 1, 1, 2, 3]),
    park_every=st.sampled_from([0, 0, 0, 7]),
    leave_on=st.sampled_from(LEAVE_ON),
    leave_after=st.one_of(st.none(), st.none(), st.integers(0, 300)),
)
workloads = st.lists(visitors, min_size=2, max_size=12)
houses = st.builds(
    Settings,
    policy=st.sampled_from(sorted(POLICIES)),
    block_min=st.sampled_from([1, 4, 16]),
    first_block=st.sampled_from([1, 64]),
    quantum=st.sampled_from([1, 64]),
    resume_max=st.sampled_from([0, 1, 32]),
    promote_after=st.sampled_from([1, 3]),
    queue_max=st.sampled_from([1, 1024]),
    park_ram_bytes=st.sampled_from([None, 0, 40_000]),
    preempt=st.sampled_from([True, True, True, False]),
)


def play(world: World, workload: list[Visitor], troubles: dict[int, str]) -> World:
    """Let the visitors come and go; ``troubles`` names ticks of a crash or a restart."""
    pending = sorted(workload, key=lambda visitor: visitor.at)
    leaving: list[tuple[int, int]] = []
    for now in range(401):
        while pending and pending[0].at <= now:
            visitor = pending.pop(0)
            world.arrive(
                visitor.prompt,
                visitor.target,
                visitor.cap,
                pausable=visitor.pausable,
                seats=visitor.seats,
                park_every=visitor.park_every,
                leave_on=visitor.leave_on,
            )
            if visitor.leave_after is not None:
                leaving.append((now + visitor.leave_after, len(world.chats)))
        for _, number in (pair for pair in leaving if pair[0] == now):
            world.leave(list(world.chats.values())[number - 1])
        if troubles.get(now) == "crash":
            world.crash()
            world.launch()
        elif troubles.get(now) == "restart":
            world.reopen()
        world.tick()
    return world.run(30_000)


def is_settled(world: World) -> None:
    """Nothing is left, everybody ended once, and the journal says the same again."""
    assert promises.is_empty(world.house)
    assert world.house.residue_total == sum(r.cells for r in world.house.residue.values())
    assert all(world.laws.ends[name] == 1 for name in world.chats)
    assert set(world.laws.ends) == set(world.chats)
    assert replay(world.decisions) == world.house
    assert audit(world.decisions).identical


@seed(20_250_101)
@given(workload=workloads, house=houses, number=st.integers(0, 1 << 20))
@BOUNDED
def test_any_workload_keeps_every_promise(
    workload: list[Visitor], house: Settings, number: int
) -> None:
    world = World(cells=700, slots=3, headroom=3, settings=house, seed=number).open()

    play(world, workload, {})

    is_settled(world)


@seed(20_250_102)
@given(
    workload=workloads,
    house=houses,
    number=st.integers(0, 1 << 20),
    troubles=st.dictionaries(
        st.integers(0, 400), st.sampled_from(["crash", "restart"]), min_size=1, max_size=3
    ),
)
@BOUNDED
def test_crashes_and_restarts_keep_every_promise(
    workload: list[Visitor], house: Settings, number: int, troubles: dict[int, str]
) -> None:
    world = World(cells=700, slots=3, headroom=3, settings=house, seed=number).open()

    play(world, workload, troubles)

    is_settled(world)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_long_day_with_each_policy_leaves_nothing_behind(policy: str) -> None:
    rng = random.Random(7)
    world = World(cells=2048, slots=4, settings=Settings(policy=policy), seed=7).open()
    for _ in range(30):
        world.arrive(rng.randrange(1, 400), rng.randrange(1, 900), rng.choice([None, 900, 100]))
        for _ in range(rng.randrange(40)):
            world.tick()

    world.run()

    is_settled(world)
    assert {chat.outcome for chat in world.chats.values()} == {"finished"}


@seed(20_250_103)
@given(workload=workloads, number=st.integers(0, 1 << 20))
@settings(BOUNDED, max_examples=60)
def test_two_runs_decide_the_same_bytes(workload: list[Visitor], number: int) -> None:
    first, second = (World(cells=700, slots=3, seed=number).open() for _ in range(2))

    play(first, workload, {})
    play(second, workload, {})

    assert first.decisions == second.decisions
