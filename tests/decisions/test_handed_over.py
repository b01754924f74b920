"""Server mode in the ledger: the server parks, and the ledger only admits and keeps count."""

from __future__ import annotations

from kvalet.actors.decisions.status import status
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, SlotId
from tests.decisions import promises
from tests.decisions.driver import TICK_NS, Chat, World


def handed_over(cells: int = 8192, slots: int = 4) -> World:
    return World(cells=cells, slots=slots, headroom=0).open("server")


def notice(world: World, chat: Chat, word: str, *, away: bool) -> list[e.AnyEvent]:
    return world.tell(c.NoticeHeard(request=chat.request, notice=word, away=away))


def grants(world: World) -> list[e.LeaseGranted]:
    return [event for event in world.log if isinstance(event, e.LeaseGranted)]


def test_every_chat_may_use_the_whole_window_and_nobody_is_ever_a_victim() -> None:
    world = handed_over()
    chats = [world.arrive(1000, 1000) for _ in range(4)]

    assert [grant.credit for grant in grants(world)] == [8192 - 1000] * 4
    world.run()

    assert [chat.outcome for chat in chats] == ["finished"] * 4
    assert [chat.legs for chat in chats] == [1] * 4, "no leg ends before the answer does"
    assert not any(isinstance(x, e.PoolPressed | e.LeaseParking) for x in world.log)
    assert promises.is_empty(world.house)


def test_a_cap_is_the_credit_and_the_end_of_the_window_ends_the_answer() -> None:
    world = handed_over(cells=512)
    capped = world.arrive(100, 9000, cap=50)
    endless = world.arrive(100, 9000)
    world.run()

    assert [grant.credit for grant in grants(world)] == [50, 412]
    assert (capped.generated, endless.generated) == (50, 412)
    ends = {x.request: x.reason for x in world.log if isinstance(x, e.LeaseEnded)}
    assert ends[endless.request] == "context-full"


def test_prompts_do_not_crowd_each_other_out_and_the_line_stays_in_order() -> None:
    world = handed_over(cells=1024)
    first = world.arrive(700, 5)
    second = world.arrive(600, 5)
    third = world.arrive(10, 5)

    assert world.house.queue == (second.request, third.request)
    world.run()

    assert [chat.outcome for chat in (first, second, third)] == ["finished"] * 3
    assert [grant.request for grant in grants(world)] == [x.request for x in (first, second, third)]


def test_a_fifth_chat_waits_for_a_slot_though_the_parked_hold_no_cells() -> None:
    world = handed_over()
    four = [world.arrive(100, 50) for _ in range(4)]
    notice(world, four[0], "preempted", away=True)
    fifth = world.arrive(100, 50)

    assert world.house.queue == (fifth.request,)


def test_adm_13_a_chat_that_the_server_parked_is_not_resident_and_shown_as_parked() -> None:
    world = handed_over()
    away, here = world.arrive(300, 50), world.arrive(200, 50)
    notice(world, away, "preempted", away=True)
    world.now += 3
    told = status(world.house, Nanos(world.now * TICK_NS))

    assert (told["mode"], told["park_method"]) == ("server", "server")
    assert (told["pool"]["resident"], told["pool"]["parked"]) == (200, 300)
    leases = {one["request"]: one for one in told["leases"]}
    assert (leases[away.request]["state"], leases[here.request]["state"]) == ("parked", "running")
    assert leases[away.request]["parked_s"] == 3 * TICK_NS / 1e9


def test_parks_resumes_and_recomputes_of_the_server_are_counted() -> None:
    world = handed_over()
    chat = world.arrive(100, 50)
    for word, away in (
        ("preempted", True),
        ("preempted-twice", True),
        ("resumed", False),
        ("recomputed", False),
        ("recomputed", False),
        ("preempted", True),
        ("data-while-parked", False),
    ):
        notice(world, chat, word, away=away)

    lease = world.house.leases[chat.request]
    totals = world.house.totals
    assert (lease.parks, lease.resumes, lease.recomputes) == (2, 2, 1)
    assert (totals.parks, totals.resumes, totals.recomputes) == (2, 2, 1)


