"""The journal's only writer: append, sync, cut a torn tail, read.

An append is one ``write`` before any effect; ``fdatasync`` follows in the background, one
for all decisions of a moment (group commit). A killed kvalet loses nothing; a power cut
loses at most the last moment, whose tail is cut at the next start.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import trio

from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.state import House
from kvalet.protocol.errors import EnvironmentFault, JournalFault
from kvalet.protocol.journal import Decision, Header, Reader, encode

SYNC_INTERVAL_S = 0.05
ROTATE_BYTES = 64 * 1024 * 1024
KEEP_ROTATED = 4
READ_BYTES = 1 << 20


class Journal:
    """An open journal file. One process at a time: the file is locked while open."""

    def __init__(self, path: Path, descriptor: int, size: int, seq: int) -> None:
        self.path = path
        self.seq = seq
        self.size = size
        self.failure: str | None = None
        self._descriptor = descriptor
        self._synced = seq
        self._appended = trio.Event()
        self._failed = trio.Event()

    def append(self, decisions: list[Decision]) -> None:
        """Write ``decisions`` at the end, all or nothing.

        Raises JournalFault when the disk refuses; the journal takes nothing more then.
        """
        if self.failure is not None:
            raise JournalFault(self.failure)
        self.write(b"".join(encode(decision) for decision in decisions))
        self.seq = decisions[-1].seq
        self._appended.set()
        self._appended = trio.Event()

    def write(self, lines: bytes) -> None:
        """Write whole lines at the end, all or nothing. Raises JournalFault."""
        try:
            written = os.write(self._descriptor, lines)
            if written < len(lines):
                raise OSError(f"{written} of {len(lines)} bytes written, the disk is full")
        except OSError as error:
            self._fail(f"cannot append to {self.path}: {error}")
            raise JournalFault(f"cannot append to {self.path}: {error}") from error
        self.size += len(lines)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        # A half-written line would be in the way of whoever repairs the disk; where it
        # cannot be cut off now, the next start takes it for a torn tail.
        with suppress(OSError):
            os.ftruncate(self._descriptor, self.size)
        self._appended.set()
        self._failed.set()

    async def wait_appended(self, seq: int) -> None:
        """Return once a decision after ``seq`` is in the file."""
        while self.seq <= seq and self.failure is None:
            await self._appended.wait()

    async def wait_failed(self) -> None:
        """Return once the journal takes nothing more; ``failure`` says why."""
        await self._failed.wait()

    async def run_sync(self) -> None:
        """Sync what was appended, ``SYNC_INTERVAL_S`` after it, until cancelled or failed."""
        while self.failure is None:
            await self.wait_appended(self._synced)
            await trio.sleep(SYNC_INTERVAL_S)
            self._synced = self.seq
            try:
                await trio.to_thread.run_sync(os.fdatasync, self._descriptor)
            except OSError as error:
                self._fail(f"cannot sync {self.path}: {error}")

    def close(self) -> None:
        """Sync and close; the lock goes with it."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                if self.failure is None:
                    os.fdatasync(descriptor)
            except OSError as error:
                self.failure = f"cannot sync {self.path}: {error}"
            finally:
                os.close(descriptor)


def open_journal(path: Path, header: Header) -> tuple[Journal, House, int]:
    """The journal at ``path``, the house folded from it, and the bytes of a torn tail cut off.

    A journal that has grown too large is set aside first and a fresh one begun. Raises
    JournalFault for a corrupt line (with its position) or a full disk, and EnvironmentFault
    when another process holds the journal or the directory cannot be written.
    """
    descriptor = _open_locked(path)
    try:
        if os.fstat(descriptor).st_size > ROTATE_BYTES:
            _rotate(path)
            full, descriptor = descriptor, _open_locked(path)
            os.close(full)
        return _take_over(path, descriptor, header)
    except BaseException:
        os.close(descriptor)
        raise


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot open the journal {path}: {error}; choose another --state-dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise EnvironmentFault(
            f"{path} is in use by another kvalet; stop it or choose another --state-dir"
        ) from error
    return descriptor


def _take_over(path: Path, descriptor: int, header: Header) -> tuple[Journal, House, int]:
    reader = Reader()
    house = House()
    for decision in _read_all(descriptor, reader):
        try:
            house = fold(house, decision.events, decision.at_ns)
        except KeyError as error:
            raise JournalFault(
                f"line {reader.lines} (seq {decision.seq}) does not follow from the lines "
                f"before it: {error} is unknown"
            ) from error
    torn = len(reader.rest)
    if torn:
        os.ftruncate(descriptor, reader.offset)
    journal = Journal(path, descriptor, reader.offset, reader.seq)
    if reader.header is None:
        journal.write(encode(header))
    return journal, house, torn


def _read_all(descriptor: int, reader: Reader) -> Iterator[Decision]:
    os.lseek(descriptor, 0, os.SEEK_SET)
    while chunk := os.read(descriptor, READ_BYTES):
        yield from reader.feed(chunk)


def _rotate(path: Path) -> None:
    for number in range(KEEP_ROTATED, 0, -1):
        older = path.with_suffix(f".{number}.jsonl")
        newer = path.with_suffix(f".{number - 1}.jsonl") if number > 1 else path
        if newer.exists():
            newer.replace(older)


def read_journal(
    path: Path, on_header: Callable[[Header], None] | None = None
) -> Iterator[Decision]:
    """All decisions of a journal, without writing to it; a torn tail is left out.

    Raises JournalFault when the file is missing, corrupt or no journal.
    """
    reader = Reader()
    try:
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                yield from reader.feed(chunk)
    except OSError as error:
        raise JournalFault(f"cannot read the journal {path}: {error}") from error
    if reader.header is None:
        raise JournalFault(f"{path} holds no journal header")
    if on_header is not None:
        on_header(reader.header)
