"""Races 14 to 16: what is counted of whom, whatever a reading of the slots says."""

from __future__ import annotations

from itertools import combinations, permutations
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvalet.actors.decisions.status import status
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, RequestId, SlotId
from tests.actors.stage import TEXT, chat, stage
from tests.decisions.driver import Chat, World
from tests.decisions.test_handed_over import handed_over, notice
from tests.races.house import (
    KEEPALIVE,
    PREEMPTED,
    PlayingServer,
    Script,
    decided,
    house,
    over,
    said,
    steady,
    visit,
)

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

OLD: Final = c.PressureRead(slots=tuple((SlotId(n), Cells(3), False) for n in range(4)))
"""A look at the slots from before anybody was there."""
FULL: Final = c.PressureRead(
    slots=tuple((SlotId(n), Cells(90_000), True) for n in range(4)), parked=(SlotId(0), SlotId(2))
)

TICKS_MAX: Final = 20_000


def day(seed: int | None, method: str, reading: c.PressureRead | None) -> World:
    """Twenty requests of every kind; ``reading`` is told again at every tick."""
    headroom = 0 if method == "server" else 4
    world = World(cells=1024, seed=seed, headroom=headroom).open(method)
    for number in range(20):
        cap = None if number % 3 else 100
        world.arrive(50 + 9 * number, 60, cap, pausable=number % 4 > 0)
        for _ in range(4):
            tick(world, reading)
    while any(chat.state not in ("done", "gone") for chat in world.chats.values()):
        tick(world, reading)
        assert world.now < TICKS_MAX, "nothing moves"
    return world.run()


def tick(world: World, reading: c.PressureRead | None) -> None:
    if reading is not None:
        granted = world.house.granted_total
        world.tell(reading)
        assert world.house.granted_total == granted
    world.tick()


def life_of(world: World) -> list[e.AnyEvent]:
    """All that happened, but for the readings."""
    return [event for event in world.log if not isinstance(event, e.PoolRead)]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("method", ["save", "recompute", "server"])
def test_race_14_an_old_reading_at_every_tick_changes_nothing_for_anybody(
    method: str, seed: int | None
) -> None:
    untold = life_of(day(seed, method, None))
    for reading in (OLD, FULL):
        assert life_of(day(seed, method, reading)) == untold


@pytest.mark.parametrize("streaming", [True, False])
def test_race_14_a_holder_counts_with_all_that_it_may_generate_until_it_has_ended(
    streaming: bool,
) -> None:
    world = World(cells=1024).open()
    holder = world.arrive(400, 300, 300, pausable=streaming)
    world.tell(OLD)
    second = world.arrive(400, 10, 300, pausable=False)
    while holder.state == "running":
        assert world.house.leases[holder.request].granted >= holder.cells
        assert world.house.queue == (second.request,), "the reading has made no room"
        tick(world, OLD)
    world.run()

    assert (holder.outcome, second.outcome) == ("finished", "finished")


AWAY: Final = Script(((0.0, PREEMPTED), *((2.0, KEEPALIVE) for _ in range(60)), (0.0, said("a"))))


