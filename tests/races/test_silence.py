"""Races 1 to 3: whose park excuses whose silence, and for how long to the second."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from kvalet.protocol.ids import RequestId
from tests.actors.stage import Guest
from tests.decisions.driver import Chat, World
from tests.decisions.test_handed_over import handed_over, notice, reading, silence, silent_build
from tests.races.house import (
    HOURS_S,
    PlayingServer,
    Script,
    ended,
    house,
    kept_alive,
    over,
    said,
    stalls,
    told,
    visit,
)

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

STALL_S: Final = 120
GRACE_S: Final = 1800
SLACK_S: Final = 0.002
"""What a deadline may be late by: the grain of kvalet's looks at the clock."""

A_NEIGHBOURS_PARK: Final = Script((*kept_alive(1500), (0.0, said("b")), (0.0, ended(1))))
A_SILENT_PARK: Final = Script(((0.0, said("b")), (1500, said("b")), (0.0, ended(2))))
WORLDS: Final = {
    "in silence": (False, A_SILENT_PARK, ((0.0, said("a")),)),
    "with notices, none heard": (True, A_NEIGHBOURS_PARK, ((0.0, said("a")),)),
    "with notices, some heard": (
        True,
        A_NEIGHBOURS_PARK,
        ((0.0, said("a")), *kept_alive(40), (1.0, said("a"))),
    ),
}


@pytest.mark.parametrize("world", WORLDS)
async def test_race_01_a_neighbours_park_excuses_nobody_on_any_build(
    tmp_path: Path, autojump_clock: MockClock, world: str
) -> None:
    notices, neighbours, mine = WORLDS[world]
    server = PlayingServer([Script((*mine, (HOURS_S, b""))), neighbours], parked={1})
    async with house(tmp_path, server, notices=notices) as it:
        silent = await visit(it, server)
        neighbour = await visit(it, server)
        last = trio.current_time() + sum(wait_s for wait_s, _ in mine)
        await over(silent)
        ((at, stall),) = stalls(it)
        assert STALL_S <= stall.silent_s <= STALL_S + SLACK_S
        assert at - last == pytest.approx(STALL_S, abs=0.01)
        assert [error["code"] for error in silent.errors] == ["stalled"]
        await over(neighbour)

        assert neighbour.errors == []
        assert told(neighbour) == [b": preempt-paused", b": preempt-resumed"]
        assert not any("/metrics" in route for route in server.routes)


NEIGHBOUR: Final = RequestId("r2")


def first_stall(world: World, chat: Chat, park_at: int, until: int) -> int:
    """The second at which ``chat`` is told to stall, its neighbour's slot parked from ``park_at``
    on."""
    for second in range(until):
        if second == park_at:
            world.tell(reading(*world.house.leases[NEIGHBOUR].slots))
        if silence(world, chat, float(second)):
            return second
    raise AssertionError("it never stalls")


def test_race_01_at_whatever_second_the_neighbour_is_parked() -> None:
    for park_at in range(STALL_S + 2):
        for build in ("silent", "telling", "told"):
            world = silent_build() if build == "silent" else handed_over()
            chat, _ = world.arrive(100, 50), world.arrive(100, 50)
            if build == "told":
                notice(world, chat, "preempted", away=True)
                notice(world, chat, "resumed", away=False)
            assert first_stall(world, chat, park_at, 2000) == STALL_S, (park_at, build)


FIRST_S: Final = 200.0
LATE_PARK: Final = (*kept_alive(600), *((0.5, said("x")) for _ in range(4)), (0.0, ended(4)))


@pytest.mark.parametrize("early_s", [FIRST_S, 100.0, 2.0, 1.0, 0.5, 0.01])
async def test_race_02_a_park_before_the_first_token_holds_the_deadline_off(
    tmp_path: Path, autojump_clock: MockClock, early_s: float
) -> None:
    server = PlayingServer([Script(LATE_PARK, headers_s=FIRST_S - early_s)])
    async with house(tmp_path, server, notices=True, first_token_s=FIRST_S) as it:
        guest = await visit(it, server)
        await over(guest)

        assert (guest.errors, guest.content, guest.ended_well) == ([], "xxxx", True)
        assert told(guest) == [b": preempt-paused", b": preempt-resumed"]
        assert guest.comments.count(b": preempt-keepalive") >= 600 / 2
        assert (it.house.totals.parks, it.house.totals.resumes) == (1, 1)
        assert stalls(it) == []


