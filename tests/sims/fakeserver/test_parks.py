"""A pool that parks: who goes, how, and who comes back."""

from __future__ import annotations

from typing import Any

import pytest

from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver.slot import FULL, Parking, Phase, Where
from tests.sims.fakeserver.driver import Run, open_run, solo

SWAP = (Notice.PREEMPTED, Notice.RESUMED)
AGAIN = (*SWAP, Notice.RECOMPUTED)


def full_house(parking: Parking | None, **more: Any) -> Run:
    """Two chats of 2000 tokens together in 2048 cells."""
    run = open_run(2048, parking=parking, **more)
    run.ask(1, 100, 1500)
    run.ask(2, 100, 1500)
    run.finish()
    return run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_forced_parks_of_a_solo_stream_change_no_token(asynchronous: bool) -> None:
    run = open_run(1024, parking=Parking(every=8, asynchronous=asynchronous))
    run.ask(1, 20, 64)
    run.finish()
    assert run.parks(1) >= 6
    assert run.notices(1) == list(SWAP) * run.parks(1)
    assert run.ids(1) == solo(20, 1, 64)
    assert len(run.logged("preempted on request after")) == run.parks(1)
    assert run.pool.totals.parks == run.pool.totals.resumes == run.parks(1)


def test_an_asynchronous_park_is_issued_and_completed_apart() -> None:
    run = open_run(1024, parking=Parking(every=8, asynchronous=True), copy_bytes_per_s=1e6)
    run.ask(1, 20, 20)
    run.finish()
    for said in ("park issued in", "park completed after", "restore issued in"):
        assert len(run.logged(said)) == run.parks(1), said
    assert len(run.logged("restore completed after")) == run.parks(1)


def test_a_synchronous_park_issues_nothing() -> None:
    run = open_run(1024, parking=Parking(every=8))
    run.ask(1, 20, 20)
    run.finish()
    assert run.parks(1)
    assert run.logged("issued") == []


def test_the_stream_hears_of_an_asynchronous_park_before_the_counter_moves() -> None:
    run = open_run(1024, parking=Parking(every=8, asynchronous=True), copy_bytes_per_s=1e5)
    run.ask(1, 20, 20)
    run.until(lambda: run.parks(1) == 1)
    slot = run.slot_of(1)
    assert (slot.where, run.pool.totals.parks) == (Where.LEAVING, 0)
    assert slot.length > 0
    run.until(lambda: slot.where is not Where.LEAVING)
    assert run.pool.totals.parks == 1


def test_with_pages_every_figure_is_a_multiple_of_one() -> None:
    run = full_house(Parking(), page=64)
    assert run.figures()
    assert all(figure % 64 == 0 for figure in run.figures())
    assert run.ended(1).predicted == run.ended(2).predicted == 1500


@pytest.mark.parametrize("budget", [-1, 64])
def test_with_the_planner_off_the_last_resort_saves_everybody(budget: int) -> None:
    run = full_house(Parking(planner=False, budget_mib=budget))
    assert run.logged("preempted as a last resort: ")
    assert run.logged("last resort: batch given up")
    assert run.logged("preempted: ") == []
    assert run.ended(1).predicted == run.ended(2).predicted == 1500


def test_with_no_budget_the_overflow_ends_every_running_chat_and_the_next_is_answered() -> None:
    run = full_house(Parking(budget_mib=0))
    assert [run.failed(1).message, run.failed(2).message] == [FULL, FULL]
    assert run.pool.totals.parks == 0
    run.ask(3, 100, 5)
    run.finish()
    assert run.ended(3).predicted == 5


def test_a_server_that_was_not_asked_to_park_overflows_with_every_cell_used() -> None:
    run = full_house(None)
    assert run.failed(1).code == run.failed(2).code == 500
    assert run.fullest == 2048
    assert run.logged("preempt") == []


def test_two_chats_that_outgrow_the_pool_both_finish_as_if_alone() -> None:
    run = full_house(Parking())
    assert run.parks(1) + run.parks(2) >= 1
    assert (run.ids(1), run.ids(2)) == (solo(100, 1, 1500), solo(100, 2, 1500))
    assert run.ended(1).stop_type == "limit"
    assert not run.ended(1).truncated


def test_a_family_that_does_not_fit_alone_gets_the_error_and_nobody_is_parked() -> None:
    run = open_run(256, parking=Parking(budget_mib=64))
    first = run.ask(1, 100, 200, family=2, parent=1)
    run.pool.queue.clear()
    other = run.ask(2, list(first.prompt), 200, family=2, parent=1)
    run.pool.queue.clear()
    run.pool.submit(first, other)
    run.finish()
    assert [run.failed(number).message for number in (1, 2)] == [FULL, FULL]
    assert run.pool.totals.parks == 0
    run.ask(3, 100, 5)
    run.finish()
    assert run.ended(3).predicted == 5