async def test_race_15_a_pool_with_three_parks_is_nearly_empty_and_nothing_is_erased(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [*(Script((*AWAY.pieces, *steady(1, 0.0).pieces)) for _ in range(3)), steady(60, 1.0)]
    server = PlayingServer(scripts, parked={0, 1, 2}, cells={0: 7000, 1: 7000, 2: 7000, 3: 90})
    async with house(tmp_path, server, notices=True) as it:
        guests = [await visit(it, server) for _ in range(4)]
        waiting = it.invite({"prompt": "once more", "stream": True}, path=TEXT)
        await trio.sleep(30)

        assert [event.resident for _, event in decided(it, e.PoolRead)] == [90]
        shown = status(it.house, Nanos(round(trio.current_time() * 1e9)))["pool"]
        assert (shown["resident"], shown["parked"]) == (len("once"), 3 * len("once"))
        assert it.house.queue == (RequestId("r5"),)
        server.parked.clear()
        server.scripts.append(steady(3, 0.1))
        await over(*guests, waiting)
        assert [guest.errors for guest in (*guests, waiting)] == [[]] * 5
        assert not any("erase" in route for route in server.routes)


def erased(world: World) -> list[tuple[SlotId, ...]]:
    """All that was ever ordered to be erased."""
    orders = [getattr(event, "erase", ()) for event in world.log]
    return [order for order in orders if order]


@pytest.mark.parametrize("away", list(combinations(range(4), 3)))
def test_race_15_whichever_three_are_parked_the_fourth_alone_is_resident(
    away: tuple[int, ...],
) -> None:
    world = handed_over()
    chats = [world.arrive(2500 if slot in away else 90, 100) for slot in range(4)]
    for slot in away:
        notice(world, chats[slot], "preempted", away=True)
    shown: dict[str, Any] = status(world.house, Nanos(0))["pool"]
    fifth = world.arrive(90, 5)

    assert (shown["resident"], shown["parked"]) == (90, 7500)
    assert world.house.queue == (fifth.request,)
    for slot in away:
        notice(world, chats[slot], "resumed", away=False)
    world.run()
    assert [chat.outcome for chat in (*chats, fifth)] == ["finished"] * 5
    assert erased(world) == []


def test_race_15_before_a_pool_is_known_nothing_is_erased() -> None:
    world = World()
    world.tell(c.OpenHouse(settings=world.settings))
    chats = [world.arrive(300, 20, 60) for _ in range(4)]
    world.tell(FULL)
    assert world.house.limit <= 0
    assert erased(world) == []
    world.launch()
    world.run()

    assert [chat.outcome for chat in chats] == ["finished"] * 4
    assert erased(world) == []


@pytest.mark.parametrize("reading", [OLD, FULL])
def test_race_15_without_preemption_who_keeps_to_its_share_erases_nothing(
    reading: c.PressureRead,
) -> None:
    world = World(cells=1024, settings=c.Settings(preempt=False)).open("recompute")
    for _ in range(12):
        world.arrive(190, 20)
        for _ in range(6):
            tick(world, reading)
    world.run()

    assert world.house.residue_total > 3 * 190
    assert erased(world) == []


WINDOW: Final = 16_384
STATED: Final = 13_000
TRIO: Final = (STATED, None, None)


def ask_all(world: World, caps: tuple[int | None, ...]) -> list[Chat]:
    """Requests that nobody can park, of a thousand tokens each."""
    return [world.arrive(1000, WINDOW, cap, pausable=False) for cap in caps]


def grants(world: World) -> dict[RequestId, e.LeaseGranted]:
    return {event.request: event for event in world.log if isinstance(event, e.LeaseGranted)}


@pytest.mark.parametrize("caps", sorted(set(permutations(TRIO)), key=str))
def test_race_16_of_the_trio_those_admitted_may_use_no_more_than_there_is(
    caps: tuple[int | None, ...],
) -> None:
    world = World(cells=WINDOW).open()
    chats = ask_all(world, caps)
    given = grants(world)
    for one, cap in zip(chats, caps, strict=True):
        if one.request in given:
            grant = given[one.request]
            assert one.prompt + grant.credit == grant.granted, "permitted is what is reserved"
            assert grant.granted == (14_000 if cap else world.house.limit // 4)
    assert sum(grant.granted for grant in given.values()) <= world.house.limit
    waiting = tuple(one.request for one in chats if one.request not in given)
    assert world.house.queue == waiting != ()
    world.run()

    assert len(grants(world)) == 3
    assert [one.legs for one in chats] == [1, 1, 1]


@pytest.mark.parametrize("caps", sorted(set(permutations(TRIO)), key=str))
def test_race_16_on_a_server_that_parks_the_trio_gets_the_window(
    caps: tuple[int | None, ...],
) -> None:
    world = handed_over(cells=WINDOW)
    ask_all(world, caps)

    assert [grant.credit for grant in grants(world).values()] == [
        cap or WINDOW - 1000 for cap in caps
    ]
    assert world.house.queue == ()


CROWD: Final = {"one": None, "two": 70, "six": None, "ten": 30}
"""Who asks, in this order, and with what limit; the last one has tools and is never parked."""


async def test_race_16_no_cap_on_the_wire_passes_what_is_reserved_on_any_leg(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, cells=240, seats=3) as it:
        for name, cap in CROWD.items():
            tools = [{"type": "function"}] if name == "ten" else []
            it.invite(chat(name, max_tokens=cap, tools=tools))
            await wait_all_tasks_blocked()
        await it.all_gone()
        names = {RequestId(f"r{at}"): name for at, name in enumerate(CROWD, start=1)}
        reserved: dict[str, list[tuple[float, int]]] = {name: [] for name in CROWD}
        given: list[tuple[float, e.LeaseGranted | e.LeaseExtended | e.LeaseResumed]] = [
            *decided(it, e.LeaseGranted),
            *decided(it, e.LeaseExtended),
            *decided(it, e.LeaseResumed),
        ]
        for at, event in given:
            reserved[names[event.request]].append((at, event.credit))
        wire: dict[str, list[int]] = {name: [] for name in CROWD}
        for body in it.server.bodies:
            wire[body["messages"][0]["content"]].append(body["max_tokens"])

        assert wire == {name: [most for _, most in sorted(legs)] for name, legs in reserved.items()}
        assert len(wire["ten"]) == 1
        assert sum(map(len, wire.values())) > 12


async def test_race_16_on_a_server_that_parks_the_wire_has_the_window(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    server = PlayingServer([steady(3, 0.1) for _ in range(3)])
    async with house(tmp_path, server, notices=True) as it:
        await over(*[await visit(it, server) for _ in range(3)])

        assert [body["max_tokens"] for body in server.bodies] == [8192 - len("once")] * 3
