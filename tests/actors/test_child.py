"""A child process: its log, its end, and that it never outlives us."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from kvalet.actors.child import (
    Child,
    Log,
    memory_root,
    slot_directory,
    spawn_child,
    sweep_slot_directories,
)
from kvalet.protocol.errors import EnvironmentFault
from tests.processes import is_there, wait_gone


def shell(script: str, log_path: Path) -> Child:
    return spawn_child(["/bin/sh", "-c", script], os.environ, log_path)


def fifo(folder: Path) -> Path:
    path = folder / "up"
    os.mkfifo(path)
    return path


async def wait_up(path: Path) -> None:
    """Wait until the script has written to the fifo."""
    with trio.fail_after(10):
        assert await trio.to_thread.run_sync(path.read_text) == "up\n"


async def test_a_child_ends_with_its_status_and_its_last_words(tmp_path: Path) -> None:
    child = shell("echo one; echo two >&2; printf three; exit 7", tmp_path / "log")

    assert await child.attend() == 7
    assert await child.wait() == 7
    assert list(child.lines) == ["one", "two", "three"]
    assert (tmp_path / "log").read_text() == "one\ntwo\nthree"


async def test_a_child_killed_by_a_signal_has_a_negative_status(tmp_path: Path) -> None:
    assert await shell("kill -ILL $$", tmp_path / "log").attend() == -4


async def test_only_the_last_lines_are_kept_in_memory(tmp_path: Path) -> None:
    child = shell("seq 2000", tmp_path / "log")
    await child.attend()

    assert child.lines[0] == "1501"
    assert child.lines[-1] == "2000"
    assert (tmp_path / "log").read_text().startswith("1\n2\n")


async def test_a_program_that_is_not_there_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="/nonexistent/program"):
        spawn_child(["/nonexistent/program"], {}, tmp_path / "log")


async def test_a_log_that_cannot_be_written_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(EnvironmentFault, match="cannot write"):
        spawn_child(["/bin/true"], {}, tmp_path / "file" / "log")


async def test_a_cancelled_child_is_told_to_stop_and_reaped(tmp_path: Path) -> None:
    up = fifo(tmp_path)
    polite = f"trap 'echo bye; exit 0' TERM; echo up >{up}; while :; do sleep 0.05; done"
    child = shell(polite, tmp_path / "log")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.attend)
        await wait_up(up)
        nursery.cancel_scope.cancel()

    assert child.returncode == 0
    assert child.lines[-1] == "bye"
    assert not is_there(child.pid)


async def test_a_child_that_ignores_both_requests_is_killed(tmp_path: Path) -> None:
    up = fifo(tmp_path)
    stubborn = f"trap 'echo no' TERM; echo up >{up}; while :; do sleep 0.05; done"
    child = shell(stubborn, tmp_path / "log")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.attend, 0.2)
        await wait_up(up)
        nursery.cancel_scope.cancel()

    assert child.returncode == -9
    assert list(child.lines).count("no") == 2
    assert not is_there(child.pid)


async def test_what_a_child_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    child = shell("sleep 600 & echo $!; exit 0", tmp_path / "log")

    assert await child.attend() == 0
    await wait_gone(int(child.lines[0]))


PARENT = """
import os, sys, trio
from pathlib import Path
from kvalet.actors.child import spawn_child

async def main():
    child = spawn_child(["/bin/sleep", "600"], os.environ, Path(sys.argv[1]))
    sys.stdout.write(f"{child.pid}\\n")
    sys.stdout.flush()
    await child.attend()

trio.run(main)
"""


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_there(pid)
        parent.kill()

    trio.run(wait_gone, pid)


def test_a_full_log_is_moved_aside_once(tmp_path: Path) -> None:
    with Log(tmp_path / "log", bytes_max=10) as log:
        for chunk in (b"aaaaaa", b"bbbbbb", b"cccccc"):
            log.write(chunk)

    assert (tmp_path / "log").read_bytes() == b"cccccc"
    assert (tmp_path / "log.1").read_bytes() == b"bbbbbb"
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    for _ in range(2):
        with Log(tmp_path / "log", bytes_max=10) as log:
            log.write(b"aaaaaa")

    assert (tmp_path / "log.1").exists()


def test_a_slot_directory_is_private_and_removed(tmp_path: Path) -> None:
    with slot_directory(tmp_path) as path:
        assert path.name.startswith(f"kvalet-{os.getuid()}-{os.getpid()}-")
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "slots").mkdir()
        (path / "slots" / "r1").write_bytes(b"x")
        assert sweep_slot_directories(tmp_path) == []

    assert list(tmp_path.iterdir()) == []


def test_directories_of_dead_processes_are_swept_and_no_others(tmp_path: Path) -> None:
    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    stale = tmp_path / f"kvalet-{os.getuid()}-{dead.pid}-abc"
    foreign = tmp_path / f"kvalet-{os.getuid() + 1}-{dead.pid}-abc"
    living = tmp_path / f"kvalet-{os.getuid()}-{os.getppid()}-abc"
    for path in (stale, foreign, living, tmp_path / "other"):
        path.mkdir()

    assert sweep_slot_directories(tmp_path) == [stale]
    assert sorted(tmp_path.iterdir()) == sorted([foreign, living, tmp_path / "other"])


def test_parked_chats_are_kept_where_we_can_write() -> None:
    assert os.access(memory_root(), os.W_OK)
