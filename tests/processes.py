"""Processes of other people, watched until they are gone."""

from __future__ import annotations

import os
from pathlib import Path

import trio


def is_there(pid: int) -> bool:
    """Whether a process of this number exists, a zombie included."""
    return Path(f"/proc/{pid}").exists()


async def wait_gone(pid: int) -> None:
    """Until the process has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(watched)
    finally:
        os.close(watched)
