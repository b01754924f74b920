"""One decision in the making: events are emitted against the state they themselves change."""

from __future__ import annotations

from kvalet.actors.decisions.evolve import RULES
from kvalet.actors.decisions.state import House
from kvalet.protocol import events as e
from kvalet.protocol.events import AnyEvent
from kvalet.protocol.ids import Nanos

FREEING = frozenset(
    {
        e.LeaseCleared,
        e.LeaseParked,
        e.LeaseParking,
        e.LeaseRefused,
        e.LeaseReleased,
        e.PartialMeasured,
        e.ServerProbed,
        e.SlotCleared,
    }
)
"""Events after which cells, a slot or the head of a line may be free. The end of a lease
frees them later, when its slots are seen idle, unless it stood in a line or was erasing."""


class Step:
    """Collects the events of one command.

    ``house`` is always the fold of what was emitted so far, so that a rule later in the
    same step sees what an earlier one decided. ``freed``: something happened that could
    let the head of a line go on; most commands change nothing of the kind, and trying the
    heads again would cost more than they do.
    """

    __slots__ = ("at_ns", "events", "freed", "house")

    def __init__(self, house: House, at_ns: Nanos) -> None:
        self.house = house
        self.at_ns = at_ns
        self.events: list[AnyEvent] = []
        self.freed = False

    def emit(self, event: AnyEvent) -> None:
        """Decide on ``event``."""
        kind = type(event)
        self.events.append(event)
        if kind in FREEING:
            self.freed = True
        self.house = RULES[kind](self.house, event, self.at_ns)