def test_a_family_pays_for_its_prompt_once() -> None:
    run = open_run(256)
    first = run.ask(1, 150, 20, family=2, parent=1)
    other = run.ask(2, list(first.prompt), 20, family=2, parent=1)
    run.pool.queue.clear()
    run.pool.submit(first, other)
    run.finish()
    assert run.ids(1) == run.ids(2)
    assert len(run.ids(1)) == 20


def test_of_two_prompts_too_large_for_one_pool_the_second_waits_without_a_cell() -> None:
    run = open_run(256, parking=Parking())
    run.ask(1, 240, 10)
    run.ask(2, 240, 10)
    run.turn()
    assert run.slot_of(2).where is Where.OUT
    assert run.slot_of(2).cells == []
    run.finish()
    assert run.ended(2).timings.prompt_n == 240
    assert run.logged("cannot fit") == []


def test_prompts_that_fill_the_pool_together_are_parked_between_their_chunks() -> None:
    run = open_run(1024, parking=Parking(), batch=128)
    run.ask(1, 700, 10)
    run.ask(2, 600, 10)
    run.until(lambda: run.parks(2) == 1)
    assert 0 < len(run.slot_of(2).cells) < 600
    run.finish()
    assert run.ended(1).predicted == run.ended(2).predicted == 10
    assert run.ended(2).timings.prompt_n == 600


def test_a_save_that_finds_no_memory_becomes_a_recompute() -> None:
    run = full_house(Parking(fail_save=True))
    assert run.logged("could not take the host memory")
    assert run.logged("tokens to re-prefill")
    assert run.ended(1).predicted == run.ended(2).predicted == 1500


@pytest.mark.parametrize("planner", [True, False])
def test_a_budget_that_holds_no_sequence_drops_cells_and_both_finish(planner: bool) -> None:
    run = full_house(Parking(budget_mib=1, planner=planner))
    parked = max((1, 2), key=run.parks)
    assert run.notices(parked) == list(AGAIN) * run.parks(parked)
    assert run.ended(parked).recomputes == run.ended(parked).parks == run.parks(parked)
    assert run.pool.totals.recomputes == run.parks(1) + run.parks(2)
    assert (run.ids(1), run.ids(2)) == (solo(100, 1, 1500), solo(100, 2, 1500))
    assert bool(run.logged("by dropping its cells")) is not planner


def test_older_builds_fail_everybody_when_the_budget_holds_no_victim() -> None:
    run = full_house(Parking(budget_mib=1, recompute=False))
    assert [run.failed(1).message, run.failed(2).message] == [FULL, FULL]


def test_a_slot_is_counted_by_the_stale_cells_that_it_holds_until_they_are_trimmed() -> None:
    run = open_run(2048, 4, parking=Parking())
    run.ask(1, 900, 60, id_slot=0)
    run.finish()
    for number in (2, 3):
        run.ask(number, 500, 300, id_slot=number)
    run.until(lambda: run.pool.slots[3].phase is Phase.DECODE)
    run.ask(4, [*range(1000, 1008), *range(5000, 5400)], 100, id_slot=0)
    run.ask(5, 500, 300, id_slot=1)
    run.finish()
    assert [run.ended(number).stop_type for number in (2, 3, 4, 5)] == ["limit"] * 4
    assert run.ended(4).timings.cache_n == 8
    assert run.ended(4).timings.prompt_n == 400


def test_a_draft_near_the_end_of_the_pool_is_bounded_and_nothing_fails() -> None:
    run = open_run(512, parking=Parking(), draft_max=8)
    run.ask(1, 100, -1)
    run.ask(2, 100, 300)
    run.finish()
    assert run.ended(2).predicted == 300
    assert run.ended(1).truncated
    assert run.ended(1).cached <= 511
    assert run.ended(1).timings.draft_n_accepted > 0


def test_drafts_change_no_token() -> None:
    run = open_run(4096, draft_max=4)
    run.ask(1, 100, 200)
    run.finish()
    assert run.ids(1) == solo(100, 1, 200)


def test_a_recompute_of_nearly_the_whole_pool_is_not_failed_as_too_large() -> None:
    run = open_run(2048, parking=Parking(budget_mib=1, every=20), draft_max=8)
    run.ask(1, 1990, 45)
    run.finish()
    assert run.parks(1) >= 1
    assert run.ended(1).predicted == 45
    assert run.logged("cannot fit") == []


