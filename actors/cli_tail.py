"""``kvalet tail``: the event log, one line per event, from a file or a running kvalet."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, get_args

import httpx
import msgspec

from kvalet.actors.cli_status import check_answer, fetch, read_status, unreachable
from kvalet.actors.journal import READ_BYTES
from kvalet.actors.render import printable, sentence
from kvalet.protocol.errors import ConfigFault, JournalFault
from kvalet.protocol.events import AnyEvent
from kvalet.protocol.ids import Nanos
from kvalet.protocol.journal import Decision, Reader
from kvalet.protocol.sse import SseSplitter

POLL_S: Final = 0.25
CONNECT_TIMEOUT_S: Final = 5.0
CAUGHT_UP_S: Final = 1.0
"""A server that sends nothing for so long has told everything there is."""

KINDS: Final[tuple[str, ...]] = tuple(
    str(kind.__struct_config__.tag) for kind in get_args(AnyEvent)
)
_SPAN_NANOS: Final = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the log. ``event`` is None for a kind that this version does not know."""

    seq: int
    at_ns: int
    kind: str
    fields: dict[str, Any]
    event: AnyEvent | None


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which events to show: from ``seq`` and ``at_ns`` on, of these kinds, about ``request``."""

    seq: int = 0
    at_ns: int = 0
    kinds: tuple[str, ...] = ()
    request: str | None = None

    def fits(self, entry: Entry) -> bool:
        """Whether ``entry`` is wanted."""
        if entry.seq < self.seq or entry.at_ns < self.at_ns:
            return False
        if self.kinds and not any(fnmatchcase(entry.kind, kind) for kind in self.kinds):
            return False
        named = (entry.fields.get(name) for name in ("request", "asker", "victim"))
        return self.request is None or self.request in named


def read_wishes(
    since: str | None, kinds: Sequence[str], request: str | None, now_ns: int
) -> Wanted:
    """The wish behind the flags. ``since``: a sequence number, or an age such as ``10m``.

    Raises ConfigFault.
    """
    unknown = [kind for kind in kinds if not any(fnmatchcase(known, kind) for known in KINDS)]
    if unknown:
        raise ConfigFault(
            f"no event has the kind {' or '.join(unknown)}; there are {', '.join(KINDS)}"
        )
    match = re.fullmatch(r"(\d{1,18})([smhd]?)", since or "0")
    if match is None:
        raise ConfigFault(f"--since wants a sequence number or an age like 10m, not {since!r}")
    number, unit = int(match[1]), match[2]
    return Wanted(
        seq=0 if unit else number,
        at_ns=now_ns - number * _SPAN_NANOS[unit] if unit else 0,
        kinds=tuple(kinds),
        request=request,
    )


def line(entry: Entry, *, as_json: bool = False) -> str:
    """``entry`` as it is printed."""
    if as_json:
        return msgspec.json.encode(
            {"seq": entry.seq, "at_ns": entry.at_ns, **entry.fields}
        ).decode()
    told = _told(entry.fields) if entry.event is None else sentence(entry.event)
    return f"{_clock(entry.at_ns)} {entry.seq:>6}  {entry.kind:<16} {told}"


def read_file(
    path: Path, *, follow: bool = False, pause: Callable[[], None] | None = None
) -> Generator[Entry]:
    """The events of a journal; with ``follow`` without end, through rotations and restarts.

    ``pause`` is called between two looks at the file. Raises JournalFault.
    """
    pause = pause or _sleep
    reader = Reader()
    opened = _open(path)
    try:
        while True:
            yield from _read_on(opened, reader)
            if not follow:
                break
            pause()
            if _is_replaced(path, opened, reader.offset):
                yield from _read_on(opened, reader)
                os.close(opened)
                opened = _open(path)
                reader = Reader()
    finally:
        os.close(opened)
    if reader.header is None:
        raise JournalFault(f"{path} holds no journal header")


def read_url(
    url: str, api_key: str | None, after: int, *, follow: bool = False
) -> Generator[Entry]:
    """The events behind seq ``after`` of the kvalet at ``url``; with ``follow`` until it ends.

    Raises EnvironmentFault.
    """
    last = read_status(url, fetch(url, api_key)).journal.seq
    address = f"{url.rstrip('/')}/kvalet/events?after={after}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=None if follow else CAUGHT_UP_S)
    try:
        with httpx.stream(
            "GET", address, headers=headers, timeout=timeout, trust_env=False
        ) as answer:
            check_answer(url, answer.status_code)
            for entry in read_stream(answer.iter_raw()):
                if entry.seq > last and not follow:
                    return
                yield entry
    except httpx.ReadTimeout:
        return
    except httpx.HTTPError as error:
        raise unreachable(url, error) from error


def read_stream(pieces: Iterable[bytes]) -> Iterator[Entry]:
    """The entries in an event stream's bytes; comments and the unreadable are passed over."""
    splitter = SseSplitter()
    for piece in pieces:
        for event in splitter.feed(piece):
            if event.data is not None:
                entry = _read_entry(event.data)
                if entry is not None:
                    yield entry


def show(
    entries: Generator[Entry], wanted: Wanted, say: Callable[[str], None], *, as_json: bool
) -> None:
    """Say every wanted entry."""
    with closing(entries):
        for entry in entries:
            if wanted.fits(entry):
                say(line(entry, as_json=as_json))


def _read_on(opened: int, reader: Reader) -> Iterator[Entry]:
    # Only whole lines are trusted: a restart cuts an incomplete last one off.
    os.lseek(opened, reader.offset, os.SEEK_SET)
    reader.rest = b""
    while chunk := os.read(opened, READ_BYTES):
        yield from _entries(reader.feed(chunk))


def _sleep() -> None:
    time.sleep(POLL_S)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise JournalFault(
            f"cannot read the journal {path}: {error.strerror}; name one, or a kvalet's URL"
        ) from error


def _is_replaced(path: Path, opened: int, offset: int) -> bool:
    """Whether another file has the name now, or this one has been cut short."""
    held = os.fstat(opened)
    try:
        named = path.stat()
    except OSError:
        return False
    same = (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
    return not same or held.st_size < offset


def _entries(decisions: Iterable[Decision]) -> Iterator[Entry]:
    for decision in decisions:
        for event in decision.events:
            fields = msgspec.to_builtins(event)
            yield Entry(
                seq=decision.seq,
                at_ns=decision.at_ns,
                kind=fields["kind"],
                fields=fields,
                event=event,
            )


def _read_entry(payload: bytes) -> Entry | None:
    try:
        fields = msgspec.json.decode(payload, type=dict[str, Any])
        seq, at_ns = int(fields.pop("seq")), int(fields.pop("at_ns"))
        kind = str(fields["kind"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    try:
        event = msgspec.convert(fields, AnyEvent)
    except msgspec.ValidationError:
        event = None
    return Entry(seq=seq, at_ns=Nanos(at_ns), kind=kind, fields=fields, event=event)


def _told(fields: dict[str, Any]) -> str:
    told = (f"{name} {value}" for name, value in fields.items() if name != "kind")
    return printable(", ".join(told))


def _clock(at_ns: int) -> str:
    moment = datetime.fromtimestamp(at_ns // 10**9).strftime("%H:%M:%S")
    return f"{moment}.{at_ns // 10**6 % 1000:03d}"
