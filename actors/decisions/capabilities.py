"""What one llama-server binary can do, read from its own ``--help``."""

from __future__ import annotations

import re

from attrs import frozen

# The description starts after two blanks, but "-kvu,  --kv-unified" has two after a comma.
_DESCRIPTION = re.compile(r"(?<![,\s])\s{2,}")
_LONG_FLAG = re.compile(r"(?<![\w-])--[a-z0-9][\w-]*")
# The row runs on until the next flag.
_PREEMPT_ROW = re.compile(r"^--preempt-ram(?:(?!\n-)[\s\S])*?\bdefault:\s+(-?\d+)", re.MULTILINE)
_RELEASE = re.compile(r"\bversion: (\d+) |\(build (\d+)[,)]")
# A checkout without history counts its commits from 1; real releases passed this long ago.
_RELEASE_MIN = 1000


@frozen(kw_only=True)
class Capabilities:
    """The long flags and the speculative types that a binary knows.

    ``preempt_default`` is the budget in MiB that a server without ``--preempt-ram`` parks with; 0:
    it parks nothing. ``version`` is the binary's own version line, ``build`` its release as
    ``b10434`` or an empty string when the binary does not tell. An empty record knows no flag.
    """

    flags: frozenset[str] = frozenset()
    spec_types: frozenset[str] = frozenset()
    version: str = ""
    build: str = ""
    preempt_default: int = 0

    @property
    def preempt_ram(self) -> bool:
        """The server can park chats by itself."""
        return "--preempt-ram" in self.flags

    @property
    def kv_unified(self) -> bool:
        """All slots can share one pool of cells."""
        return "--kv-unified" in self.flags

    @property
    def kv_unified_per_slot(self) -> bool:
        """A slot of a shared pool can be given a limit of its own."""
        return "--kv-unified-per-slot" in self.flags

    @property
    def swa_full(self) -> bool:
        """Sliding-window layers can keep all their cells, so that a saved slot is reusable."""
        return "--swa-full" in self.flags

    @property
    def slot_save_path(self) -> bool:
        """Slots can be saved, restored and erased over HTTP."""
        return "--slot-save-path" in self.flags

    @property
    def cache_ram(self) -> bool:
        """The server keeps a store of idle prompts that can be switched off."""
        return "--cache-ram" in self.flags

    @property
    def metrics(self) -> bool:
        """The server can answer ``/metrics``."""
        return "--metrics" in self.flags


def parse_help(text: str, version: str = "") -> Capabilities:
    """Read the output of ``--help``, and of ``--version`` when given. Never fails."""
    flags: set[str] = set()
    spec_types: frozenset[str] = frozenset()
    for line in text.splitlines():
        if not line.startswith("-"):
            continue
        head = _DESCRIPTION.split(line, maxsplit=1)[0]
        flags.update(_LONG_FLAG.findall(head))
        if head.startswith("--spec-type "):
            spec_types = _choices(head.removeprefix("--spec-type "))
    return Capabilities(
        flags=frozenset(flags),
        spec_types=spec_types,
        version=_version_line(version),
        build=release_of(version),
        preempt_default=_preempt_default(text),
    )


def _preempt_default(text: str) -> int:
    row = _PREEMPT_ROW.search(text)
    return int(row[1]) if row else 0


def release_of(version: str) -> str:
    """The release in a version text as ``b10434``; empty when it names none."""
    for match in _RELEASE.finditer(version):
        number = int(match[1] or match[2])
        if number >= _RELEASE_MIN:
            return f"b{number}"
    return ""


def _choices(value: str) -> frozenset[str]:
    names = re.split(r"[,|]", value.strip(" []{}<>"))
    return frozenset(name.strip() for name in names if name.strip())


def _version_line(version: str) -> str:
    for line in version.splitlines():
        if line.startswith("version: "):
            return line.removeprefix("version: ").strip()
    return ""


def understood(added: tuple[str, ...], capabilities: Capabilities) -> tuple[str, ...]:
    """The plan's arguments in words that this build knows: an old one fits nothing by itself."""
    if "--fit" in capabilities.flags or "-fit" not in added:
        return added
    at = added.index("-fit")
    return tuple("999" if word == "all" else word for word in (*added[:at], *added[at + 2 :]))