def test_a_replay_is_not_billed_as_prompt() -> None:
    run = open_run(2048, parking=Parking(budget_mib=1, every=30), prefill_per_s=500)
    run.ask(1, 200, 100)
    run.finish()
    timings = run.ended(1).timings
    assert (timings.prompt_n, timings.cache_n, timings.predicted_n) == (200, 0, 100)
    assert timings.predicted_ms > 2000 > timings.prompt_ms


def test_a_swap_park_recomputes_nothing() -> None:
    run = full_house(Parking())
    assert run.pool.totals.recomputes == 0
    assert Notice.RECOMPUTED not in run.notices(1) + run.notices(2)


def test_a_request_that_was_never_parked_counts_none() -> None:
    run = open_run(2048, parking=Parking())
    run.ask(1, 100, 20)
    run.finish()
    assert (run.ended(1).parks, run.ended(1).recomputes) == (0, 0)
    assert run.notices(1) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_fourth_prompt_into_a_nearly_full_pool_parks_somebody_and_all_finish(
    asynchronous: bool,
) -> None:
    parking = Parking(asynchronous=asynchronous)
    run = open_run(2048, 4, parking=parking, copy_bytes_per_s=1e8)
    for number in (1, 2, 3):
        run.ask(number, 600, 200)
    run.until(lambda: sum(len(slot.cells) for slot in run.pool.slots) > 1850)
    run.ask(4, 700, 50)
    run.finish()
    assert sum(run.parks(number) for number in (1, 2, 3, 4)) >= 1
    assert [run.ended(number).stop_type for number in (1, 2, 3, 4)] == ["limit"] * 4
    assert run.logged("failed") == []


def test_a_client_who_leaves_while_parked_frees_the_memory_and_the_slot() -> None:
    run = open_run(2048, parking=Parking())
    run.ask(1, 100, 1500)
    run.ask(2, 100, 1500)
    run.until(lambda: any(slot.where is Where.OUT for slot in run.pool.slots))
    (away,) = [slot for slot in run.pool.slots if slot.where is Where.OUT]
    assert run.pool.parks is not None
    assert run.pool.parks.bytes_held > 0
    run.pool.cancel(away.work.number)
    assert run.pool.parks.bytes_held == 0
    assert (away.busy, away.where, away.length) == (False, Where.HERE, 0)
    run.finish()


def test_a_restore_that_fails_too_often_for_too_long_is_an_error() -> None:
    run = open_run(1024, parking=Parking(every=8, restore_failures=1 << 20))
    run.ask(1, 20, 64)
    run.finish()
    assert run.failed(1).message == "failed to restore the preempted sequence"
    assert run.now > 60
    assert len(run.logged("resume failed")) >= 8


def test_a_restore_that_fails_a_few_times_is_tried_again() -> None:
    run = open_run(1024, parking=Parking(every=32, restore_failures=5))
    run.ask(1, 20, 64)
    run.finish()
    assert run.ids(1) == solo(20, 1, 64)


def test_idle_caches_go_before_anybody_is_parked() -> None:
    run = open_run(1024, 3, parking=Parking())
    run.ask(1, 300, 5)
    run.finish()
    run.ask(2, 300, 150)
    run.ask(3, 300, 150)
    run.finish()
    assert run.logged("purging slot")
    assert run.pool.totals.parks == 0


def test_without_a_shared_pool_nothing_is_parked_and_each_slot_ends_at_its_own() -> None:
    run = open_run(1024, 2, parking=Parking(every=8), unified=False, slot_ctx=512)
    run.ask(1, 100, -1)
    run.ask(2, 100, -1)
    run.finish()
    assert run.pool.totals.parks == 0
    assert (run.ended(1).truncated, run.ended(1).cached) == (True, 511)
    assert run.ended(2).truncated


def test_four_chats_of_a_small_pool_all_finish() -> None:
    run = open_run(8192, 4, parking=Parking(), tokens_per_s=50)
    for number in (1, 2, 3, 4):
        run.ask(number, 1000, 2500)
    run.finish()
    assert [run.ended(number).predicted for number in (1, 2, 3, 4)] == [2500] * 4
    assert all(run.ids(number) == solo(1000, number, 2500) for number in (1, 2))


def test_four_chats_survive_in_pages_that_belong_to_one_each() -> None:
    run = open_run(8192, 4, parking=Parking(), page=256)
    for number in (1, 2, 3, 4):
        run.ask(number, 1000, 2000)
    run.finish()
    assert [run.ended(number).predicted for number in (1, 2, 3, 4)] == [2000] * 4
    assert all(figure % 256 == 0 for figure in run.figures())
