"""Whom a full pool parks, who comes back first, and who must make room after a while."""

from __future__ import annotations

from typing import Any

import pytest

from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver.slot import Noticed, Parking, Phase, Said
from tests.sims.fakeserver.driver import Run, open_run


def test_the_longest_slot_is_never_the_victim() -> None:
    run = open_run(1024, 3, parking=Parking())
    run.ask(1, 500, 300)
    for number in (2, 3):
        run.ask(number, 150, 300)
    run.finish()
    assert run.parks(1) == 0
    assert run.parks(2) + run.parks(3) >= 1


def test_a_parked_head_that_does_not_fit_is_not_passed_by_a_smaller_one() -> None:
    run = open_run(1024, 3, parking=Parking())
    run.ask(1, 500, 420)
    run.ask(2, 300, 300)
    run.until(lambda: run.pool.slots[1].phase is Phase.DECODE)
    run.ask(3, 60, 400)
    run.finish()
    resumed = [
        out.job
        for _, out in run.outputs
        if isinstance(out, Noticed) and out.notice is Notice.RESUMED
    ]
    parked = [
        out.job
        for _, out in run.outputs
        if isinstance(out, Noticed) and out.notice is Notice.PREEMPTED
    ]
    assert len(parked) >= 2
    assert parked == resumed


def test_a_starved_slot_is_a_victim_only_when_nobody_else_is() -> None:
    run = open_run(4096, 3, parking=Parking())
    for number, prompt in ((1, 600), (2, 100), (3, 300)):
        run.ask(number, prompt, 4000)
    run.until(lambda: all(slot.phase is Phase.DECODE for slot in run.pool.slots))
    run.slot_of(2).parks = 3
    run.until(lambda: run.parks(2) + run.parks(3) > 0)
    assert (run.parks(2), run.parks(3)) == (0, 1)


@pytest.mark.parametrize(
    ("policy", "victim"), [("smallest", 2), ("largest", 3), ("oldest", 2), ("youngest", 4)]
)
def test_the_policy_picks_the_victim(policy: Any, victim: int) -> None:
    run = open_run(1536, 4, parking=Parking(policy=policy))
    for number, prompt in ((1, 500), (2, 100), (3, 400), (4, 200)):
        run.ask(number, prompt, 400)
    run.until(lambda: any(run.parks(number) for number in (1, 2, 3, 4)))
    assert [number for number in (1, 2, 3, 4) if run.parks(number)] == [victim]


def test_residents_whose_context_shifts_rotate_out_for_those_who_wait() -> None:
    run = open_run(384, 3, parking=Parking(), context_shift=True, tokens_per_s=100)
    for number in (1, 2, 3):
        run.ask(number, 50, 3000)
    run.finish()
    assert run.logged("rotated out after")
    assert run.logged("slot context shift")
    assert [run.ended(number).predicted for number in (1, 2, 3)] == [3000] * 3


def unending(parking: Parking) -> Run:
    run = open_run(2048, parking=parking, context_shift=True, tokens_per_s=100)
    run.ask(1, 100, 20_000)
    run.until(lambda: run.pool.slots[-1].shifts + run.pool.slots[0].shifts >= 1)
    run.ask(2, 1800, 5)
    run.until(lambda: any(isinstance(o, Said) and o.predicted == 5 for o in run.of(2)))
    return run


def test_a_rotation_that_the_budget_does_not_hold_drops_the_cells() -> None:
    run = unending(Parking(budget_mib=1))
    assert run.logged("rotated out: ")
    assert run.logged("cells dropped")
    assert run.slot_of(1).predicted < 20_000


def test_older_builds_refuse_a_rotation_that_the_budget_does_not_hold() -> None:
    run = open_run(2048, parking=Parking(budget_mib=10, recompute=False), context_shift=True)
    run.ask(1, 100, 3000)
    run.until(lambda: any(slot.shifts for slot in run.pool.slots))
    run.ask(2, 1800, 5)
    run.finish()
    assert run.logged("no rotation: --preempt-ram 10 MiB") == [
        "no rotation: --preempt-ram 10 MiB does not hold both"
    ]
    assert run.ended(2).predicted == 5