def test_a_chat_that_ends_or_loses_its_server_while_it_is_away_leaves_nothing() -> None:
    world = handed_over()
    left, lost = world.arrive(100, 50), world.arrive(100, 50)
    for chat in (left, lost):
        notice(world, chat, "preempted", away=True)
    world.leave(left)
    world.tick()
    world.crash()

    assert promises.is_empty(world.house)
    assert world.house.totals.ended_parked == 2


def test_several_answers_to_one_request_are_priced_whole_as_the_server_parks_none() -> None:
    world = handed_over(cells=1024)
    family = world.arrive(100, 50, cap=100, seats=2)

    granted = grants(world)[0]
    assert (granted.granted, granted.credit) == (400, 200)
    world.run()
    assert family.outcome == "finished"


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    world = handed_over(cells=512)
    world.arrive(512, 5)

    refused = [x for x in world.log if isinstance(x, e.LeaseRefused)]
    assert [(x.code, x.needed, x.limit) for x in refused] == [
        ("prompt_too_large", Cells(513), Cells(512))
    ]


def silent_build() -> World:
    """A server that parks and says nothing of it in its streams."""
    world = World(cells=8192, headroom=0)
    world.tell(c.OpenHouse(settings=world.settings))
    world.tell(
        c.ReadySeen(
            generation=0,
            url="http://127.0.0.1:1",
            build="b1",
            model="m",
            cells=Cells(8192),
            slots=4,
            headroom=Cells(0),
            parks=True,
        )
    )
    world.tell(c.ProbeSeen(generation=0, method="server"))
    return world


def reading(*parked: SlotId) -> c.PressureRead:
    slots = tuple((SlotId(slot), Cells(10 * slot), True) for slot in range(4))
    return c.PressureRead(slots=slots, parked=parked)


def silence(world: World, chat: Chat, silent_s: float, phase: str = "decode") -> bool:
    """Whether so long a silence ends the stream."""
    command = c.SilenceSeen(request=chat.request, phase=phase, silent_s=silent_s)
    return any(isinstance(x, e.StreamStalled) for x in world.tell(command))


def test_on_a_silent_build_the_slots_tell_who_is_parked_and_who_is_back() -> None:
    world = silent_build()
    first, second = world.arrive(100, 50), world.arrive(100, 50)

    world.tell(reading(SlotId(1)))
    assert [world.house.leases[x.request].away for x in (first, second)] == [False, True]
    assert world.tell(reading(SlotId(1))) == [], "nothing has changed"
    world.tell(reading())
    assert [x.away for x in world.log if isinstance(x, e.ParkSeen)] == [True, False]
    assert world.house.totals.parks == world.house.totals.resumes == 1


def test_not_10_a_silent_park_is_excused_for_half_an_hour_after_its_own_deadline() -> None:
    world = silent_build()
    chat = world.arrive(100, 50)
    world.tell(reading(SlotId(0)))

    for phase, deadline in (("decode", 120.0), ("first-token", 1200.0)):
        assert not silence(world, chat, deadline, phase)
        assert not silence(world, chat, deadline + 1799.9, phase)
        assert silence(world, chat, deadline + 1800.0, phase)


def test_not_02_neither_a_neighbours_park_nor_one_that_has_ended_excuses_silence() -> None:
    world = silent_build()
    parked, neighbour = world.arrive(100, 50), world.arrive(100, 50)
    world.tell(reading(SlotId(0)))

    assert silence(world, neighbour, 120.0)
    assert not silence(world, parked, 120.0)
    world.tell(reading())
    assert silence(world, parked, 122.0)


def test_not_07_on_a_build_that_gives_notices_readings_excuse_nobody() -> None:
    world = handed_over()
    chat = world.arrive(100, 50)
    notice(world, chat, "preempted", away=True)

    assert world.tell(reading(SlotId(0))) != []
    assert not any(isinstance(x, e.ParkSeen) for x in world.log)
    assert silence(world, chat, 120.0), "its keep-alives would have renewed the deadline"


def test_pre_01_a_server_that_does_not_park_excuses_nothing() -> None:
    world = World().open()
    chat = world.arrive(100, 50)
    world.tell(reading(SlotId(0)))

    assert not world.house.leases[chat.request].away
    assert silence(world, chat, 120.0)
