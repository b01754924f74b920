"""The single writer: an event is in the journal before anybody hears of it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvalet.actors.decisions.state import House
from kvalet.actors.journal import Journal, open_journal, read_journal
from kvalet.actors.ledger import BATCH_MAX, Ledger, Mailbox
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.errors import JournalFault
from kvalet.protocol.ids import Cells, Nanos
from kvalet.protocol.journal import SCHEMA, Decision, Header

HEADER = Header(schema=SCHEMA, versions={}, config={})


def ticking() -> Iterator[Nanos]:
    return (Nanos(number) for number in count(1))


def new_ledger(path: Path) -> Ledger:
    journal, house, _ = open_journal(path, HEADER)
    clock = ticking()
    return Ledger(journal, house, lambda: next(clock))


def full_disk() -> Ledger:
    """A ledger whose journal takes nothing."""
    device = Path("/dev/full")
    journal = Journal(device, os.open(device, os.O_RDWR | os.O_APPEND), 0, 0)
    return Ledger(journal, House(), lambda: Nanos(1))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = new_ledger(tmp_path / "journal.jsonl")
    yield ledger
    ledger.journal.close()


def has_guests(house: House) -> bool:
    return bool(house.leases)


@asynccontextmanager
async def running(ledger: Ledger) -> AsyncGenerator[None]:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ledger.run)
            yield
            nursery.cancel_scope.cancel()


def arrive(mailbox: Mailbox) -> c.Arrive:
    return c.Arrive(request=mailbox.request, surface="openai.chat", streaming=True)


def open_pool(cells: int = 512, slots: int = 2) -> list[c.Command]:
    return [
        c.OpenHouse(settings=c.Settings()),
        c.ReadySeen(
            generation=1,
            url="http://127.0.0.1:1",
            build="b1",
            model="m",
            cells=Cells(cells),
            slots=slots,
            headroom=Cells(slots),
        ),
        c.ProbeSeen(generation=1, method="save"),
    ]


async def heard(mailbox: Mailbox, number: int) -> list[str]:
    return [type(await mailbox.events.receive()).__name__ for _ in range(number)]


def nobody_hears_what_was_not_written(ledger: Ledger) -> None:
    """The check that a ledger with effects before its append does not pass."""
    mailbox, tap = ledger.open_mailbox(), ledger.tap(10)
    before = ledger.house

    ledger.decide([arrive(mailbox)])

    for channel in (mailbox.events, tap):
        with pytest.raises(trio.EndOfChannel):
            channel.receive_nowait()
    assert ledger.house is before


async def test_nobody_hears_of_what_the_disk_refused() -> None:
    nobody_hears_what_was_not_written(full_disk())


async def test_a_ledger_that_acts_before_it_writes_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Journal.append
    ledger = full_disk()

    def hasty(journal: Journal, decisions: list[Decision]) -> None:
        for decision in decisions:
            for event in decision.events:
                getattr(ledger, "_hand_out")(event)  # noqa: B009
        honest(journal, decisions)

    monkeypatch.setattr(Journal, "append", hasty)

    with pytest.raises(pytest.fail.Exception):
        nobody_hears_what_was_not_written(ledger)


async def test_an_event_is_in_the_file_when_it_is_heard(ledger: Ledger) -> None:
    mailbox = ledger.open_mailbox()
    async with running(ledger):
        ledger.tell(arrive(mailbox))

        event = await mailbox.events.receive()

    assert [d.events for d in read_journal(ledger.journal.path)] == [[event]]
    assert mailbox.request in ledger.house.leases


async def test_a_mailbox_gets_its_own_events_and_a_tap_gets_all(ledger: Ledger) -> None:
    tap = ledger.tap(100)
    first, second = ledger.open_mailbox(), ledger.open_mailbox()
    ledger.decide([*open_pool(), arrive(first), arrive(second)])
    ledger.decide([c.PromptCounted(request=second.request, prompt=Cells(9))])

    assert await heard(first, 1) == ["RequestArrived"]
    assert await heard(second, 3) == ["RequestArrived", "PromptMeasured", "LeaseGranted"]
    assert tap.statistics().current_buffer_used == 7
    for mailbox in (first, second):
        with pytest.raises(trio.WouldBlock):
            mailbox.events.receive_nowait()


async def test_pressure_is_told_to_who_asked(ledger: Ledger) -> None:
    mailboxes = [ledger.open_mailbox(), ledger.open_mailbox()]
    ledger.decide(open_pool(cells=102))
    for mailbox in mailboxes:
        ledger.decide([arrive(mailbox), c.PromptCounted(request=mailbox.request, prompt=Cells(16))])
    asker = mailboxes[0]
    while ledger.house.leases[asker.request].state == "running":
        cells = ledger.house.leases[asker.request].granted
        ledger.decide([c.CreditSpent(request=asker.request, cells=cells, generated=cells - 16)])

    told = [asker.events.receive_nowait() for _ in range(4)]
    assert isinstance(told[-1], e.PoolPressed | e.LeaseQueued | e.LeaseExtended)


async def test_a_closed_mailbox_has_no_reader_and_nobody_minds(ledger: Ledger) -> None:
    mailbox = ledger.open_mailbox()
    ledger.close_mailbox(mailbox)
    ledger.close_mailbox(mailbox)

    ledger.decide([arrive(mailbox)])

    with pytest.raises(trio.EndOfChannel):
        mailbox.events.receive_nowait()


async def test_a_reader_that_went_home_does_not_stop_the_ledger(ledger: Ledger) -> None:
    gone, here = ledger.tap(1), ledger.tap(10)
    gone.close()
    mailbox = ledger.open_mailbox()

    ledger.decide([arrive(mailbox)])
    ledger.decide([c.Leave(request=mailbox.request)])

    assert here.statistics().current_buffer_used == 3


async def test_ids_go_on_where_the_journal_ended(ledger: Ledger, tmp_path: Path) -> None:
    mailboxes = [ledger.open_mailbox() for _ in range(3)]
    ledger.decide([arrive(mailbox) for mailbox in mailboxes])
    ledger.journal.close()

    again = new_ledger(tmp_path / "journal.jsonl")
    again.decide([c.OpenHouse(settings=c.Settings())])

    assert [mailbox.request for mailbox in mailboxes] == ["r1", "r2", "r3"]
    assert again.open_mailbox().request == "r4"
    assert again.house.leases == {}
    again.journal.close()


async def test_commands_of_one_moment_share_one_write_and_one_time(ledger: Ledger) -> None:
    mailboxes = [ledger.open_mailbox() for _ in range(BATCH_MAX + 5)]
    for mailbox in mailboxes:
        ledger.tell(arrive(mailbox))
    async with running(ledger):
        await ledger.wait_for(lambda house: len(house.leases) == len(mailboxes))

    times = [decision.at_ns for decision in read_journal(ledger.journal.path)]
    assert times == [1] * BATCH_MAX + [2] * 5


async def test_a_clock_that_is_set_back_does_not_turn_time_around(tmp_path: Path) -> None:
    journal, house, _ = open_journal(tmp_path / "journal.jsonl", HEADER)
    times = iter([Nanos(50), Nanos(20), Nanos(60)])
    ledger = Ledger(journal, house, lambda: next(times))
    mailbox = ledger.open_mailbox()

    for _ in range(3):
        ledger.decide([c.Leave(request=mailbox.request)])
    journal.close()

    assert [decision.at_ns for decision in read_journal(journal.path)] == [50, 50, 60]


async def test_a_failed_ledger_ends_everybody_and_takes_nobody_new() -> None:
    ledger = full_disk()
    mailbox, tap = ledger.open_mailbox(), ledger.tap(1)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ledger.wait_for, has_guests)
            nursery.start_soon(ledger.run)
            await wait_all_tasks_blocked()
            ledger.tell(arrive(mailbox))
            for channel in (mailbox.events, tap):
                with pytest.raises(trio.EndOfChannel):
                    await channel.receive()
            ledger.tell(c.Leave(request=mailbox.request))
            await ledger.wait_idle()
            nursery.cancel_scope.cancel()

    assert ledger.failure is not None
    with pytest.raises(JournalFault, match="No space left"):
        ledger.open_mailbox()
    ledger.decide([arrive(mailbox)])
    assert ledger.house == House()


async def test_a_sync_that_fails_ends_everybody_without_another_command(
    autojump_clock: MockClock,
) -> None:
    # No deadline here: while the sync is in its thread the clock would jump to it.
    reader, writer = os.pipe()
    ledger = Ledger(Journal(Path("pipe"), writer, 0, 0), House(), lambda: Nanos(1))
    mailbox = ledger.open_mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ledger.run)
        nursery.start_soon(ledger.journal.run_sync)
        ledger.tell(arrive(mailbox))
        assert await heard(mailbox, 1) == ["RequestArrived"]
        with pytest.raises(trio.EndOfChannel):
            await mailbox.events.receive()
        nursery.cancel_scope.cancel()
    ledger.journal.close()
    os.close(reader)


async def test_a_command_told_while_the_ledger_is_cancelled_is_not_half_done(
    ledger: Ledger,
) -> None:
    mailbox = ledger.open_mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ledger.run)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        ledger.tell(arrive(mailbox))

    assert (mailbox.request in ledger.house.leases) == (ledger.journal.seq == 1)
    async with running(ledger):
        await ledger.wait_idle()
        await ledger.wait_for(lambda house: mailbox.request in house.leases)
    assert len(list(read_journal(ledger.journal.path))) == 1


async def test_an_actors_own_end_of_the_inbox_is_closed_without_harm(ledger: Ledger) -> None:
    async with running(ledger):
        async with ledger.reports() as reports:
            for command in open_pool():
                await reports.send(command)
        await ledger.wait_for(lambda house: house.ready)
        mailbox = ledger.open_mailbox()
        ledger.tell(arrive(mailbox))
        assert await heard(mailbox, 1) == ["RequestArrived"]


async def test_who_waits_for_the_ledger_may_leave(ledger: Ledger) -> None:
    ledger.tell(c.OpenHouse(settings=c.Settings()))
    for wait in (ledger.wait_idle, partial(ledger.wait_for, lambda _: False)):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
    async with running(ledger):
        await ledger.wait_idle()


async def test_a_reader_that_lags_too_far_is_a_bug_and_says_so(ledger: Ledger) -> None:
    ledger.tap(0)
    mailbox = ledger.open_mailbox()

    with pytest.raises(trio.WouldBlock):
        ledger.decide([arrive(mailbox)])
    assert ledger.journal.seq == 1


async def test_last_words_are_decided_when_nobody_listens_any_more(ledger: Ledger) -> None:
    mailbox = ledger.open_mailbox()
    ledger.settle()
    ledger.tell(arrive(mailbox))
    ledger.tell(c.Leave(request=mailbox.request))

    ledger.settle()

    assert ledger.house.totals.left == 1
    assert ledger.house.leases == {}
    assert ledger.journal.seq == 2
