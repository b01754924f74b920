"""What may follow when a server dies: whether another is started, and who has to wait for whom.

Its cells are gone. A chat that held any is parked with nothing saved, and goes on as soon as
the next server is there and what its client holds is counted. Those that were running are
taken up one at a time until they decode again: the one that kills a second server in a row
is alone under suspicion then, and ends alone.
"""

from __future__ import annotations

from kvalet.actors.decisions.plan.flag_values import MODEL_TYPES, MTP_TYPES
from kvalet.actors.decisions.state import RUNNING, WAITING, House, Lease, Server
from kvalet.protocol.ids import Nanos

CRASHES_MAX = 2
"""Servers in a row that may die under one request before it is held to be the cause."""

POISON = "poison"
"""Why a request ends that killed as many servers."""

WAIT_FACTOR = 4
NANOS = 1_000_000_000


def recent_ends(house: House, at_ns: Nanos) -> int:
    """Restarts that still count against the budget."""
    since = at_ns - round(house.settings.restart_window_s * NANOS)
    return sum(end > since for end in house.server.ends)


def may_restart(house: House, at_ns: Nanos) -> bool:
    """Whether the budget allows a server to be started again. One that has never been ready
    in the first place is no use starting again."""
    server = house.server
    was_up = server.state in ("probing", "ready", "hung") or bool(server.ends)
    return was_up and recent_ends(house, at_ns) < house.settings.restarts_max


def wait_before(house: House, ends: int) -> float:
    """Seconds to wait before a server is started again after ``ends`` earlier restarts."""
    return house.settings.restart_wait_s * WAIT_FACTOR ** (ends - 1) if ends else 0.0


def next_rung(server: Server) -> str:
    """What the load gives up after this end; empty: nothing that may have caused it.

    First the drafter, then the split by tensor, then half of the context, which also is what
    a server without either gives up that had too little memory.
    """
    given = server.given
    if not {*MTP_TYPES, *MODEL_TYPES}.isdisjoint(server.drafting):
        return "no-drafter"
    if server.split == "tensor":
        return "layer-split"
    suspect = server.cause == "memory" or "no-drafter" in given or "layer-split" in given
    return "smaller-context" if suspect and "smaller-context" not in given else ""


def held_back(house: House, lease: Lease) -> bool:
    """Whether a parked lease may not go on yet, whatever room there is."""
    if lease.stranded:
        return True
    return lease.crashes > 0 and any(
        other.crashes > 0 and other.state in (RUNNING, WAITING) for other in house.leases.values()
    )


def outgrown(house: House, lease: Lease) -> bool:
    """Whether what a parked chat holds leaves no room for a token in this pool."""
    return lease.cells >= house.limit
