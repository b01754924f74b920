"""Replay folds events; audit decides again from the recorded commands and compares bytes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.state import House
from kvalet.protocol.journal import Decision, encode_events


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found. ``first_difference`` holds both sides as they would be stored."""

    decisions: int
    events: int
    identical: bool
    first_difference: dict[str, object] | None = None


def replay(decisions: Iterable[Decision]) -> House:
    """The house after all recorded events. Performs no effect."""
    house = House()
    for decision in decisions:
        house = fold(house, decision.events, decision.at_ns)
    return house


def audit(decisions: Iterable[Decision]) -> AuditReport:
    """Decide every recorded command again; stop at the first decision whose bytes differ."""
    house = House()
    count = events = 0
    for decision in decisions:
        again, house = take(house, decision.command, decision.at_ns)
        count += 1
        events += len(decision.events)
        if encode_events(again) != encode_events(decision.events):
            difference: dict[str, object] = {
                "seq": decision.seq,
                "command": msgspec.to_builtins(decision.command),
                "recorded": msgspec.to_builtins(decision.events),
                "decided": msgspec.to_builtins(again),
            }
            return AuditReport(
                decisions=count, events=events, identical=False, first_difference=difference
            )
    return AuditReport(decisions=count, events=events, identical=True)
