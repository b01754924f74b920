"""How much room there is, and for whom: blocks, prices, slots, residue. It decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvalet.actors.decisions.state import RUNNING, WAITING, House, Lease
from kvalet.protocol.ids import Cells, SlotId


def remaining(house: House, lease: Lease, generated: int) -> int:
    """Tokens this request may still generate: its own cap, or what the pool could hold."""
    room = house.cells - house.headroom - lease.prompt - generated
    if lease.cap is None:
        return room
    left = lease.cap - generated
    return left if left < room else room


NEVER = 1 << 62


def until_forced(lease: Lease, generated: int) -> int:
    """Tokens until the next park that a test has wished for."""
    return lease.park_every - generated % lease.park_every if lease.park_every else NEVER


def is_forced(house: House, lease: Lease, generated: int) -> bool:
    """Whether a test wishes this lease parked right here."""
    return (
        lease.park_every > 0
        and generated > 0
        and generated % lease.park_every == 0
        and lease.parks < house.settings.resume_max
    )


def block(house: House, left: int, free: int) -> int:
    """Credit for the next leg of a chat that may generate ``left`` tokens more: a share of
    the ``free`` cells, never less than the smallest block.

    A share by slot count makes legs long in an empty pool (a handful for a chat alone) and
    short in a full one, and never hands more than half of what is free to one chat. While
    somebody is parked it is a quantum at most, so that freed cells can still bring the
    parked back instead of lying in the credit of those who run.
    """
    slots, settings = house.slots, house.settings
    share = free // (slots if slots > 2 else 2)
    if house.parked and share > settings.quantum:
        share = settings.quantum
    least = settings.block_min if settings.block_min < free else free
    share = share if share > least else least
    return share if share < left else left


def kept_for_others(house: House, asker: Lease) -> int:
    """Cells that stay free so that one of the other holders can still reach its end, after
    which all that it held is there for the next. Nobody else: none."""
    rests = [
        lease.seats * (lease.prompt + lease.cap) - lease.granted
        for lease in house.leases.values()
        if lease.cap is not None
        and lease.state in (RUNNING, WAITING)
        and lease.request != asker.request
    ]
    return max(0, min(rests, default=0))


def first_credit(house: House, lease: Lease, feasible: bool) -> Cells | None:
    """Credit that a newcomer starts with, or None while it must wait.

    A chat that can be parked starts with a block; one that cannot is charged everything
    that it may generate, since nothing of it can be reclaimed.
    """
    left = remaining(house, lease, 0)
    if not lease.pausable or not house.settings.preempt:
        price = honest_price(house, lease)
        return Cells(price - lease.seats * lease.prompt) if price <= house.at_hand else None
    settings = house.settings
    left = min(left, until_forced(lease, 0))
    room = most = house.at_hand - lease.prompt
    least = min(left, settings.first_block)
    if feasible:
        most -= kept_for_others(house, lease)
        least = min(left, settings.block_min, max(most, 1))
    if least > most:
        return None
    return Cells(min(left, most, max(least, room // max(2, house.slots))))


def honest_price(house: House, lease: Lease) -> Cells:
    """Cells of a request that cannot be parked: prompt plus all that it is permitted.

    Without a cap it is permitted the rest of its share of the pool.
    """
    share = house.limit // max(1, house.slots)
    cap = max(share - lease.prompt, house.settings.block_min) if lease.cap is None else lease.cap
    cap = min(cap, house.limit // lease.seats - lease.prompt)
    return Cells(lease.seats * (lease.prompt + max(cap, 1)))


def has_seats(house: House, lease: Lease) -> bool:
    """Whether enough slots are free for ``lease``. One that is being erased is not."""
    return house.slots - len(house.holders) - len(house.erasing) >= lease.seats


def free_slots(house: House, lease: Lease) -> tuple[SlotId, ...]:
    """Slots for ``lease``: best common prefix first, then empty ones, then the oldest residue."""
    common = dict(lease.affinity)
    residue, holders, erasing = house.residue, house.holders, house.erasing
    ranked = [
        (-common.get(slot, 0), residue[slot].order if slot in residue else 0, slot)
        for slot in cast(Sequence[SlotId], range(house.slots))
        if slot not in holders and slot not in erasing
    ]
    if lease.seats == 1:
        return (min(ranked)[2],)
    ranked.sort()
    return tuple(slot for _, _, slot in ranked[: lease.seats])


def to_erase(house: House, more: int, taken: tuple[SlotId, ...] = ()) -> tuple[SlotId, ...]:
    """Idle slots whose residue must go so that ``more`` granted cells really exist.

    Least recently used first. The slots in ``taken`` give their residue up anyway; what
    somebody else is erasing already has been kept out of ``more``.
    """
    over = house.granted_total + more + house.residue_total - house.limit
    if over <= 0:
        return ()
    gone = (*taken, *house.erasing)
    left = {slot: r for slot, r in house.residue.items() if slot not in gone}
    over += sum(r.cells for r in left.values()) - house.residue_total
    erase: list[SlotId] = []
    for slot, residue in sorted(left.items(), key=lambda item: item[1].order):
        if over <= 0:
            break
        erase.append(slot)
        over -= residue.cells
    return tuple(erase)


def resumed_credit(house: House, lease: Lease) -> tuple[Cells, Cells] | None:
    """Cells that a parked chat is charged beyond its own, and its credit; None: no room yet."""
    settings = house.settings
    left = remaining(house, lease, lease.generated)
    free = house.at_hand - lease.cells
    if house.handed_over and lease.seats == 1:
        charge = Cells(min(left, settings.first_block))
        return (charge, Cells(left)) if charge <= free else None
    if not lease.pausable or not settings.preempt:
        # Only its server's end has parked it.
        charge = Cells(max(1, honest_price(house, lease) - lease.cells))
        return (charge, charge) if charge <= free else None
    left = min(left, until_forced(lease, lease.generated))
    alone = house.granted_total == 0
    least = min(left, settings.block_min if alone else settings.quantum)
    if least > free:
        return None
    credit = Cells(max(least, min(left, free // max(2, house.slots))))
    return credit, credit
