"""Facts: what has been decided. Names on disk are written by hand, ``noun.participle``.

Additive only: a new field has a default, no field changes its type. No prompt, answer,
key or token text is ever in an event.
"""

from __future__ import annotations

from kvalet.protocol.commands import Settings
from kvalet.protocol.events_server import (
    Event,
    ExactJudged,
    LoadDropped,
    LoadOrdered,
    ServerExited,
    ServerFellBack,
    ServerHung,
    ServerPlanned,
    ServerProbed,
    ServerReady,
    ServerRestarted,
    ServerSpawned,
    ServerWeighed,
)
from kvalet.protocol.ids import Cells, LeaseId, RequestId, SlotId

# These are defined next door and belong here.
__all__ = [
    "ExactJudged",
    "LoadDropped",
    "LoadOrdered",
    "ServerExited",
    "ServerFellBack",
    "ServerHung",
    "ServerPlanned",
    "ServerProbed",
    "ServerReady",
    "ServerRestarted",
    "ServerSpawned",
    "ServerWeighed",
]


class HouseOpened(Event, frozen=True, kw_only=True, tag="house.opened"):
    """A process took the journal over with these settings."""

    settings: Settings


class JournalTorn(Event, frozen=True, kw_only=True, tag="journal.torn"):
    """The last line of the journal was incomplete and was cut off."""

    dropped_bytes: int


class RequestArrived(Event, frozen=True, kw_only=True, tag="request.arrived"):
    """A request came in; its prompt is not counted yet."""

    request: RequestId
    surface: str
    streaming: bool
    cap: int | None
    pausable: bool
    seats: int
    park_every: int = 0


class PromptMeasured(Event, frozen=True, kw_only=True, tag="prompt.counted"):
    """The prompt's cells are known exactly; ``affinity``: (slot, cells it shares with it)."""

    request: RequestId
    prompt: Cells
    affinity: tuple[tuple[SlotId, Cells], ...] = ()


class LeaseQueued(Event, frozen=True, kw_only=True, tag="lease.queued"):
    """No room yet: the request waits at ``position`` (1 is next)."""

    request: RequestId
    position: int


class LeaseGranted(Event, frozen=True, kw_only=True, tag="lease.granted"):
    """Slots and ``granted`` cells are leased; ``credit`` of them are for new tokens.

    ``erase`` names idle slots whose residue must go first. ``feasible``: with every
    running lease growing to its cap the pool never overflows.
    """

    request: RequestId
    lease: LeaseId
    slots: tuple[SlotId, ...]
    granted: Cells
    credit: Cells
    erase: tuple[SlotId, ...] = ()
    feasible: bool = False


class LeaseExtended(Event, frozen=True, kw_only=True, tag="lease.extended"):
    """``granted`` is the lease's new total; ``credit`` of it is for new tokens."""

    request: RequestId
    lease: LeaseId
    granted: Cells
    credit: Cells
    cells: Cells
    generated: int
    erase: tuple[SlotId, ...] = ()


class LeaseRefused(Event, frozen=True, kw_only=True, tag="lease.refused"):
    """The request can never be served. ``needed`` and ``limit`` are cells."""

    request: RequestId
    code: str
    needed: Cells = Cells(0)
    limit: Cells = Cells(0)


class PoolPressed(Event, frozen=True, kw_only=True, tag="pool.pressed"):
    """``asker`` stands at its credit's end and no block is free; ``victim`` shall be parked.

    No victim: cells are on their way back already.
    """

    asker: RequestId
    victim: RequestId | None
    cells: Cells
    generated: int
    short: Cells


class LeaseParking(Event, frozen=True, kw_only=True, tag="lease.parking"):
    """The victim stands at a leg's end: its cells are to be moved out now."""

    request: RequestId
    lease: LeaseId
    cells: Cells
    generated: int
    save: bool


class LeaseParked(Event, frozen=True, kw_only=True, tag="lease.parked"):
    """The victim's cells are free. ``pool_granted``: what was granted until this moment.

    ``cause`` is ``crash`` when they went with their server, ``reload`` when that was ended for
    another; then what the client holds is counted before the chat is resumed.
    """

    request: RequestId
    lease: LeaseId
    method: str
    cells: Cells
    saved_bytes: int
    pool_granted: Cells
    cause: str = ""


