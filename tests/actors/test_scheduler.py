"""The embedded scheduler: leases on a pool without a server, and every way to leave one."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

import kvalet.testing
from kvalet import (
    ClientFault,
    ConfigFault,
    Ended,
    EnvironmentFault,
    Extended,
    JournalFault,
    Lease,
    Parking,
    SchedulerConfig,
    SchedulerHandle,
    ServerFault,
    run_scheduler,
)
from kvalet.actors.decisions.state import House, recount

SOON_S = 60.0


def small_pool(journal: Path) -> SchedulerConfig:
    """Small blocks, so that a handful of tokens makes a story."""
    return SchedulerConfig(
        cells=128,
        slots=2,
        policy="least-sunk",
        block_min=4,
        first_block=8,
        quantum=8,
        journal=journal,
    )


@pytest.fixture
def config(tmp_path: Path) -> SchedulerConfig:
    return small_pool(tmp_path / "journal.jsonl")


@pytest.fixture
async def handle(config: SchedulerConfig, nursery: trio.Nursery) -> SchedulerHandle:
    started: SchedulerHandle = await nursery.start(run_scheduler, config)
    return started


def is_empty(house: House) -> bool:
    """Whether every figure is back at zero."""
    lines = (house.leases, house.holders, house.queue, house.waiting, house.parked, house.residue)
    sums = (house.granted_total, house.residue_total, house.saved_bytes)
    return not any(lines) and not any(sums) and recount(house) == house


async def work(
    handle: SchedulerHandle, prompt: int, target: int, log: list[str] | None = None
) -> None:
    """A worker that decodes a token a millisecond and does as it is told."""
    log = [] if log is None else log
    async with handle.lease(prompt=prompt, cap=target) as lease:
        generated = 0
        while generated < target:
            step = min(lease.room, target) - generated
            await trio.sleep(step / 1000)
            generated += step
            if generated < target and isinstance(await lease.extend(generated), Parking):
                await trio.sleep(0.002)
                lease.freed(saved_bytes=lease.cells)
                await lease.wait_resumed()
                await trio.sleep(0.002)
                log.append("resumed")
        lease.finish(generated)
    log.append("finished")


async def spend(lease: Lease) -> Extended | Parking | Ended:
    """Use all the credit at once and ask for more."""
    return await lease.extend(lease.room)


async def spend_until_parking(lease: Lease) -> Parking:
    while not isinstance(outcome := await spend(lease), Parking):
        assert isinstance(outcome, Extended)
    return outcome


async def test_a_lease_is_granted_at_once_and_given_back_at_the_blocks_end(
    handle: SchedulerHandle,
) -> None:
    async with handle.lease(prompt=20, cap=30) as lease:
        assert (lease.state, lease.request, lease.slot) == ("running", "r1", 0)
        assert lease.granted == 20 + lease.credit == handle.house.granted_total
        assert lease.room == lease.credit > 0
        lease.finish(5)
        assert handle.house.granted_total == lease.granted, "the cells may still be in use"
    assert is_empty(handle.house)
    assert handle.house.totals.finished == 1


async def test_a_block_left_without_a_word_counts_as_left(handle: SchedulerHandle) -> None:
    async with handle.lease(prompt=20):
        pass
    assert is_empty(handle.house)
    assert handle.house.totals.left == 1


async def test_a_failing_host_gives_everything_back(handle: SchedulerHandle) -> None:
    async def fail() -> None:
        async with handle.lease(prompt=20) as lease:
            await spend(lease)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert is_empty(handle.house)


async def test_credit_grows_until_the_leases_own_cap(handle: SchedulerHandle) -> None:
    async with handle.lease(prompt=20, cap=90) as lease:
        while isinstance(outcome := await spend(lease), Extended):
            assert outcome.credit == lease.credit > 0
            assert lease.cells + lease.credit <= 126
        assert outcome == Ended("length", 90)
        assert lease.state == "ended"
    assert handle.house.totals.finished == 1
    assert is_empty(handle.house)


async def test_a_lease_that_fills_the_pool_alone_ends_as_context_full(
    handle: SchedulerHandle,
) -> None:
    async with handle.lease(prompt=20) as lease:
        while isinstance(outcome := await spend(lease), Extended):
            pass
        assert outcome == Ended("context-full", 106)
        assert lease.credit == 0
    assert is_empty(handle.house)


async def test_what_can_never_fit_is_refused_with_both_figures(handle: SchedulerHandle) -> None:
    with pytest.raises(ClientFault, match=r"needs 201 cells, .* can lend 126") as caught:
        async with handle.lease(prompt=200):
            pass
    assert caught.value.code == "prompt_too_large"
    assert caught.value.fields == {"needed": 201, "limit": 126}
    assert is_empty(handle.house)


@pytest.mark.parametrize(("prompt", "cap"), [(-1, None), (1, 0)])
async def test_figures_that_mean_nothing_are_refused_before_anything_is_recorded(
    handle: SchedulerHandle, prompt: int, cap: int | None
) -> None:
    with pytest.raises(ClientFault):
        async with handle.lease(prompt=prompt, cap=cap):
            pass
    assert handle.house.totals.requests == 0


async def test_a_queue_that_is_full_says_so(tmp_path: Path, nursery: trio.Nursery) -> None:
    config = SchedulerConfig(cells=128, slots=1, queue_max=1, journal=tmp_path / "j.jsonl")
    handle: SchedulerHandle = await nursery.start(run_scheduler, config)
    async with handle.lease(prompt=1), trio.open_nursery() as waiting:
        waiting.start_soon(work, handle, 1, 5)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ClientFault) as caught:
            async with handle.lease(prompt=1):
                pass
        assert (caught.value.code, caught.value.status_hint) == ("queue_full", 429)
        assert caught.value.fields == {"needed": 2, "limit": 1}
        waiting.cancel_scope.cancel()
    assert is_empty(handle.house)


async def test_a_place_in_the_queue_becomes_a_lease_when_the_slot_is_left(
    handle: SchedulerHandle,
    autojump_clock: MockClock,
) -> None:
    log: list[str] = []
    async with trio.open_nursery() as workers:
        async with handle.lease(prompt=10, cap=9) as first, handle.lease(prompt=10, cap=9):
            workers.start_soon(work, handle, 10, 8, log)
            await trio.testing.wait_all_tasks_blocked()
            assert handle.house.queue == ("r3",)
            first.finish(0)
        assert handle.house.holders == {1: "r3"}, "the second was left first, so its slot is taken"
    assert log == ["finished"]


async def test_workers_that_outgrow_the_pool_are_parked_and_all_finish(
    handle: SchedulerHandle, autojump_clock: MockClock, config: SchedulerConfig
) -> None:
    log: list[str] = []
    with trio.fail_after(SOON_S):
        async with trio.open_nursery() as workers:
            for _ in range(4):
                workers.start_soon(work, handle, 16, 80, log)
    assert log.count("finished") == 4
    assert log.count("resumed") > 0
    assert is_empty(handle.house)
    recording = kvalet.testing.assert_replays(config.journal)
    assert all(house.granted_total <= house.limit for _, house in recording.steps())
    assert recording.fold() == handle.house


async def test_a_parked_lease_comes_back_with_what_it_saved(
    handle: SchedulerHandle, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as workers:
        workers.start_soon(work, handle, 16, 100)
        await trio.testing.wait_all_tasks_blocked()
        async with handle.lease(prompt=16) as lease:
            parking = await spend_until_parking(lease)
            assert (parking.cells, parking.save) == (lease.cells, True)
            assert (lease.state, lease.credit) == ("parking", 0)
            lease.freed(saved_bytes=4096)
            assert handle.house.saved_bytes == 4096
            resumed = await lease.wait_resumed()
            assert resumed.save
            assert resumed.credit == lease.credit > 0
            assert handle.house.leases[lease.request].slots == (resumed.slot,)
            assert handle.house.saved_bytes == 0
            assert handle.status()["totals"]["recomputes"] == 0


async def test_cells_that_were_dropped_count_as_recomputed(
    handle: SchedulerHandle, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as workers:
        workers.start_soon(work, handle, 16, 100)
        async with handle.lease(prompt=16) as lease:
            await spend_until_parking(lease)
            lease.freed()
            assert not (await lease.wait_resumed()).save
            assert handle.status()["totals"]["recomputes"] == 1
            assert handle.house.saved_bytes == 0


async def test_a_lease_that_cannot_be_parked_is_charged_whole_and_never_parked(
    handle: SchedulerHandle, autojump_clock: MockClock, config: SchedulerConfig
) -> None:
    log: list[str] = []
    async with (
        trio.open_nursery() as workers,
        handle.lease(prompt=16, cap=40, pausable=False) as lease,
    ):
        assert lease.credit == 40
        workers.start_soon(work, handle, 16, 100, log)
        await trio.sleep(0.5)
        assert log == []
        lease.finish(40)
    assert log[-1] == "finished"
    parked = kvalet.testing.load_journal(config.journal).events("lease.parked", lease.request)
    assert parked == []


async def test_an_overrun_is_refused_with_both_figures(handle: SchedulerHandle) -> None:
    async with handle.lease(prompt=20) as lease:
        with pytest.raises(ClientFault) as caught:
            await lease.extend(lease.room + 1)
        assert caught.value.fields == {"cells": lease.granted + 1, "granted": lease.granted}
        await spend(lease)
        with pytest.raises(ClientFault, match="says 0 tokens"):
            lease.finish(0)


async def test_calls_out_of_turn_are_refused(handle: SchedulerHandle) -> None:
    async with handle.lease(prompt=20) as lease:
        with pytest.raises(ClientFault, match="is running"):
            lease.freed()
        with pytest.raises(ClientFault, match="is running"):
            await lease.wait_resumed()
        lease.finish(1)
        with pytest.raises(ClientFault, match="is ended"):
            await lease.extend(1)


async def hold(handle: SchedulerHandle, until: trio.Event) -> None:
    async with handle.lease(prompt=16, cap=12):
        await until.wait()


async def test_a_cancelled_question_stands_until_it_is_heard(
    handle: SchedulerHandle, autojump_clock: MockClock
) -> None:
    enough = trio.Event()
    async with trio.open_nursery() as workers:
        workers.start_soon(hold, handle, enough)
        await trio.testing.wait_all_tasks_blocked()
        async with handle.lease(prompt=16) as lease:
            with trio.move_on_after(1) as patience:
                while isinstance(await spend(lease), Extended):
                    pass
            assert patience.cancelled_caught
            with pytest.raises(ClientFault, match="waits for cells"):
                await lease.extend(lease.generated - 1)
            enough.set()
            assert isinstance(await lease.extend(lease.generated), Extended)


async def test_a_second_scheduler_on_the_same_journal_is_locked_out(
    handle: SchedulerHandle, config: SchedulerConfig
) -> None:
    with pytest.raises(EnvironmentFault):
        await run_scheduler(config)


async def test_a_scheduler_that_is_cancelled_with_its_workers_records_that_they_left(
    config: SchedulerConfig, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        handle: SchedulerHandle = await nursery.start(run_scheduler, config)
        for _ in range(4):
            nursery.start_soon(work, handle, 16, 80)
        await trio.sleep(0.05)
        assert not is_empty(handle.house)
        nursery.cancel_scope.cancel()
    recording = kvalet.testing.assert_replays(config.journal)
    assert is_empty(recording.fold())
    assert recording.fold().totals.left == 4


async def test_what_is_held_when_the_scheduler_ends_is_closed_and_hears_of_it(
    config: SchedulerConfig, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    ended = trio.Event()

    async def run(
        *, task_status: trio.TaskStatus[tuple[SchedulerHandle, trio.CancelScope]]
    ) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as own:
                handle: SchedulerHandle = await own.start(run_scheduler, config)
                task_status.started((handle, scope))
        ended.set()

    handle, scope = await nursery.start(run)
    async with handle.lease(prompt=16) as lease:
        scope.cancel()
        await ended.wait()
        assert is_empty(handle.house)
        with pytest.raises(ServerFault, match="has ended"):
            await spend(lease)
    with pytest.raises(ServerFault, match="has ended"):
        async with handle.lease(prompt=16):
            pass
    assert is_empty(kvalet.testing.assert_replays(config.journal).fold())


async def test_a_disk_that_refuses_ends_every_wait(
    config: SchedulerConfig, autojump_clock: MockClock
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with trio.open_nursery() as nursery:
        handle: SchedulerHandle = await nursery.start(run_scheduler, config)
        async with handle.lease(prompt=16) as lease:
            resource.setrlimit(resource.RLIMIT_FSIZE, (config.journal.stat().st_size, hard))
            try:
                with pytest.raises(JournalFault):
                    await spend(lease)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with pytest.raises(JournalFault):
            async with handle.lease(prompt=16):
                pass
        nursery.cancel_scope.cancel()
    kvalet.testing.assert_replays(config.journal)


async def test_a_journal_is_taken_over_after_a_crash(
    handle: SchedulerHandle, config: SchedulerConfig, tmp_path: Path
) -> None:
    left_behind = tmp_path / "crashed.jsonl"
    async with handle.lease(prompt=16), trio.open_nursery() as nursery:
        shutil.copy(config.journal, left_behind)
        taken_over = SchedulerConfig(cells=64, slots=1, journal=left_behind)
        later: SchedulerHandle = await nursery.start(run_scheduler, taken_over)
        assert is_empty(later.house)
        assert later.house.totals.failed == 1, "what was open is lost"
        async with later.lease(prompt=16) as lease:
            assert (lease.request, lease.lease) == ("r2", 2)
        nursery.cancel_scope.cancel()


def test_a_wrong_configuration_names_all_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigFault) as caught:
        SchedulerConfig(cells=8, slots=0, headroom=8, policy="none", journal=tmp_path / "j")
    named = [problem.split()[0] for problem in caught.value.problems]
    assert named == ["slots", "headroom", "policy"]
