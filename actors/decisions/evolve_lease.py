"""A lease's part of ``evolve``: what each event in a request's life changes."""

from __future__ import annotations

from typing import Any

import msgspec

from kvalet.actors.decisions.state import (
    ARRIVED,
    CLOSING,
    HOLDING,
    PARKED,
    PARKING,
    QUEUED,
    RUNNING,
    WAITING,
    House,
    Lease,
    Residue,
    Totals,
    coming_of,
)
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, RequestId, SlotId

replace = msgspec.structs.replace

CRASH = "crash"
"""The cause of a park whose cells went with their server; ``RELOAD``: it was ended for another."""

RELOAD = "reload"


def _put(house: House, lease: Lease, **changes: Any) -> House:
    request = lease.request
    # A copy is three times as fast as {**leases, request: lease}.
    leases = house.leases.copy()
    old = leases.get(request)
    leases[request] = lease
    before, came = (old.state, coming_of(old)) if old is not None else ("", 0)
    if before != lease.state:
        changes["runners"] = house.runners + (lease.state == RUNNING) - (before == RUNNING)
    comes = coming_of(lease)
    if comes != came:
        changes["coming"] = Cells(house.coming + comes - came)
    return replace(house, leases=leases, **changes)


def _set(house: House, lease: Lease, **changes: Any) -> House:
    return _put(house, replace(lease, **changes))


def measured(house: House, event: e.PromptMeasured, at_ns: Nanos) -> House:
    """The prompt's cells are known."""
    lease = house.leases[event.request]
    return _set(house, lease, prompt=event.prompt, affinity=event.affinity)


def refused(house: House, event: e.LeaseRefused, at_ns: Nanos) -> House:
    """The request is gone."""
    leases = house.leases.copy()
    del leases[event.request]
    totals = replace(house.totals, refused=house.totals.refused + 1)
    queue = _without(house.queue, event.request)
    return replace(house, leases=leases, queue=queue, totals=totals)


def partial_measured(house: House, event: e.PartialMeasured, at_ns: Nanos) -> House:
    """What a stranded chat goes on from is known."""
    cells, generated = event.cells, event.generated
    lease = house.leases[event.request]
    return _set(house, lease, cells=cells, generated=generated, stranded=False)


def cleared(house: House, event: e.LeaseCleared, at_ns: Nanos) -> House:
    """It is not suspected of its server's end any more."""
    return _set(house, house.leases[event.request], crashes=0)


def recomputed(house: House, event: e.LeaseRecomputed, at_ns: Nanos) -> House:
    """A resume had to compute what it should have had."""
    lease, totals = house.leases[event.request], house.totals
    return _put(
        house,
        replace(lease, recomputes=lease.recomputes + 1),
        misses=house.misses + int(event.miss),
        totals=replace(totals, recomputes=totals.recomputes + 1),
    )


def restored(house: House, event: e.LeaseRestored, at_ns: Nanos) -> House:
    """A resume had all that it should have."""
    return replace(house, misses=0) if house.misses else house


def slot_cleared(house: House, event: e.SlotCleared, at_ns: Nanos) -> House:
    """An idle slot holds nothing any more."""
    return _cleared(house, (event.slot,))


def _without(names: tuple[RequestId, ...], request: RequestId) -> tuple[RequestId, ...]:
    if not names or request not in names:
        return names
    if names[0] == request:
        return names[1:]
    return tuple(name for name in names if name != request)


def arrived(house: House, event: e.RequestArrived, at_ns: Nanos) -> House:
    """A request is there; nothing is known of its prompt."""
    order = house.order + 1
    lease = Lease(
        request=event.request,
        surface=event.surface,
        state=ARRIVED,
        arrived_ns=at_ns,
        since_ns=at_ns,
        order=order,
        cap=event.cap,
        pausable=event.pausable,
        seats=event.seats,
        park_every=event.park_every,
    )
    totals = replace(house.totals, requests=house.totals.requests + 1)
    return _put(house, lease, order=order, totals=totals)


def queued(house: House, event: e.LeaseQueued, at_ns: Nanos) -> House:
    """The last in the queue."""
    lease = house.leases[event.request]
    return _put(
        house,
        replace(lease, state=QUEUED, since_ns=at_ns),
        queue=(*house.queue, event.request),
    )