class PartialMeasured(Event, frozen=True, kw_only=True, tag="partial.counted"):
    """What a chat that lost its server will go on from: ``cells`` with its prompt."""

    request: RequestId
    cells: Cells
    generated: int


class LeaseCleared(Event, frozen=True, kw_only=True, tag="lease.cleared"):
    """A chat that was running when a server died decodes again: it is not what killed it."""

    request: RequestId


class LeaseResumed(Event, frozen=True, kw_only=True, tag="lease.resumed"):
    """A parked chat goes on in ``slots``. ``erase`` names idle residue to clear first."""

    request: RequestId
    lease: LeaseId
    slots: tuple[SlotId, ...]
    method: str
    granted: Cells
    credit: Cells
    erase: tuple[SlotId, ...] = ()


class LeaseRecomputed(Event, frozen=True, kw_only=True, tag="lease.recomputed"):
    """After a resume ``cells`` cells were computed again instead of restored.

    ``miss``: less than half of what had been saved was reused.
    """

    request: RequestId
    lease: LeaseId
    cells: Cells
    miss: bool = False


class LeaseRestored(Event, frozen=True, kw_only=True, tag="lease.restored"):
    """After a resume all ``cells`` cells were reused; one token was evaluated."""

    request: RequestId
    lease: LeaseId
    cells: Cells


class LeaseEnded(Event, frozen=True, kw_only=True, tag="lease.ended"):
    """The request is over. Its cells stay charged until its slots are seen idle.

    ``reason``: stop, length, context-full, left, failed, stalled, lost, server-lost…
    ``aborted``: the stream was cut, the slot may still be decoding.
    """

    request: RequestId
    lease: LeaseId
    reason: str
    aborted: bool
    slots: tuple[SlotId, ...]
    cells: Cells
    generated: int


class LeaseReleased(Event, frozen=True, kw_only=True, tag="lease.released"):
    """Everything the request held is given back; ``residue`` cells idle in its first slot."""

    request: RequestId
    reason: str
    residue: Cells = Cells(0)


class SlotCleared(Event, frozen=True, kw_only=True, tag="slot.erased"):
    """An idle slot's residue is gone."""

    slot: SlotId
    cells: Cells


class NoticeTaken(Event, frozen=True, kw_only=True, tag="notice.heard"):
    """The server announced something on this stream; ``away``: it has the stream parked now."""

    request: RequestId
    notice: str
    away: bool = False


class ParkSeen(Event, frozen=True, kw_only=True, tag="lease.seen_parked"):
    """A server that says nothing in its streams was read to have this chat parked, or back."""

    request: RequestId
    away: bool


class StreamStalled(Event, frozen=True, kw_only=True, tag="stream.stalled"):
    """Silence with no park to excuse it."""

    request: RequestId
    phase: str
    silent_s: float


class PoolRead(Event, frozen=True, kw_only=True, tag="pool.read"):
    """A reading of the slots: cells that are really resident, and the busy slots."""

    resident: Cells
    busy: int


class MethodDemoted(Event, frozen=True, kw_only=True, tag="method.demoted"):
    """Restored cells were not reused three times in a row: parks recompute from now on."""

    method: str
    misses: int


AnyEvent = (
    HouseOpened
    | JournalTorn
    | RequestArrived
    | PromptMeasured
    | LeaseQueued
    | LeaseGranted
    | LeaseExtended
    | LeaseRefused
    | PoolPressed
    | LeaseParking
    | LeaseParked
    | PartialMeasured
    | LeaseCleared
    | LeaseResumed
    | LeaseRecomputed
    | LeaseRestored
    | LeaseEnded
    | LeaseReleased
    | SlotCleared
    | NoticeTaken
    | ParkSeen
    | StreamStalled
    | PoolRead
    | MethodDemoted
    | LoadOrdered
    | LoadDropped
    | ServerPlanned
    | ServerSpawned
    | ServerReady
    | ServerWeighed
    | ExactJudged
    | ServerProbed
    | ServerExited
    | ServerHung
    | ServerFellBack
    | ServerRestarted
)
