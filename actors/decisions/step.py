"""One decision in the making: events are emitted against the state they themselves change."""

from __future__ import annotations

from kvalet.actors.decisions.evolve import evolve
from kvalet.actors.decisions.state import House
from kvalet.protocol.events import AnyEvent
from kvalet.protocol.ids import Nanos


class Step:
    """Collects the events of one command.

    ``house`` is always the fold of what was emitted so far, so that a rule later in the
    same step sees what an earlier one decided.
    """

    __slots__ = ("at_ns", "events", "house")

    def __init__(self, house: House, at_ns: Nanos) -> None:
        self.house = house
        self.at_ns = at_ns
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent) -> None:
        """Decide on ``event``."""
        self.events.append(event)
        self.house = evolve(self.house, event, self.at_ns)
