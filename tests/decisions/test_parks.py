"""Whom to park, who goes on, and what a park may cost."""

from __future__ import annotations

from typing import TypeVar

import pytest
from msgspec.structs import replace

from kvalet.actors.decisions.preemption import POLICIES, choose_victim
from kvalet.actors.decisions.state import House, Lease
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, LeaseId, Nanos, RequestId
from tests.decisions.driver import Chat, World


def lease(number: int, cells: int, **more: object) -> Lease:
    whole = Lease(
        request=RequestId(f"r{number}"),
        surface="openai.chat",
        state="waiting",
        arrived_ns=Nanos(0),
        since_ns=Nanos(0),
        order=number,
        lease=LeaseId(number),
        cells=Cells(cells),
        granted=Cells(cells),
    )
    return replace(whole, **more)


def victim_of(policy: str, *leases: Lease, **more: object) -> str | None:
    house = House(
        settings=c.Settings(policy=policy), leases={entry.request: entry for entry in leases}
    )
    victim = choose_victim(replace(house, **more), leases[0])
    return victim.request if victim else None


def spend(world: World, chat: Chat, *, stuck: bool = False) -> list[e.AnyEvent]:
    entry = world.house.leases[chat.request]
    cells = entry.cells if stuck else entry.granted
    chat.generated, chat.state = cells - chat.prompt, "waiting"
    return world.tell(
        c.CreditSpent(
            request=chat.request, cells=Cells(cells), generated=chat.generated, stuck=stuck
        )
    )


Event = TypeVar("Event", bound=e.AnyEvent)


def until(world: World, kind: type[Event]) -> Event:
    while True:
        world.tick()
        for event in world.log:
            if isinstance(event, kind):
                return event


def test_the_least_sunk_chat_is_parked() -> None:
    assert victim_of("least-sunk", lease(1, 30), lease(2, 20), lease(3, 40)) == "r2"


def test_of_equals_the_newest_is_parked() -> None:
    assert victim_of("least-sunk", lease(1, 20), lease(2, 20), lease(3, 20)) == "r3"


def test_a_chat_that_was_parked_three_times_is_spared() -> None:
    assert victim_of("least-sunk", lease(1, 30), lease(2, 20, parks=3), lease(3, 40)) == "r1"
    assert victim_of("least-sunk", lease(1, 30), lease(2, 20, parks=2), lease(3, 40)) == "r2"


def test_fair_share_parks_whoever_was_served_most() -> None:
    assert victim_of("fair-share", lease(1, 9, generated=5), lease(2, 9, generated=7)) == "r2"


def test_last_in_is_first_out_where_asked_for() -> None:
    assert victim_of("lifo", lease(1, 10), lease(2, 99), lease(3, 50)) == "r3"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_last_one_that_makes_progress_is_never_parked(policy: str) -> None:
    assert victim_of(policy, lease(1, 30)) is None
    assert victim_of(policy, lease(1, 30), lease(2, 40, state="parked", granted=0)) is None
    assert victim_of(policy, lease(1, 30), lease(2, 40, state="closing")) is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nobody_is_parked_who_must_not_be(policy: str) -> None:
    untouchable = [
        lease(2, 1, pausable=False),
        lease(3, 1, ordered=True),
        lease(4, 1, parks=32),
        lease(5, 1, state="running", granted=Cells(400)),
    ]

    assert victim_of(policy, lease(1, 300), *untouchable) == "r1"


def test_parked_chats_go_on_in_the_order_of_their_parks() -> None:
    world = World().open()
    for _ in range(8):
        world.arrive(20, 900)

    world.run()

    parked: list[str] = []
    resumes = 0
    for event in world.log:
        if isinstance(event, e.LeaseParked):
            parked.append(event.request)
        elif isinstance(event, e.LeaseResumed):
            assert parked.pop(0) == event.request
            resumes += 1
    assert resumes


def test_a_newcomer_waits_behind_the_parked() -> None:
    world = World().open()
    for _ in range(4):
        world.arrive(20, 900)
    until(world, e.LeaseParked)

    newcomer = world.arrive(1, 1, 1)

    assert world.house.queue == (newcomer.request,)


def test_a_resumed_chat_may_run_its_quantum() -> None:
    world = World().open()
    for _ in range(4):
        world.arrive(20, 900, 900)

    world.run()

    for event in world.log:
        if isinstance(event, e.LeaseResumed):
            chat = world.chats[event.request]
            assert event.credit >= min(world.settings.quantum, 16) or chat.outcome == "finished"


def test_nobody_is_parked_more_often_than_the_limit_while_others_can_be() -> None:
    world = World(settings=c.Settings(resume_max=1)).open()
    chats = [world.arrive(20, 900, 900) for _ in range(4)]

    world.run()

    assert {chat.outcome for chat in chats} == {"finished"}


def test_the_limit_on_parks_does_not_end_in_a_standstill() -> None:
    world = World(settings=c.Settings(resume_max=0)).open()
    chats = [world.arrive(20, 900) for _ in range(4)]

    world.run()

    assert {chat.outcome for chat in chats} == {"finished"}
    assert world.house.totals.parks


