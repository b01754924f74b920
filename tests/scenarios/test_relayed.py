"""kvalet's relay beside readings that are slow, wrong or missing, and parks of any length."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trio
from trio.testing import MockClock

from kvalet.actors import preemption
from kvalet.actors.journal import read_journal
from kvalet.protocol import events as e
from tests.actors.stage import Guest, Stage, chat, stage, until
from tests.sims.test_parked_streams import TEXT, behind, finished, long_answer, notices_of

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


def events_of(folder: Path) -> list[e.AnyEvent]:
    return [event for one in read_journal(folder / "journal.jsonl") for event in one.events]


@pytest.mark.parametrize("build", ["G1", "G3", "G4"])
async def test_a_prompt_that_is_parked_for_longer_than_a_first_token_may_take_is_answered(
    tmp_path: Path, autojump_clock: MockClock, build: str
) -> None:
    async with behind(tmp_path, build) as it:
        resident = it.invite(long_answer(1, 200, 1790), path=TEXT)
        await trio.sleep(3000)
        began = trio.current_time()
        parked = it.invite(long_answer(2, 900, 5), path=TEXT)
        await until(lambda: bool(parked.chunks), 1.0)
        assert trio.current_time() - began > it.house.settings.first_token_s + 2
        await finished(it, resident, parked)

        assert [guest.errors for guest in (resident, parked)] == [[], []]
        assert notices_of(parked) == [b": preempt-paused", b": preempt-resumed"]
        assert parked.comments.count(b": preempt-keepalive") >= 600
        assert parked.chunks[-1]["usage"]["completion_tokens"] == 5


async def test_a_reading_that_fails_excuses_no_silence(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    faults = '[{"kind":"hang","at_token":5},{"kind":"500","path":"/slots","times":1000000}]'
    async with behind(tmp_path, "G1", KVALET_SIM_FAULTS=faults) as it:
        guest = it.invite(long_answer(1, 100, 50), path=TEXT)
        await until(lambda: len(guest.chunks) >= 4, 0.01)
        began = trio.current_time()
        await until(lambda: guest.done, 0.01)

        assert [error["code"] for error in guest.errors] == ["stalled"]
        assert 119.9 <= trio.current_time() - began <= 120.2


def read_the_slots(it: Stage) -> None:
    it.nursery.start_soon(preemption.run, it.upstream, it.ledger.tell, lambda: True)


async def answered(it: Stage, guest: Guest) -> float:
    began = trio.current_time()
    await until(lambda: guest.done, 0.001)
    guest.check_ended_once()
    assert guest.content == it.server.answer.decode()
    return trio.current_time() - began


async def test_the_slots_are_read_by_the_clock_and_not_by_the_token(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    readings: list[int] = []
    for token_s in (0.01, 0.5):
        folder = tmp_path / str(token_s)
        async with stage(folder) as it:
            it.server.token_s = token_s
            read_the_slots(it)
            await answered(it, it.invite(chat()))
            paths = Counter(urlsplit(target).path for target in it.server.targets)
            readings.append(paths["/slots"])
    assert len(it.server.answer) == 78
    assert readings[0] <= 1, "shorter than one interval: only its slot is looked at, at the end"
    assert 7 <= readings[1] - readings[0] <= 8, "39 seconds, and as many tokens as before"


async def test_a_reading_that_hangs_holds_no_stream_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    took: list[float] = []
    for hangs in (False, True):
        async with stage(tmp_path / str(hangs)) as it:
            it.server.token_s = 0.5
            it.server.faults = [("GET /slots", lambda: None)] * 20 if hangs else []
            read_the_slots(it)
            took.append(await answered(it, it.invite(chat())))
            assert hangs == (len(it.server.faults) in range(16, 20)), "some have hung"
            it.server.faults = []
    assert took[0] == pytest.approx(took[1], abs=0.01)


@pytest.mark.parametrize("cap", [None, 40])
async def test_every_upstream_request_is_bounded_by_its_credit(
    tmp_path: Path, autojump_clock: MockClock, cap: int | None
) -> None:
    more = {} if cap is None else {"max_tokens": cap}
    async with stage(tmp_path, cells=240) as it:
        guests = [it.invite(chat(name, **more)) for name in ("one", "two", "six")]
        await it.all_gone()
        bounds = [int(body["max_tokens"]) for body in it.server.bodies]
        said = {guest.content for guest in guests}
    granted = [
        int(event.credit)
        for event in events_of(tmp_path)
        if isinstance(event, e.LeaseGranted | e.LeaseExtended | e.LeaseResumed)
    ]
    assert sorted(bounds) == sorted(granted)
    assert len(bounds) > 3
    assert said == {it.server.answer[:cap].decode()}
