"""A lease can be left at every await: whatever is cancelled, every figure returns to zero."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing
from trio.testing import MockClock

import kvalet.testing
from kvalet import Parking, SchedulerConfig, SchedulerHandle, run_scheduler
from kvalet.actors.decisions.state import House, recount

WORKERS = 4
TARGET = 60
PROMPT = 16
MOVING_S = 0.006
STEP_S = 0.005


def small_pool(journal: Path, slots: int) -> SchedulerConfig:
    return SchedulerConfig(
        cells=128, slots=slots, block_min=4, first_block=8, quantum=8, journal=journal
    )


async def work(handle: SchedulerHandle) -> None:
    async with handle.lease(prompt=PROMPT, cap=TARGET) as lease:
        generated = 0
        while generated < TARGET:
            step = min(lease.room, TARGET) - generated
            await trio.sleep(step / 1000)
            generated += step
            if generated < TARGET and isinstance(await lease.extend(generated), Parking):
                await trio.sleep(MOVING_S)
                lease.freed(saved_bytes=lease.cells)
                await lease.wait_resumed()
                await trio.sleep(MOVING_S)
        lease.finish(generated)


def state_of(house: House, number: int) -> str:
    lease = next((x for name, x in house.leases.items() if name == f"r{number}"), None)
    return "gone" if lease is None else lease.state


def assert_empty(house: House) -> None:
    assert house.leases == {}
    assert house.holders == {}
    assert (house.queue, house.waiting, house.parked) == ((), (), ())
    assert (house.granted_total, house.residue_total, house.saved_bytes) == (0, 0, 0)
    assert recount(house) == house


async def run_and_cancel(journal: Path, number: int, after_s: float) -> str:
    """Four workers; the one called ``number`` is cancelled. Its state at that moment."""
    config = small_pool(journal, slots=3)
    scopes = [trio.CancelScope() for _ in range(WORKERS)]

    async def cancellable(handle: SchedulerHandle, scope: trio.CancelScope) -> None:
        with scope:
            await work(handle)

    async with trio.open_nursery() as nursery:
        handle: SchedulerHandle = await nursery.start(run_scheduler, config)
        with trio.fail_after(30):
            async with trio.open_nursery() as workers:
                for scope in scopes:
                    workers.start_soon(cancellable, handle, scope)
                    # One after the other, so that worker 1 is r1.
                    await trio.testing.wait_all_tasks_blocked()
                await trio.sleep(after_s)
                found = state_of(handle.house, number)
                scopes[number - 1].cancel()
        assert_empty(handle.house)
        nursery.cancel_scope.cancel()
    recording = kvalet.testing.assert_replays(journal)
    assert len(recording.events("lease.released")) == WORKERS
    assert recording.fold().totals.finished >= WORKERS - 1
    assert all(house.granted_total <= house.limit for _, house in recording.steps())
    return found


def test_whoever_is_cancelled_at_whatever_moment_leaves_nothing_behind(tmp_path: Path) -> None:
    seen: set[str] = set()
    for number in range(1, WORKERS + 1):
        moment, found = 0, ""
        while found != "gone":
            journal = tmp_path / f"{number}-{moment}.jsonl"
            clock = MockClock(autojump_threshold=0)
            found = trio.run(run_and_cancel, journal, number, moment * STEP_S, clock=clock)
            seen.add(found)
            moment += 1
        assert moment > 10
    assert seen >= {"queued", "running", "waiting", "parking", "parked", "gone"}


async def test_a_grant_that_was_not_heard_of_is_given_back(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    config = small_pool(tmp_path / "j.jsonl", slots=1)
    handle: SchedulerHandle = await nursery.start(run_scheduler, config)
    with trio.CancelScope() as scope:
        scope.cancel()
        async with handle.lease(prompt=16):
            raise AssertionError("never entered")
    assert handle.house.totals.grants == 1
    assert_empty(handle.house)


async def test_an_answer_to_extend_that_was_not_heard_of_is_given_back(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    config = small_pool(tmp_path / "j.jsonl", slots=1)
    handle: SchedulerHandle = await nursery.start(run_scheduler, config)
    with trio.CancelScope() as scope:
        async with handle.lease(prompt=16) as lease:
            before = handle.house.granted_total
            scope.cancel()
            try:
                await lease.extend(lease.room)
            finally:
                assert handle.house.granted_total > before
    assert_empty(handle.house)


async def test_a_resume_that_was_not_heard_of_is_given_back(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    config = small_pool(tmp_path / "j.jsonl", slots=2)
    handle: SchedulerHandle = await nursery.start(run_scheduler, config)
    async with trio.open_nursery() as workers:
        workers.start_soon(work, handle)
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            async with handle.lease(prompt=PROMPT) as lease:
                while not isinstance(await lease.extend(lease.room), Parking):
                    pass
                lease.freed(saved_bytes=1)
                await trio.sleep(1)
                assert handle.house.totals.resumes == 1
                scope.cancel()
                await lease.wait_resumed()
    assert_empty(handle.house)
