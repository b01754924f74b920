"""One stream's parks by the server: what its client is told, and what is counted."""

from __future__ import annotations

from kvalet.actors.decisions.away import Away, Heard
from kvalet.protocol.notices import Notice
from kvalet.protocol.openai import KvaletUsage, ParkRecord

PAUSED, RESUMED = b": preempt-paused\n\n", b": preempt-resumed\n\n"
RECOMPUTED = b": preempt-recomputed\n\n"


def test_a_park_and_a_resume_are_told_as_our_own_are() -> None:
    away = Away()
    assert away.hear(Notice.PREEMPTED, 0, 10.0) == Heard(PAUSED, "preempted")
    assert away.hear(Notice.KEEPALIVE, 0, 12.0) == Heard()
    assert away.hear(Notice.RESUMED, 0, 15.5) == Heard(RESUMED, "resumed")
    assert away.added_to(KvaletUsage(waited_s=1.0)) == KvaletUsage(
        parks=1, resumes=1, waited_s=1.0, parked_s=5.5
    )


def test_a_recompute_is_told_right_behind_its_resume() -> None:
    away = Away()
    away.hear(Notice.PREEMPTED, 0, 0.0)
    away.hear(Notice.RESUMED, 0, 1.0)
    assert away.hear(Notice.RECOMPUTED, 0, 1.0) == Heard(RECOMPUTED, "recomputed")
    assert away.added_to(KvaletUsage()).recomputes == 1


def test_not_15_a_recompute_that_only_the_final_count_knows_is_told_once() -> None:
    away = Away()
    away.hear(Notice.PREEMPTED, 0, 0.0)
    away.hear(Notice.RESUMED, 0, 1.0)
    record = ParkRecord(parks=1, recomputes=1)
    assert away.settle(record) == Heard(RECOMPUTED, "recomputed")
    assert away.settle(record) == Heard()
    assert away.added_to(KvaletUsage()).recomputes == 1


def test_a_count_that_was_announced_or_that_says_nothing_tells_nothing() -> None:
    away = Away()
    for record in (None, ParkRecord(), ParkRecord(parks=3), ParkRecord(recomputes=0)):
        assert away.settle(record) == Heard()
    away.hear(Notice.PREEMPTED, 0, 0.0)
    away.hear(Notice.RESUMED, 0, 0.0)
    away.hear(Notice.RECOMPUTED, 0, 0.0)
    assert away.settle(ParkRecord(parks=1, recomputes=1)) == Heard()


def test_a_request_of_several_prompts_is_away_while_any_of_them_is() -> None:
    away = Away()
    assert away.hear(Notice.PREEMPTED, 1, 0.0).comment == PAUSED
    assert away.hear(Notice.PREEMPTED, 0, 1.0).comment == b""
    assert away.hear(Notice.RESUMED, 1, 2.0).comment == b""
    assert away.parked
    assert away.hear(Notice.RESUMED, 0, 4.0).comment == RESUMED
    assert away.parked_s == 4.0


def test_not_16_surprises_leave_a_consistent_state_and_are_named() -> None:
    away = Away()
    assert away.hear(Notice.RESUMED, 0, 0.0) == Heard(b"", "resumed-without-park")
    assert away.hear(Notice.KEEPALIVE, 0, 0.0) == Heard(b"", "keepalive-without-park")
    away.hear(Notice.PREEMPTED, 0, 1.0)
    assert away.hear(Notice.PREEMPTED, 0, 2.0) == Heard(b"", "preempted-twice")
    assert away.datum(3.0) == Heard(RESUMED, "data-while-parked")
    assert away.datum(4.0) == Heard()
    usage = away.added_to(KvaletUsage())
    assert (usage.parks, usage.resumes, usage.parked_s) == (1, 1, 2.0)


def test_a_park_that_only_a_reading_of_the_slots_tells_is_told_like_any_other() -> None:
    away = Away()
    assert away.see(False, 0.0) == b""
    assert away.see(True, 1.0) == PAUSED
    assert away.see(True, 2.0) == b""
    assert away.see(False, 5.0) == RESUMED
    assert away.parked_s == 4.0