def test_a_chat_that_fills_the_pool_alone_ends_at_the_contexts_end() -> None:
    world = World().open()
    chat = world.arrive(20, 5000)

    world.run()

    assert chat.outcome == "context-full"
    assert chat.generated == 2044 - 20


def test_a_leg_that_settled_no_text_is_followed_by_one_twice_as_long() -> None:
    world = World(cells=4096, slots=64, headroom=64).open()
    chat = world.arrive(20, 900)
    credit = world.house.leases[chat.request].granted - 20

    events = spend(world, chat, stuck=True)

    extended = events[0]
    assert isinstance(extended, e.LeaseExtended)
    assert extended.credit >= 2 * credit
    assert extended.cells == 20


def test_a_saved_chat_counts_against_the_budget_and_the_next_one_is_dropped() -> None:
    world = World(settings=c.Settings(park_ram_bytes=1)).open()
    for _ in range(4):
        world.arrive(20, 900)

    world.run()

    parks = [event for event in world.log if isinstance(event, e.LeaseParking)]
    assert {event.save for event in parks} == {True, False}
    assert world.house.saved_bytes == 0


def test_without_a_budget_nothing_is_saved() -> None:
    world = World(settings=c.Settings(park_ram_bytes=0)).open()
    for _ in range(4):
        world.arrive(20, 900)

    world.run()

    parks = [event for event in world.log if isinstance(event, e.LeaseParking)]
    assert parks
    assert not any(event.save for event in parks)


def resumed_world() -> tuple[World, Chat]:
    world = World().open()
    for _ in range(4):
        world.arrive(20, 900)
    request = until(world, e.LeaseResumed).request
    return world, world.chats[request]


def test_three_misses_in_a_row_end_the_saving() -> None:
    world, _ = resumed_world()
    seen: list[str] = []
    world.chats[RequestId("r1")].leave_on = None
    while "MethodDemoted" not in seen:
        world.tick()
        for request in list(world.house.leases):
            seen += [
                type(event).__name__
                for event in world.tell(
                    c.CacheSeen(request=request, expected=Cells(100), reused=Cells(49))
                )
            ]

    assert seen.count("LeaseRecomputed") == 3
    assert world.house.method == "recompute"
    demoted = len(world.log)
    world.run()
    later = [event for event in world.log[demoted:] if isinstance(event, e.LeaseParking)]
    assert not any(event.save for event in later)


def test_cells_that_all_came_back_are_no_miss() -> None:
    world, chat = resumed_world()

    events = world.tell(c.CacheSeen(request=chat.request, expected=Cells(9), reused=Cells(9)))

    assert [type(event).__name__ for event in events] == ["LeaseRestored"]
    assert world.house.misses == 0


def test_one_resume_is_recomputed_once() -> None:
    world, chat = resumed_world()
    report = c.CacheSeen(request=chat.request, expected=Cells(9), reused=Cells(8))

    assert len(world.tell(report)) == 1
    assert world.tell(report) == []


def test_a_chat_that_was_never_parked_is_not_judged() -> None:
    world = World().open()
    chat = world.arrive(20, 100)

    report = c.CacheSeen(request=chat.request, expected=Cells(9), reused=Cells(0))
    assert world.tell(report) == []


def test_a_client_who_leaves_while_parked_is_given_back_in_one_breath() -> None:
    world = World().open()
    for _ in range(4):
        world.arrive(20, 900)
    parked = until(world, e.LeaseParked).request

    events = world.tell(c.Leave(request=parked))

    assert [type(event).__name__ for event in events[:2]] == ["LeaseEnded", "LeaseReleased"]
    assert world.house.totals.ended_parked == 1
    assert world.house.saved_bytes == 0


def test_a_victim_that_leaves_during_its_park_stays_charged_until_its_slot_is_idle() -> None:
    world = World().open()
    for _ in range(4):
        world.arrive(20, 900)
    victim = world.chats[until(world, e.LeaseParking).request]
    held = world.house.granted_total

    world.leave(victim)

    assert world.house.granted_total == held
    freed = c.CellsFreed(request=victim.request, method="save", cells=Cells(1), saved_bytes=9)
    assert world.tell(freed) == []
    world.tell(c.SlotSeen(request=victim.request))
    assert victim.request not in world.house.leases


def test_a_forced_park_happens_without_need_and_not_twice_at_one_token() -> None:
    world = World().open()
    chat = world.arrive(20, 100, park_every=10)

    world.run()

    assert chat.outcome == "finished"
    assert world.house.totals.parks == 9


def test_a_late_order_does_not_park_a_chat_that_found_room() -> None:
    world = World().open()
    chats = [world.arrive(20, 900) for _ in range(4)]
    pressed = until(world, e.PoolPressed)
    others = [chat for chat in chats if chat.request != pressed.victim]
    for chat in others:
        world.leave(chat)

    world.run()

    assert {chat.outcome for chat in chats if chat not in others} == {"finished"}
