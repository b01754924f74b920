"""``evolve(house, event)``: what a fact changes. It never chooses and never fails on a fact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvalet.actors.decisions import evolve_lease as lease
from kvalet.actors.decisions import evolve_notice
from kvalet.actors.decisions import evolve_server as server
from kvalet.actors.decisions.state import House
from kvalet.protocol import events as e
from kvalet.protocol.ids import Nanos


def evolve(house: House, event: e.AnyEvent, at_ns: Nanos) -> House:
    """The house after ``event``, which happened at ``at_ns``."""
    return RULES[type(event)](house, event, at_ns)


def fold(house: House, events: Iterable[e.AnyEvent], at_ns: Nanos) -> House:
    """The house after all of ``events``."""
    for event in events:
        house = evolve(house, event, at_ns)
    return house


def _unchanged(house: House, event: e.JournalTorn | e.StreamStalled, at_ns: Nanos) -> House:
    return house


Rule = Callable[[House, Any, Nanos], House]

# Looked up, not matched: what a struct is an instance of takes longer than most rules.
RULES: dict[type[e.AnyEvent], Rule] = {
    e.HouseOpened: server.opened,
    e.JournalTorn: _unchanged,
    e.LeaseCleared: lease.cleared,
    e.LeaseEnded: lease.ended,
    e.LeaseExtended: lease.extended,
    e.LeaseGranted: lease.granted,
    e.LeaseParked: lease.parked,
    e.LeaseParking: lease.parking,
    e.LeaseQueued: lease.queued,
    e.LeaseRecomputed: lease.recomputed,
    e.LeaseRefused: lease.refused,
    e.LeaseReleased: lease.released,
    e.LeaseRestored: lease.restored,
    e.LeaseResumed: lease.resumed,
    e.LoadDropped: server.ordered,
    e.LoadOrdered: server.ordered,
    e.MethodDemoted: server.demoted,
    e.NoticeTaken: evolve_notice.noticed,
    e.ParkSeen: evolve_notice.seen,
    e.PartialMeasured: lease.partial_measured,
    e.PoolPressed: lease.pressed,
    e.PoolRead: server.pool_read,
    e.PromptMeasured: lease.measured,
    e.RequestArrived: lease.arrived,
    e.ServerExited: server.changed,
    e.ServerFellBack: server.ordered,
    e.ServerHung: server.ordered,
    e.ServerPlanned: server.changed,
    e.ServerProbed: server.changed,
    e.ServerReady: server.changed,
    e.ServerRestarted: server.ordered,
    e.ServerSpawned: server.changed,
    e.ExactJudged: server.changed,
    e.ServerWeighed: server.changed,
    e.SlotCleared: lease.slot_cleared,
    e.StreamStalled: _unchanged,
}
"""What each event changes."""
