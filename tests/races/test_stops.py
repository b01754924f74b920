"""Races 9 and 10: a client who stops while its chat waits, as it is given room or at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.preemption import POLICIES
from kvalet.actors.decisions.state import House
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import RequestId
from kvalet.protocol.journal import Decision
from tests.actors.stage import Stage, chat, stage
from tests.decisions.driver import World

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

GIVEN: Final = (e.LeaseGranted, e.LeaseExtended, e.LeaseResumed)
POLICY_NAMES: Final = sorted(POLICIES)


def day(policy: str) -> World:
    """Sixty chats in a pool that holds four of them."""
    settings = c.Settings(policy=policy, block_min=16, first_block=32, quantum=32)
    world = World(cells=700, slots=6, headroom=6, settings=settings).open()
    for number in range(60):
        world.arrive(40 + 7 * (number % 12), 90, None if number % 3 else 120)
        for _ in range(5):
            world.tick()
    return world.run()


def moments(world: World) -> Iterator[tuple[House, Decision]]:
    """Every decision with the house that it was made in."""
    house = House()
    for decision in world.decisions:
        yield house, decision
        house = fold(house, decision.events, decision.at_ns)


def given_to(request: RequestId, events: list[e.AnyEvent]) -> list[e.AnyEvent]:
    return [x for x in events if isinstance(x, GIVEN) and x.request == request]


def ends_of(request: RequestId, events: list[e.AnyEvent]) -> list[str]:
    return [x.reason for x in events if isinstance(x, e.LeaseEnded) and x.request == request]


def check_stop_first(house: House, decision: Decision, request: RequestId) -> None:
    """The stop is heard before the room: nothing is given to who has stopped."""
    stop = c.Leave(request=request)
    events, house = take(house, stop, decision.at_ns)
    assert ends_of(request, events) == ["left"]
    events, house = take(house, decision.command, decision.at_ns)
    assert given_to(request, events) == []
    assert request not in (*house.queue, *house.parked, *house.waiting)


def check_room_first(house: House, decision: Decision, request: RequestId) -> None:
    """The stop is heard behind the room: the same end, and the lease goes once its slot is idle."""
    _, house = take(house, decision.command, decision.at_ns)
    events, house = take(house, c.Leave(request=request), decision.at_ns)
    assert ends_of(request, events) == ["left"]
    assert given_to(request, events) == []
    events, house = take(house, c.SlotSeen(request=request), decision.at_ns)
    assert [x.reason for x in events if isinstance(x, e.LeaseReleased)][:1] == ["left"]
    assert request not in house.leases


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_race_09_a_stop_and_the_room_for_its_chat_in_one_moment_in_both_orders(policy: str) -> None:
    tried: dict[str, int] = {}
    for house, decision in moments(day(policy)):
        for event in decision.events:
            if not isinstance(event, GIVEN) or event.request not in house.leases:
                continue
            state = house.leases[event.request].state
            tried[state] = tried.get(state, 0) + 1
            check_stop_first(house, decision, event.request)
            check_room_first(house, decision, event.request)
    assert all(tried.get(state, 0) >= 3 for state in ("queued", "waiting", "parked")), tried


class Blade(trio.abc.Instrument):
    """Cuts, once, so many steps of all tasks after ``begins`` has come true."""

    def __init__(self, begins: Callable[[], bool], steps: int, cut: Callable[[], None]) -> None:
        self._begins = begins
        self._begun = False
        self._left = steps
        self._cut = cut

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._begun = self._begun or self._begins()
        if self._begun:
            self._left -= 1
            if self._left == 0:
                self._cut()


async def stop_while_parked(it: Stage, steps: int) -> tuple[int, int]:
    """A chat alone is parked, and resumed at once; its client stops so many steps after the order
    to park. The legs that had begun by then, and those that had in the end."""
    guest = it.invite(chat(), headers={"kvalet-park-every": "40"})
    begun: list[int] = []

    def parking() -> bool:
        return any(lease.state == "parking" for lease in it.house.leases.values())

    def stop() -> None:
        begun.append(it.server.begun)
        guest.scope.cancel()

    blade = Blade(parking, steps, stop)
    trio.lowlevel.add_instrument(blade)
    try:
        await it.all_gone()
    finally:
        trio.lowlevel.remove_instrument(blade)
    assert guest.scope.cancelled_caught
    await trio.sleep(5)
    it.check_empty()
    return begun[0], it.server.begun


@pytest.mark.parametrize("method", ["save", "recompute"])
async def test_race_09_no_leg_is_sent_for_who_stops_at_any_step_of_a_park_and_its_resume(
    tmp_path: Path, autojump_clock: MockClock, method: str
) -> None:
    steps = before = 0
    while before < 2:
        steps += 1
        async with stage(tmp_path / str(steps), debug=True, method=method) as it:
            before, after = await stop_while_parked(it, steps)
            assert before == after, f"a leg was sent for a client who had stopped at step {steps}"
    assert steps > 10


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_race_10_no_policy_holds_up_a_stop_in_any_of_the_waits(policy: str) -> None:
    tried = dict.fromkeys(("queued", "waiting", "parking", "parked"), 0)
    for house, decision in moments(day(policy)):
        for request, lease in house.leases.items():
            if lease.state in tried and not lease.end_reason:
                tried[lease.state] += 1
                events, after = take(house, c.Leave(request=request), decision.at_ns)
                assert ends_of(request, events) == ["left"]
                assert given_to(request, events) == []
                assert request not in (*after.queue, *after.waiting, *after.parked)
    assert all(times >= 3 for times in tried.values()), tried
