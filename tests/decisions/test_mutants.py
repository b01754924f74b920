"""The checkers earn their keep: bugs that were planted on purpose do not get past them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvalet.actors.decisions.evolve import RULES
from kvalet.actors.decisions.state import House, recount
from kvalet.actors.decisions.step import Step
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, RequestId, SlotId
from tests.decisions.driver import World

EVOLVE = "kvalet.actors.decisions.evolve_lease"
Plant = Callable[[pytest.MonkeyPatch], None]
Evolver = Callable[[House, Any, Nanos], House]


def original(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def plant(
    patch: pytest.MonkeyPatch, kind: type[e.AnyEvent], change: Callable[[Evolver], Evolver]
) -> None:
    patch.setitem(RULES, kind, change(RULES[kind]))


def victims_cells_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    def change(honest: Evolver) -> Evolver:
        def parking(house: House, event: Any, at_ns: Nanos) -> House:
            house = honest(house, event, at_ns)
            lease = house.leases[event.request]
            early = replace(lease, granted=Cells(0), cells=Cells(0))
            return recount(replace(house, leases={**house.leases, event.request: early}))

        return parking

    plant(patch, e.LeaseParking, change)


def a_lease_is_returned_twice(patch: pytest.MonkeyPatch) -> None:
    def change(honest: Evolver) -> Evolver:
        def released(house: House, event: Any, at_ns: Nanos) -> House:
            granted = house.leases[event.request].granted
            house = honest(house, event, at_ns)
            return replace(house, granted_total=Cells(house.granted_total - granted))

        return released

    plant(patch, e.LeaseReleased, change)


def parked_cells_count_as_resident(patch: pytest.MonkeyPatch) -> None:
    def change(honest: Evolver) -> Evolver:
        def parked(house: House, event: Any, at_ns: Nanos) -> House:
            granted = house.leases[event.request].granted
            house = honest(house, event, at_ns)
            return replace(house, granted_total=Cells(house.granted_total + granted))

        return parked

    plant(patch, e.LeaseParked, change)


def a_resume_passes_the_head(patch: pytest.MonkeyPatch) -> None:
    honest = original("kvalet.actors.decisions.ledger", "_resume_head")

    def resume(step: Step) -> bool:
        line = step.house.parked
        step.house = replace(step.house, parked=line[::-1])
        done: bool = honest(step)
        left = tuple(name for name in line if name in step.house.parked)
        step.house = replace(step.house, parked=left)
        return done

    patch.setattr("kvalet.actors.decisions.ledger._resume_head", resume)


def a_slot_is_given_away_before_it_is_seen_idle(patch: pytest.MonkeyPatch) -> None:
    honest = original("kvalet.actors.decisions.requests", "end")

    def end(step: Step, lease: Any, reason: str, **more: Any) -> None:
        honest(step, lease, reason, **more)
        if lease.request in step.house.leases:
            step.emit(e.LeaseReleased(request=lease.request, reason=reason))

    patch.setattr("kvalet.actors.decisions.requests.end", end)


def the_slot_of_an_erase_is_taken(patch: pytest.MonkeyPatch) -> None:
    def erase(house: House, *_: object) -> dict[SlotId, RequestId]:
        return house.erasing

    patch.setattr(f"{EVOLVE}._erase", erase)


PLANTS: list[Plant] = [
    victims_cells_are_free_at_once,
    a_lease_is_returned_twice,
    parked_cells_count_as_resident,
    a_resume_passes_the_head,
    a_slot_is_given_away_before_it_is_seen_idle,
    the_slot_of_an_erase_is_taken,
]


def a_busy_day() -> None:
    """Chats that come, outgrow the pool, are parked, leave, and reuse each other's slots."""
    for seed in range(6):
        world = World(cells=900, slots=5, headroom=5, seed=seed).open()
        for number in range(14):
            world.arrive(40 + 17 * number, 250, None if number % 3 else 300)
            for _ in range(15 * (number % 4)):
                world.tick()
            if number % 5 == 4:
                world.leave(world.chats[next(iter(world.house.leases))])
        world.run(20_000)


def test_an_honest_core_has_a_busy_day_without_complaint() -> None:
    a_busy_day()


@pytest.mark.parametrize("planted", PLANTS, ids=lambda planted: planted.__name__)
def test_a_planted_bug_is_found(planted: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)

    with pytest.raises((AssertionError, KeyError)):
        a_busy_day()
