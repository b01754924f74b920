"""Whether capped requests can all grow to their ends without any park."""

from __future__ import annotations

from kvalet.actors.decisions.state import House, Lease
from kvalet.protocol.ids import Cells


def peak(growing: list[tuple[Cells, int]]) -> int:
    """The most cells ever held when each (cells, tokens left) grows at equal speed.

    A lease gives all its cells back in the step after its last token, so the peak lies
    just before some lease ends.
    """
    best = held = 0
    # From the latest end to the first: at each end all that come later are there too.
    for count, (cells, left) in enumerate(sorted(growing, key=_left, reverse=True), 1):
        held += cells
        best = max(best, held + count * left)
    return best


def _left(grower: tuple[Cells, int]) -> int:
    return grower[1]


def is_feasible(house: House, newcomer: Lease) -> bool:
    """Whether a newcomer and every holder can reach their caps with no park at all.

    An uncapped lease, or a parked one that will come back, makes it infeasible.
    """
    if newcomer.cap is None or house.parked:
        return False
    seats = newcomer.seats
    growing = [(Cells(seats * newcomer.prompt), seats * newcomer.cap)]
    for request in set(house.holders.values()):
        lease = house.leases[request]
        if lease.cap is None:
            return False
        cap_left = lease.cap - lease.generated
        growing.append((lease.cells, max(cap_left, lease.granted - lease.cells)))
    return peak(growing) <= house.limit
