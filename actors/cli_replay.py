"""``kvalet replay``: folds a recorded journal, and decides it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from kvalet.actors.decisions.replay import AuditReport, audit, replay
from kvalet.actors.decisions.state import House
from kvalet.actors.journal import read_journal
from kvalet.protocol.journal import Decision


class Count:
    """Passes decisions on and counts them."""

    def __init__(self) -> None:
        self.decisions = 0
        self.events = 0

    def over(self, decisions: Iterable[Decision]) -> Iterator[Decision]:
        """``decisions``, counted on the way."""
        for decision in decisions:
            self.decisions += 1
            self.events += len(decision.events)
            yield decision


def fold_file(path: Path) -> dict[str, Any]:
    """The figures at the end of a journal. Raises JournalFault."""
    count = Count()
    house = replay(count.over(read_journal(path)))
    return {"decisions": count.decisions, "events": count.events, "final": figures(house)}


def figures(house: House) -> dict[str, Any]:
    """What a fold comes to, as plain values."""
    return {
        "server": house.server.state,
        "build": house.server.build,
        "model": house.server.model,
        "park_method": house.method,
        "policy": house.settings.policy,
        "cells": house.cells,
        "slots": house.slots,
        "granted": house.granted_total,
        "open": len(house.leases),
        "totals": msgspec.to_builtins(house.totals),
    }


def verify_file(path: Path) -> AuditReport:
    """Decide the whole journal again. Raises JournalFault."""
    return audit(read_journal(path))


def show_fold(console: Console, path: Path, folded: dict[str, Any]) -> None:
    """Print a fold for a person."""
    final = dict(folded["final"])
    totals: dict[str, int] = final.pop("totals")
    say(console, f"{path}: {folded['decisions']} decisions, {folded['events']} events")
    say(console, ", ".join(f"{_spoken(name)} {value}" for name, value in final.items()))
    say(console, "totals: " + ", ".join(f"{n} {_spoken(name)}" for name, n in totals.items()))


def show_audit(console: Console, path: Path, report: AuditReport) -> None:
    """Print an audit for a person, with both sides of a difference."""
    verdict = "all decided again, byte for byte" if report.identical else "not the same again"
    say(console, f"{path}: {report.decisions} decisions, {report.events} events, {verdict}")
    for name, side in (report.first_difference or {}).items():
        say(console, f"{name:>9}: {msgspec.json.encode(side).decode()}")


def say(console: Console, text: str) -> None:
    """One line that is not folded."""
    console.print(text, soft_wrap=True)


def _spoken(name: str) -> str:
    return name.replace("_", " ")
