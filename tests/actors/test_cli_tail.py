"""The event log as ``kvalet tail`` shows it, from files that grow, shrink and move."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from kvalet.actors.cli import run
from kvalet.actors.cli_tail import line, read_file, read_stream, read_wishes
from kvalet.actors.http import serve_http
from kvalet.actors.http_exchange import Exchange, HttpLimits
from kvalet.protocol import commands as c
from kvalet.protocol.errors import JournalFault
from kvalet.protocol.events import AnyEvent, NoticeTaken, PoolPressed, PoolRead
from kvalet.protocol.ids import Cells, Nanos, RequestId, Seq
from kvalet.protocol.journal import Decision, Header, encode

HEADER = encode(Header(schema=1, versions={}, config={}))
COMMAND = c.PressureRead(slots=())


def decision(seq: int, *events: AnyEvent) -> bytes:
    made = Decision(seq=Seq(seq), at_ns=Nanos(seq * 10**9), command=COMMAND, events=[*events])
    return encode(made)


def read(resident: int) -> PoolRead:
    return PoolRead(resident=Cells(resident), busy=1)


def heard(request: str) -> NoticeTaken:
    return NoticeTaken(request=RequestId(request), notice="preempted")


def pressed(asker: str, victim: str) -> PoolPressed:
    return PoolPressed(
        asker=RequestId(asker),
        victim=RequestId(victim),
        cells=Cells(1),
        generated=1,
        short=Cells(1),
    )


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.jsonl"
    lines = [decision(1, read(5), heard("r1")), decision(2), decision(3, pressed("r2", "r1"))]
    path.write_bytes(HEADER + b"".join(lines))
    return path


def shown(capsys: pytest.CaptureFixture[str]) -> list[tuple[int, str]]:
    """(seq, kind) of each JSON line on stdout."""
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(fields["seq"], fields["kind"]) for fields in lines]


def test_each_event_is_a_line(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tail", str(journal)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("1  pool.read        5 cells are resident, 1 slots busy")


def test_the_state_directory_is_where_it_looks_by_itself(
    journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVALET_STATE_DIR", str(journal.parent))
    assert run(["tail", "--json"]) == 0
    assert len(shown(capsys)) == 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--since", "2"], [(3, "pool.pressed")]),
        (["--since", "1"], [(1, "pool.read"), (1, "notice.heard"), (3, "pool.pressed")]),
        (["--since", "1d"], []),
        (["--kind", "pool.*"], [(1, "pool.read"), (3, "pool.pressed")]),
        (
            ["--kind", "pool.read", "--kind", "notice.heard"],
            [(1, "pool.read"), (1, "notice.heard")],
        ),
        (["--request", "r1"], [(1, "notice.heard"), (3, "pool.pressed")]),
        (["--request", "r2"], [(3, "pool.pressed")]),
    ],
)
def test_only_what_is_wanted_is_shown(
    journal: Path,
    flags: list[str],
    expected: list[tuple[int, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["tail", str(journal), "--json", *flags]) == 0
    assert shown(capsys) == expected


def test_an_age_counts_back_from_now() -> None:
    assert read_wishes("10m", (), None, 10**12).at_ns == 10**12 - 600 * 10**9


def follow(path: Path, steps: Iterable[Callable[[], object]]) -> list[int]:
    """Seqs seen while ``steps`` happen to the file, one at each look; then it ends."""
    coming = iter(steps)

    class Over(Exception):
        pass

    def pause() -> None:
        step = next(coming, None)
        if step is None:
            raise Over
        step()

    seen: list[int] = []
    with suppress(Over):
        for entry in read_file(path, follow=True, pause=pause):
            seen.append(entry.seq)
    return seen


def test_what_is_appended_is_shown_once_it_is_whole(journal: Path) -> None:
    whole = decision(4, read(6))

    def append(piece: bytes) -> Callable[[], object]:
        def write() -> None:
            with journal.open("ab") as file:
                file.write(piece)

        return write

    steps = [append(whole[:9]), append(whole[9:]), append(decision(5, read(7)))]
    assert follow(journal, steps) == [1, 1, 3, 4, 5]


def test_a_torn_line_that_a_restart_cuts_off_does_not_confuse_it(journal: Path) -> None:
    size = journal.stat().st_size
    with journal.open("ab") as file:
        file.write(decision(4, read(6))[:20])

    def restart() -> None:
        whole = journal.read_bytes()[:size]
        # The same file, as a restart leaves it: cut, and longer again.
        with journal.open("r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(decision(4, read(7)) + decision(5, read(8)))
        assert journal.read_bytes().startswith(whole)

    assert follow(journal, [restart]) == [1, 1, 3, 4, 5]


def test_a_journal_that_is_rotated_goes_on_in_the_new_file(journal: Path) -> None:
    def rotate() -> None:
        with journal.open("ab") as file:
            file.write(decision(4, read(6)))
        journal.rename(journal.with_suffix(".1.jsonl"))

    def begin() -> None:
        journal.write_bytes(HEADER + decision(1, read(9)))

    assert follow(journal, [rotate, begin]) == [1, 1, 3, 4, 1]


def test_a_journal_that_is_emptied_is_read_from_its_start(journal: Path) -> None:
    def begin() -> None:
        journal.write_bytes(HEADER + decision(1, read(9)))

    assert follow(journal, [begin]) == [1, 1, 3, 1]


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(JournalFault, match="holds no journal header"):
        list(read_file(empty))


def sse(payload: str) -> bytes:
    return f"id: 4\nevent: x\ndata: {payload}\n\n".encode()


def test_a_kind_of_a_later_version_is_shown_as_it_is() -> None:
    later = '{"seq":4,"at_ns":0,"kind":"lease.painted","request":"r1","colour":"red"}'
    (entry,) = read_stream([b": ping\n\n", sse(later)])
    assert entry.event is None
    assert line(entry).endswith("lease.painted    request r1, colour red")
    assert json.loads(line(entry, as_json=True)) == json.loads(later)


def test_what_is_no_event_is_passed_over() -> None:
    pieces = [sse("nonsense"), sse("[]"), sse('{"seq":1}'), sse('{"seq":"x","at_ns":0}')]
    assert list(read_stream(pieces)) == []


async def test_a_running_kvalet_is_asked_from_the_wanted_number_on(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    async def answer(exchange: Exchange) -> None:
        if exchange.request.path == "/kvalet/status":
            await exchange.respond(200, {}, b'{"version":"0.1.0","journal":{"seq":3}}')
            return
        asked.append(exchange.request.target)
        await exchange.start_stream(200, {"content-type": "text/event-stream"})
        for entry in read_file(journal):
            await exchange.send(sse(line(entry, as_json=True)))
        await exchange.send(sse('{"seq":4,"at_ns":0,"kind":"pool.read","resident":1,"busy":0}'))
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        door = partial(serve_http, answer, ("127.0.0.1", 0), HttpLimits())
        ((_, port),) = await nursery.start(door)
        argv = ["tail", f"http://127.0.0.1:{port}", "--json", "--since", "3"]
        code = await trio.to_thread.run_sync(run, argv)
        nursery.cancel_scope.cancel()
    assert code == 0
    assert asked == ["/kvalet/events?after=2"]
    assert shown(capsys) == [(3, "pool.pressed")]