def _take(house: House, request: RequestId, slots: tuple[SlotId, ...]) -> dict[SlotId, RequestId]:
    taken = house.holders.copy()
    for slot in slots:
        taken[slot] = request
    return taken


def granted(house: House, event: e.LeaseGranted, at_ns: Nanos) -> House:
    """Slots and cells are its own; what lay in the slots is not counted any more."""
    old = house.leases[event.request]
    house = _cleared(house, event.slots)
    lease = replace(
        old,
        state=RUNNING,
        since_ns=at_ns,
        waited_ns=Nanos(old.waited_ns + at_ns - old.since_ns),
        lease=event.lease,
        slots=event.slots,
        granted=event.granted,
        cells=Cells(old.seats * old.prompt),
    )
    totals = house.totals
    return _put(
        house,
        lease,
        totals=replace(totals, grants=totals.grants + 1),
        erasing=_erase(house, event.request, event.erase),
        queue=_without(house.queue, event.request),
        holders=_take(house, event.request, event.slots),
        granted_total=Cells(house.granted_total + event.granted),
        last_lease=max(house.last_lease, event.lease),
        feasible=event.feasible,
    )


def extended(house: House, event: e.LeaseExtended, at_ns: Nanos) -> House:
    """More cells, at the end of a leg."""
    old = house.leases[event.request]
    lease = replace(
        old,
        state=RUNNING,
        since_ns=at_ns,
        granted=event.granted,
        cells=event.cells,
        generated=event.generated,
        ordered=False,
        need=Cells(0),
    )
    total = Cells(house.granted_total + event.granted - old.granted)
    if event.erase:
        house = replace(house, erasing=_erase(house, event.request, event.erase))
    if old.ordered:
        waiting = _without(house.waiting, event.request)
        return _put(house, lease, granted_total=total, waiting=waiting)
    leases = house.leases.copy()
    leases[event.request] = lease
    if old.state == RUNNING:
        return replace(house, leases=leases, granted_total=total)
    return replace(
        house,
        leases=leases,
        granted_total=total,
        runners=house.runners + 1,
        waiting=_without(house.waiting, event.request),
    )


def _erase(house: House, request: RequestId, slots: tuple[SlotId, ...]) -> dict[SlotId, RequestId]:
    return {**house.erasing, **dict.fromkeys(slots, request)} if slots else house.erasing


def _forget_eraser(erasing: dict[SlotId, RequestId], request: RequestId) -> dict[SlotId, RequestId]:
    if request not in erasing.values():
        return erasing
    return {slot: who for slot, who in erasing.items() if who != request}


def pressed(house: House, event: e.PoolPressed, at_ns: Nanos) -> House:
    """The asker waits; the victim parks at the end of its leg."""
    asker = house.leases[event.asker]
    if asker.state == RUNNING:
        leases = house.leases.copy()
        leases[event.asker] = replace(
            asker,
            state=WAITING,
            since_ns=at_ns,
            cells=event.cells,
            generated=event.generated,
            need=event.short,
        )
        waiting = (*house.waiting, event.asker)
        house = replace(house, leases=leases, waiting=waiting, runners=house.runners - 1)
    if event.victim is not None:
        house = _set(house, house.leases[event.victim], ordered=True)
    return house


def parking(house: House, event: e.LeaseParking, at_ns: Nanos) -> House:
    """On its way out: slot and cells are its own until they are empty."""
    old = house.leases[event.request]
    lease = replace(
        old,
        state=PARKING,
        since_ns=at_ns,
        cells=event.cells,
        generated=event.generated,
        ordered=False,
    )
    waiting = _without(house.waiting, event.request)
    return _put(house, lease, waiting=waiting, feasible=False)


def _leave_slots(house: House, lease: Lease) -> dict[SlotId, RequestId]:
    left = house.holders.copy()
    for slot in lease.slots:
        left.pop(slot, None)
    return left


def parked(house: House, event: e.LeaseParked, at_ns: Nanos) -> House:
    """Slot and cells are given back. One that its server held parked stays so, by our hand."""
    old = house.leases[event.request]
    again = int(not old.away)
    lease = replace(
        old,
        state=PARKED,
        since_ns=at_ns if old.away_since is None else old.away_since,
        slots=(),
        granted=Cells(0),
        method=event.method,
        saved_bytes=event.saved_bytes,
        parks=old.parks + again,
        ordered=False,
        need=Cells(0),
        away_since=None,
        stranded=bool(event.cause),
        crashes=old.crashes + (event.cause == CRASH),
    )
    totals = house.totals
    return _put(
        house,
        lease,
        totals=replace(totals, parks=totals.parks + again),
        waiting=_without(house.waiting, event.request),
        parked=(*house.parked, event.request),
        holders=_leave_slots(house, old),
        granted_total=Cells(house.granted_total - old.granted),
        saved_bytes=house.saved_bytes + event.saved_bytes,
    )


