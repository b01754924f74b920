"""Admission: who gets cells, in which order, and how many.

Freed cells go first to those who stand at the end of their credit (their slots are held
already), then to parked chats by the time of their park, then to the queue. Nobody
passes the head of a line.
"""

from __future__ import annotations

import sys

from msgspec.structs import replace

from kvalet.actors.decisions import recovery, room
from kvalet.actors.decisions.feasible import is_feasible
from kvalet.actors.decisions.preemption import choose_victim
from kvalet.actors.decisions.state import RUNNING, WAITING, House, Lease
from kvalet.actors.decisions.step import Step
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, LeaseId


def fill(step: Step) -> None:
    """Hand out what is free, in the order of the lines, until a head does not fit."""
    if step.house.ready:
        while _serve_one(step):
            pass


def _serve_one(step: Step) -> bool:
    house = step.house
    if house.waiting:
        return _extend_head(step)
    if house.parked:
        return _resume_head(step)
    return bool(house.queue) and _grant_head(step)


def extend(step: Step, lease: Lease, cells: Cells, generated: int, least: Cells) -> bool:
    """Extend ``lease``, which stands at ``cells``, if at least ``least`` cells are free."""
    house = step.house
    had, free = lease.granted, house.free
    most = had + (house.at_hand if house.erasing else free)
    left = room.remaining(house, lease, generated)
    if house.feasible and most - cells < left:
        most -= room.kept_for_others(house, lease)
    if most - cells < least:
        return False
    if lease.park_every:
        left = min(left, room.until_forced(lease, generated))
    granted = Cells(min(max(cells + max(room.block(house, left, free), least), had), most))
    erase = room.to_erase(house, granted - had) if house.residue else ()
    step.emit(
        e.LeaseExtended(
            request=lease.request,
            lease=lease.lease,
            granted=granted,
            credit=Cells(granted - cells),
            cells=cells,
            generated=generated,
            erase=erase,
        )
    )
    return True


def _extend_head(step: Step) -> bool:
    lease = step.house.leases[step.house.waiting[0]]
    return extend(step, lease, lease.cells, lease.generated, lease.need)


def _resume_head(step: Step) -> bool:
    house = step.house
    lease = house.leases[house.parked[0]]
    if recovery.held_back(house, lease) or not room.has_seats(house, lease):
        return False
    found = room.resumed_credit(house, lease)
    if found is None:
        return False
    charge, credit = found
    granted = Cells(lease.cells + charge)
    slots = room.free_slots(house, lease)
    step.emit(
        e.LeaseResumed(
            request=lease.request,
            lease=lease.lease,
            slots=slots,
            method=lease.method,
            granted=granted,
            credit=credit,
            erase=room.to_erase(house, granted, slots),
        )
    )
    return True


def _grant_head(step: Step) -> bool:
    return grant(step, step.house.leases[step.house.queue[0]])


def grant(step: Step, lease: Lease) -> bool:
    """Grant ``lease`` its slots and first credit, if both are there."""
    house = step.house
    if not room.has_seats(house, lease) or lease.seats * lease.prompt > house.at_hand:
        return False
    if house.handed_over and lease.seats == 1:
        return _grant_whole(step, lease)
    feasible = is_feasible(house, lease)
    credit = room.first_credit(house, lease, feasible)
    if credit is None:
        return False
    slots = room.free_slots(house, lease)
    granted = Cells(lease.seats * lease.prompt + credit)
    step.emit(
        e.LeaseGranted(
            request=lease.request,
            lease=LeaseId(house.last_lease + 1),
            slots=slots,
            granted=granted,
            credit=credit,
            erase=room.to_erase(house, granted, slots),
            feasible=feasible,
        )
    )
    return True


