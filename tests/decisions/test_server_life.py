"""The server comes, dies and comes back; kvalet does too. Late reports change nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.replay import audit, replay
from kvalet.actors.decisions.status import status
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, RequestId, SlotId
from tests.decisions import promises
from tests.decisions.driver import World


def busy_world() -> World:
    """Four chats that outgrow the pool, one of them parked, and a queue of two."""
    world = World().open()
    for _ in range(6):
        world.arrive(20, 900)
    while not world.house.parked:
        world.tick()
    return world


def ready_of(generation: int, cells: int = 2048, slots: int = 4) -> c.ReadySeen:
    return c.ReadySeen(
        generation=generation,
        url="http://127.0.0.1:1",
        build="b1",
        model="m",
        cells=Cells(cells),
        slots=slots,
        headroom=Cells(4),
    )


def late_reports(world: World) -> list[c.Command]:
    reports: list[c.Command] = [
        c.SlotErased(slot=SlotId(0), cells=Cells(9)),
        c.ExitSeen(generation=1, code=0, planned=False),
        c.ProbeSeen(generation=1, method="save"),
        c.SpawnSeen(generation=0, pid=1, url="http://127.0.0.1:2"),
    ]
    for name in world.chats:
        reports += [
            c.CreditSpent(request=name, cells=Cells(50), generated=30),
            c.AnswerEnded(request=name, reason="stop", cells=Cells(50), generated=30),
            c.CellsFreed(request=name, method="save", cells=Cells(50), saved_bytes=7),
            c.CacheSeen(request=name, expected=Cells(50), reused=Cells(1)),
            c.SlotSeen(request=name, residue=Cells(50)),
            c.SilenceSeen(request=name, phase="decode", silent_s=1e6),
            c.NoticeHeard(request=name, notice="preempt-resumed"),
            c.Leave(request=name),
            c.PromptCounted(request=name, prompt=Cells(9)),
        ]
    return reports


def test_a_servers_end_closes_everything_before_anything_is_granted() -> None:
    world = busy_world()

    events = world.tell(c.ExitSeen(generation=1, code=-11, planned=False, reason="broke"))

    ended = [event for event in events if isinstance(event, e.LeaseEnded)]
    assert {event.request for event in ended} == set(world.chats)
    assert {event.reason for event in ended} == {"server-lost"}
    assert isinstance(events[0], e.ServerExited)
    assert not any(isinstance(event, e.LeaseGranted | e.LeaseResumed) for event in events)
    assert promises.is_empty(world.house)
    assert (world.house.server.state, world.house.residue) == ("failed", {})


def test_reports_that_come_after_the_servers_end_change_nothing() -> None:
    world = busy_world()
    world.crash()
    after = world.house

    for report in late_reports(world):
        promises.changes_nothing(report, world.tell(report))

    assert world.house is after


def test_reports_of_the_former_server_do_not_touch_the_next_one() -> None:
    world = busy_world()
    world.crash()
    world.launch()
    world.arrive(20, 100)
    after = world.house

    old = late_reports(busy_world())
    for report in [r for r in old if getattr(r, "request", "") != "r7"]:
        promises.changes_nothing(report, world.tell(report))
    promises.changes_nothing(ready_of(1), world.tell(ready_of(1)))

    assert world.house is after


def test_a_dead_server_refuses_newcomers_at_once() -> None:
    world = World().open()
    world.crash()

    chat = world.arrive(20, 100)

    assert chat.outcome == "server_unavailable"


def test_a_probe_of_a_dead_server_opens_nothing() -> None:
    world = World()
    world.tell(c.OpenHouse(settings=c.Settings()))
    world.tell(ready_of(1))
    world.tell(c.ExitSeen(generation=1, code=1, planned=False))

    assert world.tell(c.ProbeSeen(generation=1, method="save")) == []
    assert not world.house.ready


def test_chats_that_come_before_the_server_wait_for_it() -> None:
    world = World()
    world.tell(c.OpenHouse(settings=c.Settings()))
    early = world.arrive(20, 100)
    large = world.arrive(5000, 100)

    assert world.house.queue == ("r1", "r2")
    world.launch()
    world.run()

    assert early.outcome == "finished"
    assert large.outcome == "prompt_too_large"


def test_a_chat_too_large_for_the_next_pool_does_not_block_its_line() -> None:
    world = World(cells=512)
    world.tell(c.OpenHouse(settings=c.Settings()))
    world.arrive(600, 10)
    small = world.arrive(20, 10)
    world.launch()

    world.run()

    assert [chat.outcome for chat in world.chats.values()] == ["prompt_too_large", "finished"]
    assert small.generated == 10


def test_a_launch_over_a_living_server_closes_its_leases() -> None:
    world = busy_world()

    world.tell(c.LaunchPlanned(generation=2, argv=("llama-server",)))

    assert promises.is_empty(world.house)


def test_status_tells_the_models_own_context_and_the_most_that_fits() -> None:
    world = World().open()
    unknown = status(world.house, Nanos(0))["server"]

    world.tell(
        c.LaunchPlanned(
            generation=2, argv=("llama-server",), native_ctx=Cells(131072), max_ctx=Cells(47616)
        )
    )
    known = status(world.house, Nanos(0))["server"]

    assert (unknown["native_ctx"], unknown["max_ctx"]) == (None, None)
    assert (known["native_ctx"], known["max_ctx"]) == (131072, 47616)


def test_how_a_launch_came_up_is_told_once_it_is_up_and_forgotten_with_its_server() -> None:
    world = World().open()
    short = c.ExactSeen(generation=1, mode="server", state="unavailable", reason="raise the budget")
    world.tell(short)
    told = status(world.house, Nanos(0))

    assert told["exact_concurrency"] == "unavailable"
    assert {"code": "exact-unavailable", "message": "raise the budget"} in told["warnings"]
    world.crash()
    promises.changes_nothing(short, world.tell(short))
    world.launch()
    promises.changes_nothing(short, world.tell(short))
    assert status(world.house, Nanos(0))["exact_concurrency"] == "off"


def test_an_older_launch_or_a_dead_servers_readiness_changes_nothing() -> None:
    world = World().open()
    world.crash()
    world.launch()
    old = c.LaunchPlanned(generation=1, argv=("llama-server",))
    promises.changes_nothing(old, world.tell(old))
    world.crash()

    again = ready_of(2)
    promises.changes_nothing(again, world.tell(again))


def test_an_audit_shows_the_first_decision_that_would_be_another_today() -> None:
    decisions = list(busy_world().decisions)
    number = next(
        n
        for n, decision in enumerate(decisions)
        if any(isinstance(event, e.LeaseGranted) for event in decision.events)
    )
    decisions[number] = replace(decisions[number], events=decisions[number].events[:-1])

    report = audit(decisions)

    assert (report.identical, report.decisions) == (False, number + 1)
    assert report.first_difference is not None
    assert report.first_difference["seq"] == number + 1
    assert len(str(report.first_difference["decided"])) > len(
        str(report.first_difference["recorded"])
    )


def test_a_restart_closes_what_was_open_as_lost_and_repeats_no_effect() -> None:
    world = busy_world()

    events = world.tell(c.OpenHouse(settings=c.Settings(), torn_bytes=7))

    assert events[0] == e.JournalTorn(dropped_bytes=7)
    assert isinstance(events[-1], e.HouseOpened)
    between = {type(event).__name__ for event in events[1:-1]}
    assert between == {"LeaseEnded", "LeaseReleased"}
    reasons = {event.reason for event in events if isinstance(event, e.LeaseEnded)}
    assert reasons <= {"lost"}
    assert promises.is_empty(world.house)
    assert audit(world.decisions).identical


def test_an_answer_that_was_closing_keeps_its_own_reason_over_a_restart() -> None:
    world = World().open()
    chat = world.arrive(20, 100)
    world.tell(c.AnswerEnded(request=chat.request, reason="stop", cells=Cells(40), generated=20))

    events = world.tell(c.OpenHouse(settings=c.Settings()))

    released = [event for event in events if isinstance(event, e.LeaseReleased)]
    assert [event.reason for event in released] == ["stop"]
    assert world.laws.ends[chat.request] == 1


def test_a_journal_cut_anywhere_folds_to_a_house_that_can_be_reopened() -> None:
    world = busy_world().run()
    for length in range(0, len(world.decisions), 7):
        cut = replay(world.decisions[:length])
        events, house = take(cut, c.OpenHouse(settings=c.Settings()), Nanos(0))
        assert promises.is_empty(house)
        assert all(not isinstance(event, e.LeaseGranted | e.LeaseResumed) for event in events)


@pytest.mark.parametrize(
    ("phase", "silent_s", "stalled"),
    [
        ("first-token", 1199.0, False),
        ("first-token", 1200.0, True),
        ("decode", 119.0, False),
        ("decode", 120.0, True),
    ],
)
def test_silence_is_a_stall_only_past_its_deadline(
    phase: str, silent_s: float, stalled: bool
) -> None:
    world = World().open()
    chat = world.arrive(20, 100)

    events = world.tell(c.SilenceSeen(request=chat.request, phase=phase, silent_s=silent_s))

    assert bool(events) is stalled


def test_a_parked_chat_is_never_called_stalled() -> None:
    world = busy_world()
    parked = world.house.parked[0]

    assert world.tell(c.SilenceSeen(request=parked, phase="decode", silent_s=9e9)) == []


def test_a_reading_of_the_slots_is_an_event_only_when_it_moved() -> None:
    world = World().open()
    reading = c.PressureRead(slots=((SlotId(0), Cells(40), True), (SlotId(1), Cells(2), False)))

    assert world.tell(reading) == [e.PoolRead(resident=Cells(42), busy=1)]
    assert world.tell(reading) == []
    assert world.house.residue == {}


def test_a_notice_is_taken_down_for_a_live_request_only() -> None:
    world = World().open()
    chat = world.arrive(20, 100)

    heard = c.NoticeHeard(request=chat.request, notice="preempt-paused")
    assert world.tell(heard) == [e.NoticeTaken(request=chat.request, notice="preempt-paused")]
    assert world.tell(c.NoticeHeard(request=RequestId("r99"), notice="x")) == []


@pytest.mark.parametrize("order", ["leave first", "room first"])
def test_a_chat_that_leaves_in_the_tick_of_its_resume_is_gone_either_way(order: str) -> None:
    world = busy_world()
    parked = world.chats[world.house.parked[0]]
    runners = [chat for chat in world.chats.values() if chat.state in ("running", "waiting")]
    if order == "leave first":
        world.leave(parked)
    for chat in runners:
        world.leave(chat)
    if order == "room first":
        parked.leave_on = e.LeaseResumed
    world.run()

    assert parked.outcome == "left"
    assert promises.is_empty(world.house)
