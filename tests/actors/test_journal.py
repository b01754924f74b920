"""The journal on a real disk: reopened, torn, corrupt, locked, rotated, full."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.state import House
from kvalet.actors.journal import ROTATE_BYTES, Journal, open_journal, read_journal
from kvalet.protocol import commands as c
from kvalet.protocol.errors import EnvironmentFault, JournalFault
from kvalet.protocol.ids import Nanos, RequestId, Seq
from kvalet.protocol.journal import SCHEMA, Decision, Header, encode

HEADER = Header(schema=SCHEMA, versions={"kvalet": "0.1.0"}, config={"ctx": 2048})


def decisions(count: int, house: House | None = None, seq: int = 0) -> list[Decision]:
    """``count`` arrivals as a core would decide them, the first after ``seq``."""
    house = house or House()
    made: list[Decision] = []
    for number in range(seq + 1, seq + count + 1):
        command = c.Arrive(request=RequestId(f"r{number}"), surface="openai.chat", streaming=True)
        events, house = take(house, command, Nanos(number))
        made.append(Decision(seq=Seq(number), at_ns=Nanos(number), command=command, events=events))
    return made


def written(path: Path, count: int = 3) -> bytes:
    """A journal of ``count`` decisions at ``path``, closed again; its bytes."""
    journal, _, _ = open_journal(path, HEADER)
    journal.append(decisions(count))
    journal.close()
    return path.read_bytes()


@contextmanager
def file_size_limit(size: int) -> Generator[None]:
    """Files may not grow beyond ``size`` bytes: to a writer, a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.jsonl"


def test_a_new_journal_begins_with_its_header_and_an_empty_house(path: Path) -> None:
    journal, house, torn = open_journal(path, HEADER)
    journal.close()

    assert (house, torn, journal.seq) == (House(), 0, 0)
    assert path.read_bytes() == encode(HEADER)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_appended_is_folded_when_the_journal_is_opened_again(path: Path) -> None:
    written(path)

    journal, house, torn = open_journal(path, HEADER)
    journal.append(decisions(2, house, 3))
    journal.close()

    assert (set(house.leases), torn) == ({"r1", "r2", "r3"}, 0)
    assert [decision.seq for decision in read_journal(path)] == [1, 2, 3, 4, 5]


def test_appended_decisions_are_in_the_file_before_anything_is_closed(path: Path) -> None:
    journal, _, _ = open_journal(path, HEADER)
    journal.append(decisions(2))

    assert len(list(read_journal(path))) == 2
    assert journal.size == path.stat().st_size
    journal.close()
    journal.close()


def test_a_last_line_torn_at_any_byte_is_cut_off(path: Path) -> None:
    whole = written(path)
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])

        journal, house, torn = open_journal(path, HEADER)
        journal.close()

        assert torn == end - start
        assert (journal.seq, set(house.leases)) == (2, {"r1", "r2"})
        assert path.read_bytes() == whole[:start]


def test_a_header_torn_at_any_byte_is_written_again(path: Path) -> None:
    header = encode(HEADER)
    path.parent.mkdir()
    for end in range(len(header)):
        path.write_bytes(header[:end])

        journal, house, torn = open_journal(path, HEADER)
        journal.close()

        assert (torn, house) == (end, House())
        assert path.read_bytes() == header


@pytest.mark.parametrize("line", [2, 3])
def test_a_corrupt_line_stops_the_start_with_its_place(path: Path, line: int) -> None:
    lines = written(path).splitlines(keepends=True)
    offset = sum(map(len, lines[: line - 1]))
    lines[line - 1] = lines[line - 1].replace(b'"seq"', b'"sea"')
    path.write_bytes(b"".join(lines))

    with pytest.raises(JournalFault, match=f"line {line} at byte {offset} is corrupt"):
        open_journal(path, HEADER)
    with pytest.raises(JournalFault, match=f"line {line} at byte {offset}"):
        list(read_journal(path))
    assert path.read_bytes() == b"".join(lines)


def test_a_missing_line_is_told_by_its_number(path: Path) -> None:
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))

    with pytest.raises(JournalFault, match=r"line 3 at byte \d+ has seq 3, expected 2"):
        open_journal(path, HEADER)


def test_a_line_that_does_not_follow_from_the_others_stops_the_start(path: Path) -> None:
    written(path, 1)
    journal, house, _ = open_journal(path, HEADER)
    stranger = decisions(1, house, 1)[0]
    leave = take(house, c.Leave(request=RequestId("r1")), Nanos(2))[0]
    for seq in (2, 3):
        journal.append(
            [Decision(seq=Seq(seq), at_ns=Nanos(2), command=stranger.command, events=leave)]
        )
    journal.close()

    with pytest.raises(JournalFault, match=r"line 4 \(seq 3\) does not follow"):
        open_journal(path, HEADER)


def test_what_is_no_journal_is_not_taken_for_one(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"to whom it may concern\n")
    with pytest.raises(JournalFault, match="line 1"):
        open_journal(path, HEADER)
    path.write_bytes(encode(HEADER).replace(b'"schema":1', b'"schema":2'))
    with pytest.raises(JournalFault, match="schema 2 is not 1"):
        open_journal(path, HEADER)
    path.write_bytes(b"")
    with pytest.raises(JournalFault, match="no journal header"):
        list(read_journal(path))
    with pytest.raises(JournalFault, match="cannot read"):
        list(read_journal(tmp_path / "nowhere"))


