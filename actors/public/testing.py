"""For a host's own tests: load a recorded journal, fold it, decide it again, look inside.

    def test_nobody_was_starved() -> None:
        recording = kvalet.testing.load_journal("incident.jsonl")
        assert recording.fold().totals.failed == 0
        for event in recording.events("lease.parked"):
            ...

Nothing here needs a server, a pool or an event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import final, get_args

import attrs
import msgspec

from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.replay import AuditReport, audit
from kvalet.actors.decisions.state import House
from kvalet.actors.journal import read_journal
from kvalet.protocol.events import AnyEvent
from kvalet.protocol.journal import Decision, Header

__all__ = ["AuditReport", "House", "Recording", "assert_replays", "load_journal"]

KINDS = frozenset(str(event.__struct_config__.tag) for event in get_args(AnyEvent))
"""Every kind of event, by its name on disk."""

SUBJECTS = ("request", "asker", "victim")


@final
@attrs.frozen
class Recording:
    """A journal in memory: its header, and its decisions in order (``seq`` counts from 1)."""

    path: Path
    header: Header
    decisions: tuple[Decision, ...]

    def fold(self) -> House:
        """The state after the last decision. Performs no effect."""
        return self.house_at(len(self.decisions))

    def house_at(self, seq: int) -> House:
        """The state after decision ``seq``; 0 is the state before the first one.

        Raises IndexError for a number that the journal does not have.
        """
        if not 0 <= seq <= len(self.decisions):
            raise IndexError(f"{self.path} has decisions 1 to {len(self.decisions)}, not {seq}")
        house = House()
        for decision in self.decisions[:seq]:
            house = fold(house, decision.events, decision.at_ns)
        return house

    def steps(self) -> Iterator[tuple[Decision, House]]:
        """Each decision with the state after it, for what must hold all the time.

        for decision, house in recording.steps():
            assert house.granted_total <= house.limit, decision
        """
        house = House()
        for decision in self.decisions:
            house = fold(house, decision.events, decision.at_ns)
            yield decision, house

    def audit(self) -> AuditReport:
        """Decide every recorded command again and compare the outcome, byte by byte."""
        return audit(self.decisions)

    def events(self, kind: str | None = None, request: str | None = None) -> list[AnyEvent]:
        """The events in order: all, those of a ``kind`` (``lease.parked``), of a ``request``.

        A press counts for the request that asked and for its victim. Raises ValueError for a
        kind that does not exist, lest a test look for nothing and find it.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"no event is called {kind!r}; there are {', '.join(sorted(KINDS))}")
        return [
            event
            for decision in self.decisions
            for event in decision.events
            if kind in (None, event.__struct_config__.tag)
            and (request is None or request in subjects(event))
        ]


def subjects(event: AnyEvent) -> list[str]:
    """The requests that an event is about."""
    return [getattr(event, name) for name in SUBJECTS if getattr(event, name, None) is not None]


def load_journal(path: str | PathLike[str]) -> Recording:
    """Read a journal. A torn last line is left out: its decision never took effect.

    Raises JournalFault when the file is missing or corrupt, and says where.
    """
    headers: list[Header] = []
    decisions = tuple(read_journal(Path(path), headers.append))
    return Recording(Path(path), headers[0], decisions)


def assert_replays(path: str | PathLike[str]) -> Recording:
    """The recording, having checked that today's rules decide all of it as it was decided.

    Raises AssertionError with both sides of the first difference.
    """
    recording = load_journal(path)
    report = recording.audit()
    if not report.identical:
        difference = report.first_difference or {}
        shown = "\n".join(
            f"{name}: {msgspec.json.encode(side).decode()}" for name, side in difference.items()
        )
        raise AssertionError(f"{recording.path} is decided differently today\n{shown}")
    return recording
