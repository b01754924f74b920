"""Situations that a controller with a watermark gets wrong, played against leases of credit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.preemption import POLICIES, choose_victim
from kvalet.actors.decisions.state import House, Lease
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, LeaseId, Nanos, RequestId, SlotId
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


def victim_of(policy: str, *leases: Lease, exact: str = "off") -> str | None:
    house = House(
        settings=c.Settings(policy=policy), leases={entry.request: entry for entry in leases}
    )
    house = replace(house, server=replace(house.server, exact=exact))
    victim = choose_victim(house, leases[0])
    return victim.request if victim else None


def moments(world: World) -> Iterator[tuple[House, e.AnyEvent]]:
    """Each event of a world's life, with the house as it was right before it."""
    house = House()
    for decision in world.decisions:
        for event in decision.events:
            yield house, event
            house = fold(house, [event], decision.at_ns)


def grants(world: World) -> list[e.LeaseGranted]:
    return [event for event in world.log if isinstance(event, e.LeaseGranted)]


# -- whom a full pool parks --------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("exact", ["on", "unavailable", "no such word"])
def test_exact_concurrency_moves_no_victim(policy: str, exact: str) -> None:
    chats = [lease(1, 30, generated=3), lease(2, 20, generated=9), lease(3, 40, generated=5)]
    assert victim_of(policy, *chats, exact=exact) == victim_of(policy, *chats) is not None


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_holds_cells_for_good_counts_as_one_that_goes_on_and_who_is_being_parked_does_not(
    policy: str,
) -> None:
    asker = lease(1, 300)
    for_good = lease(2, 40, pausable=False, state="running")
    leaving = lease(3, 40, state="parking")

    assert victim_of(policy, asker, for_good) == "r1"
    assert victim_of(policy, asker, leaving) is None
    assert victim_of(policy, asker, for_good, leaving) == "r1"


def test_nobody_is_spared_for_ever() -> None:
    often = [lease(1, 30, parks=3), lease(2, 20, parks=5), lease(3, 40, parks=3)]
    assert victim_of("least-sunk", *often) == "r2"


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_nobody_is_parked_while_enough_cells_are_on_their_way(seed: int | None) -> None:
    world = World(seed=seed).open()
    for prompt in (20, 400, 90, 20, 300, 20):
        world.arrive(prompt, 900)
    world.run()

    victims = 0
    for house, event in moments(world):
        if isinstance(event, e.PoolPressed) and event.victim is not None:
            victims += 1
            spare = house.leases[event.asker].granted - event.cells
            assert house.coming + house.free + spare < event.short
    assert victims > 2


def test_a_lone_chat_is_not_parked_for_a_newcomer() -> None:
    world = World().open()
    first = world.arrive(1200, 700)
    second = world.arrive(1000, 10)
    world.run()

    assert (first.outcome, second.outcome) == ("finished", "finished")
    assert world.house.totals.parks == 0


def test_the_count_of_a_chats_parks_outlives_its_resumes() -> None:
    world = World(cells=1024, slots=4).open()
    for _ in range(6):
        world.arrive(20, 900)
    world.run()

    parks = Counter[RequestId]()
    for house, event in moments(world):
        if isinstance(event, e.LeaseParked):
            assert house.leases[event.request].parks == parks[event.request]
            parks[event.request] += 1
    assert max(parks.values()) > 1


def test_a_chat_that_has_ended_cannot_be_asked_to_leave_again() -> None:
    world = World().open()
    chat, neighbour = world.arrive(20, 100), world.arrive(20, 900)
    world.leave(chat)
    assert world.tell(c.Leave(request=chat.request)) == [], "its slot is not seen idle yet"
    world.run()
    late: list[c.Command] = [
        c.Leave(request=chat.request),
        c.CreditSpent(request=chat.request, cells=Cells(99), generated=79),
        c.CellsFreed(request=chat.request, method="save", cells=Cells(99), saved_bytes=9),
        c.AnswerEnded(request=chat.request, reason="stop", cells=Cells(99), generated=79),
        c.SlotSeen(request=chat.request, residue=Cells(99)),
        c.Leave(request=RequestId("nobody")),
    ]
    assert [world.tell(command) for command in late] == [[]] * len(late)
    assert neighbour.outcome == "finished"


# -- what is charged ---------------------------------------------------------------------


def test_chats_with_room_to_their_caps_are_charged_what_they_use_and_none_is_parked() -> None:
    world = World(cells=8192, slots=4).open()
    chats = [world.arrive(100, 768, 1024) for _ in range(4)]
    world.run()

    assert [chat.outcome for chat in chats] == ["finished"] * 4
    assert all(grant.feasible for grant in grants(world))
    assert not any(isinstance(event, e.PoolPressed) for event in world.log)