def _grant_whole(step: Step, lease: Lease) -> bool:
    """Let ``lease`` run to its own limit where the server parks: what may not fit later is the
    server's to move. Only its start is charged, so that prompts never crowd each other out.

    Several answers to one request (``seats``) are never here: a server parks none of them.
    """
    house = step.house
    left = room.remaining(house, lease, 0)
    charge = Cells(lease.prompt + min(left, house.settings.first_block))
    if charge > house.at_hand:
        return False
    step.emit(
        e.LeaseGranted(
            request=lease.request,
            lease=LeaseId(house.last_lease + 1),
            slots=room.free_slots(house, lease),
            granted=charge,
            credit=Cells(left),
            feasible=False,
        )
    )
    return True


def press(step: Step, asker: Lease, cells: Cells, generated: int, least: Cells) -> None:
    """No block is free for ``asker``: it waits, and somebody is parked for it.

    Where all were admitted to their very ends nobody needs to be: what keeps the asker
    waiting is only credit that others have not spent yet, so it goes on with whatever is
    free, or waits for one that ends. A chat alone never comes here: all that it may still
    generate is free then.
    """
    house = step.house
    spare = asker.granted - cells
    if house.feasible:
        least = Cells(1)
        if extend(step, asker, cells, generated, least):
            return
    running = others_run(house, asker)
    if house.feasible:
        # Credit that others have not spent yet comes back by itself; what is free and kept for
        # an end that nobody is on the way to does not.
        comes = running or house.coming > 0
    else:
        comes = house.coming + house.free + spare >= least
    if comes:
        victim = None
    else:
        here = replace_cells(asker, cells, generated)
        victim = choose_victim(with_lease(house, here), here)
        if victim is None and not house.coming and not running:
            # With nobody left to run, the limit on parks would end in a standstill.
            victim = choose_victim(with_lease(without_limit(house), here), here)
    step.emit(
        e.PoolPressed(
            asker=asker.request,
            victim=victim.request if victim else None,
            cells=cells,
            generated=generated,
            short=least,
        )
    )
    if victim is not None:
        now = step.house.leases[victim.request]
        if now.state == WAITING:
            park(step, now, now.cells, now.generated)


def others_run(house: House, asker: Lease) -> bool:
    """Whether a lease other than ``asker`` is running."""
    return house.runners > (asker.state == RUNNING)


def end_full(step: Step, lease: Lease, cells: Cells, generated: int) -> None:
    """The answer fills the pool alone: it ends as one that reached its context's end."""
    step.emit(
        e.LeaseEnded(
            request=lease.request,
            lease=lease.lease,
            reason="context-full",
            aborted=False,
            slots=lease.slots,
            cells=cells,
            generated=generated,
        )
    )


def park(step: Step, lease: Lease, cells: Cells, generated: int) -> None:
    """Order the park of a lease that stands at a leg's end."""
    house = step.house
    step.emit(
        e.LeaseParking(
            request=lease.request,
            lease=lease.lease,
            cells=cells,
            generated=generated,
            save=house.method == "save" and within_budget(house),
        )
    )


def within_budget(house: House) -> bool:
    """Whether one more park may be saved."""
    budget = house.settings.park_ram_bytes
    return budget is None or house.saved_bytes < budget


def revive(step: Step) -> None:
    """Break a standstill: everybody waits, nobody runs, nothing is on its way.

    It can come about when the only runner ends while the others wait for one another.
    The policy's choice of the waiting is parked, for the head of their line.
    """
    house = step.house
    if not house.waiting or house.runners or house.coming or house.erasing or not house.ready:
        return
    asker = house.leases[house.waiting[0]]
    press(step, asker, asker.cells, asker.generated, asker.need)


def replace_cells(lease: Lease, cells: Cells, generated: int) -> Lease:
    """The lease as it stands now, at the end of its leg."""
    return replace(lease, cells=cells, generated=generated)


def without_limit(house: House) -> House:
    """A house in which nobody was parked too often (for a policy's eyes only)."""
    return replace(house, settings=replace(house.settings, resume_max=sys.maxsize))


def with_lease(house: House, lease: Lease) -> House:
    """A house in which ``lease`` stands as given (for a policy's eyes only)."""
    return replace(house, leases={**house.leases, lease.request: lease})