def resumed(house: House, event: e.LeaseResumed, at_ns: Nanos) -> House:
    """A slot and cells again."""
    old = house.leases[event.request]
    house = _cleared(house, event.slots)
    lease = replace(
        old,
        state=RUNNING,
        since_ns=at_ns,
        slots=event.slots,
        granted=event.granted,
        saved_bytes=0,
        resumes=old.resumes + 1,
        parked_ns=Nanos(old.parked_ns + at_ns - old.since_ns),
    )
    totals = house.totals
    return _put(
        house,
        lease,
        totals=replace(totals, resumes=totals.resumes + 1),
        erasing=_erase(house, event.request, event.erase),
        parked=_without(house.parked, event.request),
        holders=_take(house, event.request, event.slots),
        granted_total=Cells(house.granted_total + event.granted),
        saved_bytes=house.saved_bytes - old.saved_bytes,
    )


def ended(house: House, event: e.LeaseEnded, at_ns: Nanos) -> House:
    """The answer is over; what it held is given back when it is seen idle."""
    old = house.leases[event.request]
    was_parked = old.state == PARKED
    gone_ns = old.gone_since
    lease = replace(
        old,
        state=CLOSING,
        since_ns=at_ns,
        cells=event.cells,
        generated=event.generated,
        granted=old.granted if old.state in HOLDING else Cells(0),
        saved_bytes=0,
        ordered=False,
        end_reason=event.reason,
        need=Cells(0),
        away_since=None,
        parked_ns=Nanos(old.parked_ns + (0 if gone_ns is None else at_ns - gone_ns)),
    )
    return _put(
        house,
        lease,
        totals=_ended_totals(house.totals, event.reason, gone_ns is not None),
        waiting=_without(house.waiting, event.request),
        parked=_without(house.parked, event.request),
        queue=_without(house.queue, event.request),
        # Whoever is gone erases nothing any more; the slot may be taken as it is.
        erasing=_forget_eraser(house.erasing, event.request),
        saved_bytes=house.saved_bytes - (old.saved_bytes if was_parked else 0),
    )


FINISHED_REASONS = frozenset({"stop", "length", "context-full", "tool_calls", "finished"})


def _ended_totals(totals: Totals, reason: str, was_parked: bool) -> Totals:
    parked = totals.ended_parked + was_parked
    if reason in FINISHED_REASONS:
        return replace(totals, finished=totals.finished + 1, ended_parked=parked)
    if reason == "left":
        return replace(totals, left=totals.left + 1, ended_parked=parked)
    if reason == "refused":
        return replace(totals, refused=totals.refused + 1, ended_parked=parked)
    return replace(totals, failed=totals.failed + 1, ended_parked=parked)


def released(house: House, event: e.LeaseReleased, at_ns: Nanos) -> House:
    """Nothing of the request is left but the residue in its slot."""
    lease = house.leases[event.request]
    leases = house.leases.copy()
    del leases[event.request]
    if not lease.slots:
        return replace(house, leases=leases)
    house = replace(
        house,
        leases=leases,
        holders=_leave_slots(house, lease),
        granted_total=Cells(house.granted_total - lease.granted),
        coming=Cells(house.coming - coming_of(lease)),
    )
    if not event.residue:
        return house
    order = house.order + 1
    left = Residue(cells=event.residue, order=order)
    return replace(
        house,
        order=order,
        residue={**house.residue, lease.slots[0]: left},
        residue_total=Cells(house.residue_total + event.residue),
    )


def _cleared(house: House, slots: tuple[SlotId, ...]) -> House:
    gone = [slot for slot in slots if slot in house.residue]
    if not gone:
        return house
    residue = dict(house.residue)
    freed = sum(residue.pop(slot).cells for slot in gone)
    return replace(
        house,
        residue=residue,
        residue_total=Cells(house.residue_total - freed),
        erasing={slot: who for slot, who in house.erasing.items() if slot not in gone},
    )