def test_whatever_a_reading_of_the_slots_says_no_credit_moves() -> None:
    def life(*resident: int) -> list[e.AnyEvent]:
        world = World().open()
        for _ in range(6):
            world.arrive(20, 900)
        while world.house.leases:
            world.tick()
            for figure in resident:
                slots = tuple((SlotId(slot), Cells(figure), True) for slot in range(4))
                world.tell(c.PressureRead(slots=slots))
        read = [event for event in world.log if isinstance(event, e.PoolRead)]
        assert bool(read) is bool(resident)
        return [event for event in world.log if not isinstance(event, e.PoolRead)]

    quiet = life()
    assert life(0, 7000) == quiet
    assert life(511) == quiet


def test_a_parked_chat_asks_for_what_it_had_and_a_quantum_and_not_for_its_cap() -> None:
    world = World().open()
    chats = [world.arrive(700, 5000, 5000) for _ in range(2)]
    world.run()

    resumed = [(house, x) for house, x in moments(world) if isinstance(x, e.LeaseResumed)]
    assert resumed
    for house, event in resumed:
        parked = house.leases[event.request]
        assert event.granted - event.credit == parked.cells > 0
        assert event.granted < parked.prompt + 5000
    assert {chat.outcome for chat in chats} == {"context-full"}


def test_each_of_two_chats_that_want_the_whole_pool_gets_it_in_the_end() -> None:
    world = World().open()
    chats = [world.arrive(40, 2000) for _ in range(2)]
    world.run()

    assert [(chat.outcome, chat.generated) for chat in chats] == [("finished", 2000)] * 2


def test_shares_of_very_unlike_prompts_never_pass_the_pool() -> None:
    world = World(cells=262_144, slots=4, settings=c.Settings(preempt=False)).open()
    chats = [world.arrive(prompt, 5) for prompt in (1, 65_537, 189_139, 1)]

    assert [grant.request for grant in grants(world)] == ["r1", "r2"]
    world.run()
    assert [chat.outcome for chat in chats] == ["finished"] * 4
    assert world.house.totals.parks == 0


def test_as_many_chats_as_there_are_slots_always_fit_without_parking() -> None:
    world = World(cells=4096, slots=8, headroom=8, settings=c.Settings(preempt=False)).open()
    for _ in range(8):
        world.arrive(30, 5)

    assert len(grants(world)) == 8
    assert {grant.granted for grant in grants(world)} == {4088 // 8}


# -- who waits ---------------------------------------------------------------------------


def test_when_the_head_of_the_queue_leaves_those_behind_it_are_served_at_once() -> None:
    world = World(cells=1024, slots=4).open()
    world.arrive(500, 400, pausable=False)
    head, small = world.arrive(700, 5), world.arrive(20, 5)
    assert list(world.house.queue) == [head.request, small.request]
    world.leave(head)

    assert list(world.house.queue) == []
    assert grants(world)[-1].request == small.request


def test_of_two_who_wait_for_one_room_the_second_gets_it_when_the_first_leaves_it() -> None:
    world = World(cells=1024, slots=4).open()
    resident = world.arrive(1000, 5)
    first, second = world.arrive(700, 400), world.arrive(700, 5)
    world.leave(resident)
    world.tick()

    assert [grant.request for grant in grants(world)][1:] == [first.request]
    assert world.house.queue == (second.request,)
    world.leave(first)
    world.run()
    assert second.outcome == "finished"


def test_many_small_parked_chats_do_not_pass_a_large_one_that_was_parked_before_them() -> None:
    world = World(cells=2048, slots=7, headroom=7, settings=c.Settings(policy="fair-share")).open()
    world.arrive(900, 800)
    for _ in range(6):
        world.arrive(20, 500)
    world.run()

    line: list[RequestId] = []
    waited = False
    for _, event in moments(world):
        if isinstance(event, e.LeaseParked):
            line.append(event.request)
        elif isinstance(event, e.LeaseResumed):
            assert event.request == line.pop(0)
            waited = waited or len(line) > 1
    assert waited


# -- what idle slots keep ----------------------------------------------------------------


def test_a_lone_chats_next_turn_finds_its_cells_and_erases_nothing() -> None:
    world = World().open()
    world.arrive(1500, 100)
    world.run()
    kept = world.house.residue[SlotId(0)].cells
    request = RequestId("r2")
    world.chats[request] = Chat(request, 1700, 10, None)
    world.tell(c.Arrive(request=request, surface="openai.chat", streaming=True))
    world.tell(c.PromptCounted(request=request, prompt=Cells(1700), affinity=((SlotId(0), kept),)))

    last = grants(world)[-1]
    assert (last.slots, last.erase) == ((0,), ())


def test_without_parking_nothing_is_erased_while_everything_fits() -> None:
    world = World(settings=c.Settings(preempt=False)).open("recompute")
    for _ in range(6):
        world.arrive(20, 10)
        world.run()

    assert len(grants(world)) == 6
    assert len(world.house.residue) == 4
    assert {grant.erase for grant in grants(world)} == {()}
