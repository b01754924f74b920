"""A host's test of a recorded incident: what happened in that journal, and must not again.

    pytest test_incident.py

``incident.jsonl`` was recorded by ``embed_scheduler.py --journal incident.jsonl``. Keep the
journal of an incident in your repository, and say in a test what was wrong with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvalet.testing import Recording, assert_replays, load_journal

JOURNAL = Path(__file__).with_name("incident.jsonl")


@pytest.fixture
def incident() -> Recording:
    return load_journal(JOURNAL)


def test_everybody_finished_although_the_pool_was_too_small(incident: Recording) -> None:
    house = incident.fold()
    assert (house.totals.finished, house.totals.failed) == (6, 0)
    assert house.totals.parks == house.totals.resumes > 0
    assert house.leases == {}


def test_no_cell_was_lent_twice(incident: Recording) -> None:
    for decision, house in incident.steps():
        assert 0 <= house.granted_total <= max(0, house.limit), decision


def test_the_pool_was_nearly_full_when_the_first_chat_was_parked(incident: Recording) -> None:
    first = next(
        decision
        for decision in incident.decisions
        if any(event in incident.events("lease.parking") for event in decision.events)
    )
    before = incident.house_at(first.seq - 1)
    assert before.free < before.settings.block_min


def test_the_first_to_come_was_never_parked(incident: Recording) -> None:
    assert incident.events("lease.parked", request="r1") == []


def test_todays_rules_would_decide_the_same() -> None:
    assert_replays(JOURNAL)
