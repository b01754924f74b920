"""One child process that never outlives us, and the private directory it works in."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

import trio

from kvalet.protocol.errors import EnvironmentFault

LINES_KEPT: Final = 500
LOG_BYTES_MAX: Final = 8 * 2**20
_LINE_BYTES_MAX: Final = 8192
_PR_SET_PDEATHSIG: Final = 1
# After SIGKILL only a process stuck in the kernel is still there.
_REAP_S: Final = 5.0
# A grandchild may hold the pipe open after the child is gone.
_LAST_WORDS_S: Final = 0.5

# Loaded here because nothing may be imported between fork and exec.
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@final
class Child:
    """A running process in a process group of its own. Made by :func:`spawn_child`.

    ``lines`` holds the last lines it wrote; ``returncode`` is None while it runs, and
    negative for a signal afterwards.
    """

    def __init__(self, process: subprocess.Popen[bytes], output_fd: int, log: Log) -> None:
        self.pid: Final = process.pid
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.returncode: int | None = None
        self._process = process
        self._output_fd = output_fd
        self._log = log
        self._ended = trio.Event()

    async def wait(self) -> int:
        """Wait until the child is gone and all its lines are read; its status."""
        await self._ended.wait()
        assert self.returncode is not None, "an ended child has a status"
        return self.returncode

    async def attend(self, grace_s: float = 3.0) -> int:
        """Keep the child's log and wait for its end; its status.

        Call it exactly once, right after the spawn. Cancelled, it stops the child first:
        at most twice ``grace_s`` and five seconds later the child is gone.
        """
        reading = trio.CancelScope(shield=True)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_output, reading)
                try:
                    await self._wait_exit()
                finally:
                    await self._stop(grace_s)
                    reading.deadline = trio.current_time() + _LAST_WORDS_S
        finally:
            self._ended.set()
        return await self.wait()

    async def _stop(self, grace_s: float) -> None:
        """SIGTERM, once more after ``grace_s``, then SIGKILL; reap. Shielded and bounded."""
        # The second SIGTERM ends a server that still waits for its streams.
        with trio.CancelScope(shield=True):
            for sent, patience_s in (
                (signal.SIGTERM, grace_s),
                (signal.SIGTERM, grace_s),
                (signal.SIGKILL, _REAP_S),
            ):
                if self.returncode is not None:
                    return
                self._signal_group(sent)
                with trio.move_on_after(patience_s):
                    await self._wait_exit()
        if self.returncode is None:
            self.returncode = -signal.SIGKILL

    async def _wait_exit(self) -> None:
        if self.returncode is not None:
            return
        watched = os.pidfd_open(self.pid)
        try:
            await trio.lowlevel.wait_readable(watched)
        finally:
            os.close(watched)
        # Not reaped yet, so the group's number is still ours: whatever it left behind goes too.
        self._signal_group(signal.SIGKILL)
        self.returncode = self._process.wait()

    def _signal_group(self, sent: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, sent)

    async def _read_output(self, reading: trio.CancelScope) -> None:
        carried = b""
        async with trio.lowlevel.FdStream(self._output_fd) as stream:
            with self._log as log, reading:
                async for chunk in stream:
                    log.write(bytes(chunk))
                    *whole, carried = (carried + bytes(chunk)).split(b"\n")
                    if len(carried) > _LINE_BYTES_MAX:
                        whole, carried = [*whole, carried], b""
                    self.lines.extend(line.decode(errors="replace") for line in whole)
        if carried:
            self.lines.append(carried.decode(errors="replace"))


def spawn_child(argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> Child:
    """Start a process that dies with us, even when we are killed with -9.

    What it writes is read by :meth:`Child.attend` and appended to ``log_path``. Not async
    on purpose: the death signal follows the thread that forks, so that must be the one that
    runs trio. Raises EnvironmentFault when the log or the program cannot be opened.
    """
    try:
        log = Log(log_path)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {log_path}: {error.strerror}") from error
    output_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=write_fd,
            stderr=write_fd,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )
    except OSError as error:
        os.close(output_fd)
        log.close()
        raise EnvironmentFault(f"cannot start {argv[0]}: {error.strerror}") from error
    finally:
        os.close(write_fd)
    return Child(process, output_fd, log)


def _die_with(parent: int) -> Callable[[], None]:
    def ask_for_the_same_end() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # The parent may have died before the line above took effect.
        if os.getppid() != parent:
            os._exit(1)

    return ask_for_the_same_end


@final
class Log:
    """An append-only file that is moved to ``<name>.1`` when it outgrows ``bytes_max``.

    A full disk loses log lines, never the process that writes them.
    """

    def __init__(self, path: Path, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be written afterwards."""
        os.close(self._fd)

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``, in a new file when the present one is full."""
        with suppress(OSError):
            if self._size and self._size + len(chunk) > self._bytes_max:
                self._rotate()
            self._size += os.write(self._fd, chunk)

    def _rotate(self) -> None:
        os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        fresh = self._open()
        os.close(self._fd)
        self._fd = fresh
        self._size = 0

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def memory_root() -> Path:
    """Where parked chats are kept: in memory if possible, else among temporary files."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK):
        return shared
    return Path(tempfile.gettempdir())


@contextmanager
def slot_directory(root: Path | None = None) -> Generator[Path]:
    """A private directory for one server's files, removed at the end.

    Directories of this user whose owner died without cleaning up are removed first.
    """
    root = memory_root() if root is None else root
    sweep_slot_directories(root)
    path = Path(tempfile.mkdtemp(prefix=f"kvalet-{os.getuid()}-{os.getpid()}-", dir=root))
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The lock tells other containers that share this root, where our pid means nothing.
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def sweep_slot_directories(root: Path) -> list[Path]:
    """Remove this user's slot directories whose process is gone; returns them."""
    name = re.compile(rf"kvalet-{os.getuid()}-(\d+)-\w+")
    removed: list[Path] = []
    for entry in os.scandir(root):
        match = name.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False) and not _is_alive(int(match[1])):
            path = Path(entry.path)
            if path.stat().st_uid == os.getuid() and _is_unlocked(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_unlocked(path: Path) -> bool:
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(held)
    return True
