"""What must hold after every single decision, whatever the world does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvalet.actors.decisions.state import (
    HOLDING,
    PARKED,
    QUEUED,
    RUNNING,
    WAITING,
    House,
    Lease,
    recount,
)
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import RequestId


def check_house(house: House) -> None:
    """The house is in order: sums, lines, seats and the pool's limit."""
    assert recount(house) == house, "a sum is not the sum of its entries"
    assert 0 <= house.granted_total <= max(0, house.limit), "more granted than there is"
    assert house.residue_total >= 0
    assert house.saved_bytes >= 0
    held: list[int] = [slot for lease in _in(house, *HOLDING) for slot in lease.slots]
    assert len(held) == len(set(held)), "a slot has one holder"
    assert len(held) <= max(house.slots, 0) or not house.ready
    assert not set(held) & set(house.residue), "a slot with a holder has no residue of others"
    for lease in house.leases.values():
        _check_lease(lease)
    assert sorted(house.waiting) == _names(house, WAITING)
    assert sorted(house.parked) == _names(house, PARKED)
    assert sorted(house.queue) == _names(house, QUEUED)


def _check_lease(lease: Lease) -> None:
    assert lease.granted >= 0
    assert lease.generated >= 0
    assert lease.recomputes <= lease.resumes <= lease.parks
    if lease.state in HOLDING and lease.state != "closing":
        assert lease.slots
        assert lease.cells <= lease.granted
    if lease.state in (PARKED, QUEUED, "arrived"):
        assert lease.granted == 0
        assert lease.slots == ()
    if lease.state == RUNNING and lease.cap is not None:
        allowed = lease.seats * (lease.prompt + lease.cap)
        assert lease.granted <= allowed, "nobody is granted more than its own limit"


def _in(house: House, *states: str) -> list[Lease]:
    return [lease for lease in house.leases.values() if lease.state in states]


def _names(house: House, state: str) -> list[RequestId]:
    return sorted(lease.request for lease in _in(house, state))


def is_empty(house: House) -> bool:
    """Whether every figure is back at zero."""
    return (
        house.granted_total == 0
        and house.saved_bytes == 0
        and not (house.leases or house.holders or house.waiting or house.parked or house.queue)
    )


@dataclass
class Laws:
    """The counting laws, kept over all events of a journal."""

    grants: int = 0
    granted: set[RequestId] = field(default_factory=set[RequestId])
    returned: int = 0
    recomputes: int = 0
    parks: int = 0
    ends: Counter[RequestId] = field(default_factory=Counter[RequestId])
    arrivals: Counter[RequestId] = field(default_factory=Counter[RequestId])
    last_park_event: dict[RequestId, str] = field(default_factory=dict[RequestId, str])
    park_line: list[RequestId] = field(default_factory=list[RequestId])
    queue_line: list[RequestId] = field(default_factory=list[RequestId])

    def after(self, before: House, events: list[e.AnyEvent], house: House) -> None:
        """Take note of one decision and compare with the house that it led to."""
        for event in events:
            self._note(event)
        totals = house.totals
        live = sum(lease.request in self.granted for lease in house.leases.values())
        parked = len(house.parked) + sum(lease.away for lease in house.leases.values())
        assert self.grants == totals.grants == self.returned + live
        assert totals.parks == totals.resumes + parked + totals.ended_parked
        assert self.recomputes <= self.parks
        ended = totals.finished + totals.failed + totals.left + totals.refused
        assert totals.requests == ended + sum(
            lease.state != "closing" for lease in house.leases.values()
        )
        assert totals.requests >= before.totals.requests

    def _note(self, event: e.AnyEvent) -> None:
        match event:
            case e.RequestArrived():
                self.arrivals[event.request] += 1
                assert self.arrivals[event.request] == 1, "an id is used once in a journal"
            case e.LeaseQueued():
                self.queue_line.append(event.request)
            case e.LeaseGranted():
                self.grants += 1
                self.granted.add(event.request)
                self._served(self.queue_line, event.request, jump=True)
            case e.LeaseReleased():
                self.returned += event.request in self.granted
                self.granted.discard(event.request)
                assert self.ends[event.request] == 1, "given back without an end"
            case e.LeaseParked() | e.LeaseResumed():
                self._alternate(event)
            case e.LeaseRecomputed():
                self.recomputes += 1
            case e.LeaseEnded() | e.LeaseRefused():
                self.ends[event.request] += 1
                assert self.ends[event.request] == 1, "a request ends exactly once"
                for line in (self.queue_line, self.park_line):
                    if event.request in line:
                        line.remove(event.request)
            case _:
                pass

    def _alternate(self, event: e.LeaseParked | e.LeaseResumed) -> None:
        kind = "park" if isinstance(event, e.LeaseParked) else "resume"
        assert self.last_park_event.get(event.request, "resume") != kind
        self.last_park_event[event.request] = kind
        if kind == "park":
            self.parks += 1
            self.park_line.append(event.request)
        else:
            self._served(self.park_line, event.request, jump=False)

    @staticmethod
    def _served(line: list[RequestId], request: RequestId, *, jump: bool) -> None:
        if jump and request not in line:
            assert not line, "a newcomer passes the queue"
            return
        assert line[0] == request, "somebody passes the head of the line"
        line.pop(0)


def check_victims(before: House, events: list[e.AnyEvent]) -> None:
    """A victim can be parked, and somebody who makes progress is left."""
    for event in events:
        if not isinstance(event, e.PoolPressed) or event.victim is None:
            continue
        victim = before.leases[event.victim]
        assert victim.pausable
        assert victim.state in (RUNNING, WAITING)
        assert any(
            lease.request != victim.request and lease.state in (RUNNING, WAITING)
            for lease in before.leases.values()
        )


def changes_nothing(command: c.Command, events: list[e.AnyEvent]) -> None:
    """A command that comes too late leaves no trace."""
    assert events == [], f"{command} came too late and still changed {events}"
