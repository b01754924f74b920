"""The house: everything the ledger knows, as one immutable value.

``House`` is the fold of the events and nothing else. Sums that every decision needs
(``granted_total``, ``coming``…) are kept beside the entries they are made of;
``recount`` makes them afresh and the tests compare the two after every step.
"""

from __future__ import annotations

import msgspec

from kvalet.protocol.commands import Load, MemoryFigure, Settings
from kvalet.protocol.ids import Cells, LeaseId, Nanos, RequestId, SlotId

ARRIVED = "arrived"
QUEUED = "queued"
RUNNING = "running"
WAITING = "waiting"
PARKING = "parking"
PARKED = "parked"
CLOSING = "closing"

HANDED_OVER = "server"
"""The park method of a server that parks by itself."""

DOWN = ("failed", "stopped", "unloaded")
"""States of a server that nobody starts again by himself."""

HOLDING = (RUNNING, WAITING, PARKING, CLOSING)
"""States in which a lease occupies its slots and its granted cells."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request, from its arrival until everything it held is given back.

    ``cells`` are those known to be occupied (prompt + generated), ``granted`` those it may
    occupy; ``since_ns`` is when the present state began and ``order`` its place among
    those in the same state. ``ordered`` marks a victim that parks at its leg's end;
    ``away_since`` is when the server parked it, None while it runs. ``stranded``: its server
    died, and what its client holds is not counted yet. ``crashes``: servers that died under
    it without its having decoded in between.
    """

    request: RequestId
    surface: str
    state: str
    arrived_ns: Nanos
    since_ns: Nanos
    order: int
    cap: int | None = None
    pausable: bool = True
    seats: int = 1
    park_every: int = 0
    lease: LeaseId = LeaseId(0)
    slots: tuple[SlotId, ...] = ()
    prompt: Cells = Cells(0)
    generated: int = 0
    cells: Cells = Cells(0)
    granted: Cells = Cells(0)
    ordered: bool = False
    need: Cells = Cells(0)
    affinity: tuple[tuple[SlotId, Cells], ...] = ()
    method: str = ""
    saved_bytes: int = 0
    parks: int = 0
    resumes: int = 0
    recomputes: int = 0
    waited_ns: Nanos = Nanos(0)
    parked_ns: Nanos = Nanos(0)
    end_reason: str = ""
    away_since: Nanos | None = None
    stranded: bool = False
    crashes: int = 0

    @property
    def gone_since(self) -> Nanos | None:
        """When it was parked, by whomever; None while it is not."""
        return self.since_ns if self.state == PARKED else self.away_since

    @property
    def away(self) -> bool:
        """Whether the server holds it parked, while it keeps its slot."""
        return self.away_since is not None


class Residue(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Cells that an ended answer left in an idle slot; ``order`` grows with recency."""

    cells: Cells
    order: int


class Server(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The llama-server as the ledger knows it.

    ``wanted`` is the generation that is to run, 0 until one is ordered, from ``due_ns`` on;
    ``ends`` are the moments of the ends that were answered with a restart. ``load`` is what the
    server was asked for, ``given`` what that load has given up since.
    """

    state: str = "starting"
    generation: int = 0
    pid: int | None = None
    url: str = ""
    build: str = ""
    model: str = ""
    reason: str = ""
    warnings: tuple[tuple[str, str], ...] = ()
    memory: tuple[MemoryFigure, ...] = ()
    native_ctx: Cells = Cells(0)
    max_ctx: Cells = Cells(0)
    parks: bool = False
    notices: bool = False
    exact: str = "off"
    wanted: int = 0
    due_ns: Nanos = Nanos(0)
    ends: tuple[Nanos, ...] = ()
    load: Load = Load()
    given: tuple[str, ...] = ()
    drafting: tuple[str, ...] = ()
    drafting_asked: tuple[str, ...] = ()
    split: str = ""
    cause: str = ""


class Totals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Counters since the journal began."""

    requests: int = 0
    grants: int = 0
    finished: int = 0
    failed: int = 0
    left: int = 0
    refused: int = 0
    parks: int = 0
    resumes: int = 0
    recomputes: int = 0
    ended_parked: int = 0
    restarts: int = 0


class House(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The whole state. ``leases`` keeps the order of arrival; nothing else relies on it.

    Counters: ``order`` numbers everything that can be queued, ``last_lease`` the grants.
    ``waiting``, ``parked`` and ``queue`` name their leases in the order they are served.
    ``erasing`` names the idle slots whose residue somebody is removing, and who does:
    nobody else may take such a slot, or the erase would hit its new holder. ``coming`` are
    the cells that come back without any further order, ``runners`` the running leases.
    ``feasible``: the last to be admitted found room for everybody's end.
    """

    settings: Settings = Settings()
    server: Server = Server()
    totals: Totals = Totals()
    cells: Cells = Cells(0)
    slots: int = 0
    headroom: Cells = Cells(0)
    method: str = "recompute"
    misses: int = 0
    order: int = 0
    last_lease: int = 0
    leases: dict[RequestId, Lease] = {}
    queue: tuple[RequestId, ...] = ()
    waiting: tuple[RequestId, ...] = ()
    parked: tuple[RequestId, ...] = ()
    residue: dict[SlotId, Residue] = {}
    holders: dict[SlotId, RequestId] = {}
    granted_total: Cells = Cells(0)
    erasing: dict[SlotId, RequestId] = {}
    residue_total: Cells = Cells(0)
    coming: Cells = Cells(0)
    runners: int = 0
    feasible: bool = False
    saved_bytes: int = 0
    resident_read: Cells = Cells(0)

    @property
    def limit(self) -> Cells:
        """Cells that may be granted in all: the pool less the headroom."""
        return Cells(self.cells - self.headroom)

    @property
    def free(self) -> Cells:
        """Cells that are not granted to anybody. Residue counts as free: it can be erased."""
        return Cells(self.cells - self.headroom - self.granted_total)

    @property
    def at_hand(self) -> Cells:
        """``free`` less the residue that somebody is still erasing: cells that a newcomer
        may use at once. The server purges idle slots by itself when cells run out, and
        one of those could belong to a chat that only waits.
        """
        if not self.erasing:
            return self.free
        residue = self.residue
        busy = sum(residue[slot].cells for slot in self.erasing if slot in residue)
        return Cells(self.free - busy)

    @property
    def handed_over(self) -> bool:
        """Whether the server parks chats: then nobody is a victim of ours, and no credit ends
        before the request's own limit."""
        return self.method == HANDED_OVER

    @property
    def ready(self) -> bool:
        """Whether the server takes work."""
        return self.server.state == "ready"


def coming_of(lease: Lease) -> Cells:
    """Cells that come back by themselves: of a park in progress, an ending, a victim."""
    if lease.ordered or lease.state == PARKING or lease.state == CLOSING:
        return lease.granted
    return Cells(0)


def recount(house: House) -> House:
    """The same house with every sum made afresh from its entries (for tests)."""
    held = [lease for lease in house.leases.values() if lease.state in HOLDING]
    return msgspec.structs.replace(
        house,
        granted_total=Cells(sum(lease.granted for lease in held)),
        coming=Cells(sum(coming_of(lease) for lease in house.leases.values())),
        runners=sum(lease.state == RUNNING for lease in house.leases.values()),
        residue_total=Cells(sum(left.cells for left in house.residue.values())),
        saved_bytes=sum(
            lease.saved_bytes for lease in house.leases.values() if lease.state == PARKED
        ),
        holders={slot: lease.request for lease in held for slot in lease.slots},
    )
