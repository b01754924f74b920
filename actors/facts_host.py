"""How much memory this machine, or the container we run in, has for us."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from attrs import frozen

_LIMITS: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and the part of the use that the kernel gives back: cgroup v2, then v1."""


@frozen(kw_only=True)
class HostMemory:
    """Bytes of host memory: all of it, and what can be had without swapping. 0: unknown."""

    total: int
    available: int


def read_memory_available(root: Path = Path("/")) -> int | None:
    """Bytes that can be used without swapping; None where Linux does not tell."""
    listed = _meminfo(root).get("MemAvailable:")
    return None if listed is None else listed * 1024


def read_host(root: Path = Path("/")) -> HostMemory:
    """Host memory as /proc/meminfo tells it, less where a cgroup allows less. Never fails.

    ``root`` stands for / in tests.
    """
    listed = _meminfo(root)
    total = listed.get("MemTotal:", 0) * 1024
    available = listed.get("MemAvailable:", listed.get("MemFree:", 0)) * 1024
    for limit, free in _cgroup_limits(root):
        total = min(total or limit, limit)
        available = min(available, free)
    return HostMemory(total=total, available=available)


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo, in KiB."""
    return _table(_text(root / "proc/meminfo"))


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) of every group we are in: the tightest of them binds."""
    for group in _groups(root):
        for limit_name, use_name, reclaimable in _LIMITS:
            limit = _number(_text(group / limit_name))
            if limit is None:
                continue
            used = _number(_text(group / use_name)) or 0
            cached = _table(_text(group / "memory.stat")).get(reclaimable, 0)
            yield limit, max(0, limit - max(0, used - cached))


def _groups(root: Path) -> Iterator[Path]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        names = controllers.split(",")
        if controllers and "memory" not in names:
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        yield mount
        # In a container the path may be the host's: what does not exist here limits nothing.
        group = mount
        for part in Path(place.strip("/")).parts:
            if part == "..":
                break
            group /= part
            yield group


def _table(text: str) -> dict[str, int]:
    """Lines of a name and a number; a unit after it is left to the caller."""
    rows = (line.split() for line in text.splitlines())
    return {
        row[0]: int(row[1])
        for row in rows
        if len(row) >= 2 and row[1].isascii() and row[1].isdigit()
    }


def _number(text: str) -> int | None:
    """A limit in bytes; None when there is none (``max``) or the file is not there."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except (OSError, ValueError):
        return ""
