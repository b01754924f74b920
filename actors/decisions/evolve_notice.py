"""What a server that parks by itself does to a lease, as its notices tell."""

from __future__ import annotations

from msgspec.structs import replace

from kvalet.actors.decisions.state import House
from kvalet.protocol import events as e
from kvalet.protocol.ids import Nanos, RequestId
from kvalet.protocol.notices import Notice


def noticed(house: House, event: e.NoticeTaken, at_ns: Nanos) -> House:
    """Parks and resumes are counted where the stream goes away and comes back, whatever the
    words were; a recompute belongs to a resume that was seen."""
    house = _turned(house, event.request, event.away, at_ns)
    lease, totals = house.leases[event.request], house.totals
    if event.notice != Notice.RECOMPUTED.value or lease.recomputes >= lease.resumes:
        return house
    lease = replace(lease, recomputes=lease.recomputes + 1)
    totals = replace(totals, recomputes=totals.recomputes + 1)
    return replace(house, leases={**house.leases, event.request: lease}, totals=totals)


def seen(house: House, event: e.ParkSeen, at_ns: Nanos) -> House:
    """The same for a park that only a reading of the slots tells."""
    return _turned(house, event.request, event.away, at_ns)


def _turned(house: House, request: RequestId, away: bool, at_ns: Nanos) -> House:
    old, totals = house.leases[request], house.totals
    if away == old.away:
        return house
    if old.away_since is None:
        lease = replace(old, away_since=at_ns, parks=old.parks + 1)
        totals = replace(totals, parks=totals.parks + 1)
    else:
        parked_ns = Nanos(old.parked_ns + at_ns - old.away_since)
        lease = replace(old, away_since=None, resumes=old.resumes + 1, parked_ns=parked_ns)
        totals = replace(totals, resumes=totals.resumes + 1)
    return replace(house, leases={**house.leases, request: lease}, totals=totals)
