"""Whether capped requests can all grow to their ends without any park."""

from __future__ import annotations

from kvalet.actors.decisions.state import HOLDING, House, Lease
from kvalet.protocol.ids import Cells


def peak(growing: list[tuple[Cells, int]]) -> int:
    """The most cells ever held when each (cells, tokens left) grows at equal speed.

    A lease gives all its cells back in the step after its last token, so the peak lies
    just before some lease ends.
    """
    best = 0
    for horizon in {0, *(left for _, left in growing)}:
        held = sum(cells + min(left, horizon) for cells, left in growing if left >= horizon)
        best = max(best, held)
    return best


def is_feasible(house: House, newcomer: Lease) -> bool:
    """Whether a newcomer and every holder can reach their caps with no park at all.

    An uncapped lease, or a parked one that will come back, makes it infeasible.
    """
    if newcomer.cap is None or house.parked:
        return False
    seats = newcomer.seats
    growing = [(Cells(seats * newcomer.prompt), seats * newcomer.cap)]
    for lease in house.leases.values():
        if lease.state in HOLDING:
            if lease.cap is None:
                return False
            cap_left = lease.cap - lease.generated
            growing.append((lease.cells, max(cap_left, lease.granted - lease.cells)))
    return peak(growing) <= house.limit