def test_the_header_is_shown_to_who_asks(path: Path) -> None:
    written(path)
    seen: list[Header] = []

    list(read_journal(path, seen.append))

    assert seen == [HEADER]


def test_a_second_opening_is_locked_out_until_the_first_is_closed(path: Path) -> None:
    journal, _, _ = open_journal(path, HEADER)

    with pytest.raises(EnvironmentFault, match="in use by another kvalet"):
        open_journal(path, HEADER)
    journal.close()
    open_journal(path, HEADER)[0].close()


def test_another_process_is_locked_out(path: Path) -> None:
    journal, _, _ = open_journal(path, HEADER)
    script = (
        "import sys; from pathlib import Path\n"
        "from kvalet.actors.journal import open_journal\n"
        "from kvalet.protocol.errors import EnvironmentFault\n"
        "from kvalet.protocol.journal import Header\n"
        "try: open_journal(Path(sys.argv[1]), Header(schema=1, versions={}, config={}))\n"
        "except EnvironmentFault as fault: sys.exit(str(fault))\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )

    journal.close()
    assert ended.returncode == 1
    assert "in use by another kvalet" in ended.stderr


def test_a_directory_that_cannot_be_made_is_the_environments_fault(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file, not a directory")

    with pytest.raises(EnvironmentFault, match="--state-dir"):
        open_journal(tmp_path / "state" / "journal.jsonl", HEADER)


def test_a_journal_that_has_grown_too_large_is_set_aside(path: Path) -> None:
    names = ["journal.1.jsonl", "journal.2.jsonl", "journal.3.jsonl", "journal.4.jsonl"]
    for round_number in range(1, 7):
        journal, house, torn = open_journal(path, HEADER)
        journal.close()
        assert (house, torn) == (House(), 0)
        os.truncate(path, ROTATE_BYTES + round_number)

    assert sorted(file.name for file in path.parent.iterdir()) == [*names, "journal.jsonl"]
    assert (path.parent / names[0]).stat().st_size == ROTATE_BYTES + 5
    assert (path.parent / names[3]).stat().st_size == ROTATE_BYTES + 2


def test_a_journal_that_is_too_large_and_in_use_stays_where_it_is(path: Path) -> None:
    journal, _, _ = open_journal(path, HEADER)
    os.truncate(path, ROTATE_BYTES + 1)

    with pytest.raises(EnvironmentFault):
        open_journal(path, HEADER)

    journal.close()
    assert [file.name for file in path.parent.iterdir()] == ["journal.jsonl"]


@pytest.mark.parametrize("room", [0, 1, 50, 300])
def test_on_a_full_disk_nothing_is_appended_and_nothing_ever_again(path: Path, room: int) -> None:
    before = written(path)
    journal, house, _ = open_journal(path, HEADER)

    with file_size_limit(len(before) + room), pytest.raises(JournalFault, match="cannot append"):
        journal.append(decisions(3, house, 3))

    assert path.read_bytes() == before
    assert journal.failure is not None
    with pytest.raises(JournalFault, match="cannot append"):
        journal.append(decisions(3, house, 3))
    journal.close()
    reopened, _, torn = open_journal(path, HEADER)
    reopened.close()
    assert (reopened.seq, torn) == (3, 0)


def test_a_disk_with_no_room_for_a_header_starts_nothing(path: Path) -> None:
    with file_size_limit(5), pytest.raises(JournalFault, match="cannot append"):
        open_journal(path, HEADER)

    open_journal(path, HEADER)[0].close()


def test_a_device_that_cannot_even_be_cut_back_still_fails_as_a_journal() -> None:
    journal = Journal(Path("/dev/full"), os.open("/dev/full", os.O_RDWR | os.O_APPEND), 0, 0)

    with pytest.raises(JournalFault, match="No space left"):
        journal.append(decisions(1))
    journal.close()


async def test_a_sync_that_fails_ends_the_journal(autojump_clock: MockClock) -> None:
    reader, writer = os.pipe()
    journal = Journal(Path("pipe"), writer, 0, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run_sync)
        nursery.start_soon(journal.wait_appended, 1)
        nursery.start_soon(journal.wait_failed)
        await wait_all_tasks_blocked()
        journal.append(decisions(1))

    assert journal.failure is not None
    assert "cannot sync" in journal.failure
    journal.close()
    os.close(reader)


async def test_who_waits_for_an_append_is_woken_by_it_or_leaves(path: Path) -> None:
    journal, _, _ = open_journal(path, HEADER)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.wait_appended, 0)
            await wait_all_tasks_blocked()
            journal.append(decisions(1))
        await journal.wait_appended(0)
        for wait in (partial(journal.wait_appended, 1), journal.wait_failed):
            with trio.CancelScope() as scope:
                scope.cancel()
                await wait()
            assert scope.cancelled_caught
    journal.close()


async def test_a_sync_is_cancelled_asleep_or_at_work(path: Path, mock_clock: MockClock) -> None:
    journal, house, _ = open_journal(path, HEADER)
    for awake in (False, True):
        journal.append(decisions(1, house, journal.seq))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run_sync)
            await wait_all_tasks_blocked()
            if awake:
                mock_clock.jump(1)
                await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        house = House()
    assert journal.failure is None
    journal.close()
