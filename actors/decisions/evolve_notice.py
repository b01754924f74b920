"""What a server that parks by itself does to a lease, as its notices tell."""

from __future__ import annotations

from msgspec.structs import replace

from kvalet.actors.decisions.state import House
from kvalet.protocol import events as e
from kvalet.protocol.ids import Nanos
from kvalet.protocol.notices import Notice


def noticed(house: House, event: e.NoticeTaken, at_ns: Nanos) -> House:
    """Parks and resumes are counted where the stream goes away and comes back, whatever the
    words were; a recompute belongs to a resume that was seen."""
    old, totals = house.leases[event.request], house.totals
    lease = old
    if event.away and not old.away:
        lease = replace(old, away_since=at_ns, parks=old.parks + 1)
        totals = replace(totals, parks=totals.parks + 1)
    elif old.away_since is not None and not event.away:
        lease = replace(
            old,
            away_since=None,
            resumes=old.resumes + 1,
            parked_ns=Nanos(old.parked_ns + at_ns - old.away_since),
        )
        totals = replace(totals, resumes=totals.resumes + 1)
    if event.notice == Notice.RECOMPUTED.value and lease.recomputes < lease.resumes:
        lease = replace(lease, recomputes=lease.recomputes + 1)
        totals = replace(totals, recomputes=totals.recomputes + 1)
    if lease is old:
        return house
    return replace(house, leases={**house.leases, event.request: lease}, totals=totals)