async def test_race_02_a_park_that_comes_behind_the_deadline_is_too_late(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    server = PlayingServer([Script(LATE_PARK, headers_s=FIRST_S + 0.5)])
    async with house(tmp_path, server, notices=True, first_token_s=FIRST_S) as it:
        guest = await visit(it, server)
        await over(guest)

        ((_, stall),) = stalls(it)
        assert stall.phase == "first-token"
        assert FIRST_S <= stall.silent_s <= FIRST_S + SLACK_S
        assert guest.status == 504


@pytest.mark.parametrize(("phase", "deadline"), [("decode", STALL_S), ("first-token", 1200)])
def test_race_03_at_whatever_second_of_the_grace_the_park_ends(phase: str, deadline: int) -> None:
    world = silent_build()
    chat = world.arrive(100, 50)
    slot = world.house.leases[chat.request].slots[0]
    parked, back = reading(slot), reading()
    for second in range(deadline + GRACE_S):
        world.tell(parked)
        assert not silence(world, chat, float(second), phase)
        world.tell(back)
        assert silence(world, chat, float(second), phase) == (second >= deadline)
    world.tell(parked)
    assert silence(world, chat, float(deadline + GRACE_S), phase)


async def silent_park(
    folder: Path, script: Script, *, parked_s: float = HOURS_S
) -> tuple[Guest, list[float]]:
    """One stream on a build that parks in silence, its slot read as parked for ``parked_s``.
    Returns it at its end, with how long it was silent at each stall."""
    server = PlayingServer([script], parked={0})
    async with house(folder, server, notices=False, first_token_s=FIRST_S) as it:
        guest = await visit(it, server)
        with trio.move_on_after(parked_s):
            await over(guest)
        server.parked.clear()
        await over(guest)
        return guest, [stall.silent_s for _, stall in stalls(it)]


@pytest.mark.parametrize(("said_before", "deadline"), [((), FIRST_S), (((0.0, said("a")),), 120)])
async def test_race_03_a_silent_park_ends_half_an_hour_after_its_deadline_to_the_second(
    tmp_path: Path,
    autojump_clock: MockClock,
    said_before: tuple[tuple[float, bytes], ...],
    deadline: float,
) -> None:
    guest, (silent_s,) = await silent_park(tmp_path, Script((*said_before, (HOURS_S, b""))))

    assert deadline + GRACE_S <= silent_s <= deadline + GRACE_S + SLACK_S
    assert told(guest) == [b": preempt-paused"]
    assert [error["code"] for error in guest.errors] == ["stalled"]


@pytest.mark.parametrize("silent_s", [121, 1000, STALL_S + GRACE_S - 1])
async def test_race_03_an_answer_that_goes_on_inside_the_grace_just_goes_on(
    tmp_path: Path, autojump_clock: MockClock, silent_s: float
) -> None:
    script = Script(((0.0, said("a")), (silent_s, said("b")), (0.0, ended(2))))
    guest, stalled = await silent_park(tmp_path, script)

    assert stalled == []
    assert (guest.errors, guest.content, guest.ended_well) == ([], "ab", True)
    assert told(guest) == [b": preempt-paused", b": preempt-resumed"]


@pytest.mark.parametrize("late_s", [0.1, 4.0, 7.0, 119.0])
async def test_a_chat_that_is_back_has_a_deadline_of_its_own_to_say_so(
    tmp_path: Path, autojump_clock: MockClock, late_s: float
) -> None:
    script = Script(((0.0, said("a")), (600 + late_s, said("b")), (0.0, ended(2))))
    guest, stalled = await silent_park(tmp_path, script, parked_s=600)

    assert stalled == []
    assert (guest.errors, guest.content, guest.ended_well) == ([], "ab", True)
