"""Whom to park. A policy is a pure function of (house, asker): a victim, or nobody.

The default parks the chat with the least sunk work, the newest of equals, and spares
those that were parked often already: the oldest work always progresses, and nobody is
the victim for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from kvalet.actors.decisions.state import RUNNING, WAITING, House, Lease

Policy = Callable[[House, Lease], Lease | None]

FAR_BLOCKS = 4
"""A running chat this many smallest blocks away from its leg's end frees nothing soon."""


def can_be_parked(lease: Lease, resume_max: int) -> bool:
    """Whether this lease may be chosen at all."""
    return (
        lease.pausable
        and lease.state in (RUNNING, WAITING)
        and not lease.ordered
        and lease.parks < resume_max
    )


def candidates(house: House, asker: Lease) -> list[Lease]:
    """Leases that could give their cells back soon, in order of arrival."""
    settings = house.settings
    far = settings.block_min * FAR_BLOCKS
    return [
        lease
        for lease in house.leases.values()
        if can_be_parked(lease, settings.resume_max)
        and (
            lease.request == asker.request
            or lease.state == WAITING
            # Without a reading of its progress a running leg is judged by its whole credit.
            or lease.granted - lease.cells <= far
        )
    ]


def least_sunk(house: House, asker: Lease) -> Lease | None:
    """The candidate with the fewest cells; one parked ``promote_after`` times comes last."""
    promote = house.settings.promote_after
    return min(
        candidates(house, asker),
        key=lambda lease: (lease.parks >= promote, lease.cells, -lease.lease),
        default=None,
    )


def most_served(house: House, asker: Lease) -> Lease | None:
    """The candidate with the most generated tokens: everybody progresses alike."""
    return max(
        candidates(house, asker),
        key=lambda lease: (lease.generated, lease.lease),
        default=None,
    )


def newest(house: House, asker: Lease) -> Lease | None:
    """The candidate granted last (last in, first out)."""
    return max(candidates(house, asker), key=lambda lease: lease.lease, default=None)


POLICIES: dict[str, Policy] = {
    "least-sunk": least_sunk,
    "fair-share": most_served,
    "lifo": newest,
}


def choose_victim(house: House, asker: Lease) -> Lease | None:
    """The lease to park so that ``asker`` can go on; None when nobody may be parked.

    The last one that makes progress is never parked: with it gone nothing would ever
    free a cell.
    """
    victim = POLICIES[house.settings.policy](house, asker)
    if victim is None:
        return None
    others = any(
        lease.request != victim.request and lease.state in (RUNNING, WAITING)
        for lease in house.leases.values()
    )
    return victim if others else None
