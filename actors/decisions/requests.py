"""One request's life: arrival, count, credit, park, end. Each function is one command."""

from __future__ import annotations

from kvalet.actors.decisions import ledger, recovery, room
from kvalet.actors.decisions.state import (
    ARRIVED,
    CLOSING,
    DOWN,
    PARKED,
    PARKING,
    RUNNING,
    WAITING,
    House,
    Lease,
)
from kvalet.actors.decisions.step import Step
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells

MISSES_MAX = 3
"""Resumes in a row that reused less than half of what was saved, before saving stops."""


SILENT_PARK_MAX_S = 1800.0
"""How long after its deadline a stream may be silent, while its slot is read to be parked."""


def arrive(step: Step, command: c.Arrive) -> None:
    """A request comes in; on a dead server it is refused at once."""
    house = step.house
    if command.request in house.leases:
        return
    step.emit(
        e.RequestArrived(
            request=command.request,
            surface=command.surface,
            streaming=command.streaming,
            cap=command.cap,
            # Several answers share one request: none of them can be parked by itself.
            pausable=command.pausable and command.seats == 1,
            seats=command.seats,
            park_every=command.park_every,
        )
    )
    if house.server.state in DOWN:
        step.emit(e.LeaseRefused(request=command.request, code="server_unavailable"))


def measure(step: Step, command: c.PromptCounted) -> None:
    """The prompt is counted: refuse what can never fit, grant or queue the rest."""
    lease = step.house.leases.get(command.request)
    if lease is None or lease.state != ARRIVED:
        return
    step.emit(
        e.PromptMeasured(request=command.request, prompt=command.prompt, affinity=command.affinity)
    )
    lease = step.house.leases[command.request]
    refusal = refuse(step.house, lease)
    if refusal is not None:
        step.emit(refusal)
        return
    house = step.house
    lines = house.waiting or house.parked or house.queue
    if not lines and house.ready and ledger.grant(step, lease):
        return
    place = len(house.queue) + 1
    if place > house.settings.queue_max:
        step.emit(
            e.LeaseRefused(
                request=lease.request,
                code="queue_full",
                needed=Cells(place),
                limit=Cells(house.settings.queue_max),
            )
        )
    else:
        step.emit(e.LeaseQueued(request=lease.request, position=place))


def refuse(house: House, lease: Lease) -> e.LeaseRefused | None:
    """Why this request can never be served, or None. A pool not known yet refuses nobody."""
    if not house.cells:
        return None
    needed = Cells(lease.seats * (lease.prompt + 1))
    if lease.seats > house.slots:
        return e.LeaseRefused(
            request=lease.request,
            code="too_many_choices",
            needed=Cells(lease.seats),
            limit=Cells(house.slots),
        )
    if needed > house.limit:
        return e.LeaseRefused(
            request=lease.request, code="prompt_too_large", needed=needed, limit=house.limit
        )
    return None


def spend(step: Step, command: c.CreditSpent) -> None:
    """A stream stands at its credit's end: extend it, park it, or make room for it."""
    house = step.house
    lease = house.leases.get(command.request)
    if lease is None or lease.state != RUNNING:
        return
    cells, generated = command.cells, command.generated
    left = room.remaining(house, lease, generated)
    if left <= 0 or not lease.pausable or not house.settings.preempt or house.handed_over:
        # What we do not park was given all that it is permitted; there is no more.
        ledger.end_full(step, lease, cells, generated)
        return
    least = house.settings.block_min
    if lease.park_every and not command.stuck:
        if room.is_forced(house, lease, generated):
            ledger.park(step, lease, cells, generated)
            return
        least = min(least, room.until_forced(lease, generated))
    if command.stuck:
        least = max(house.settings.block_min, 2 * (lease.granted - lease.cells))
    need = Cells(least if least < left else left)
    if not house.waiting and ledger.extend(step, lease, cells, generated, need):
        return
    if lease.ordered:
        ledger.park(step, lease, cells, generated)
        return
    ledger.press(step, lease, cells, generated, need)


def finish(step: Step, command: c.AnswerEnded) -> None:
    """The answer is complete; its cells stay charged until the slot is seen idle."""
    lease = step.house.leases.get(command.request)
    if lease is None or lease.state == CLOSING:
        return
    end(step, lease, command.reason, aborted=False, at=(command.cells, command.generated))


def leave(step: Step, command: c.Leave) -> None:
    """The request ends early, wherever it stands: place or lease, the ledger knows which."""
    lease = step.house.leases.get(command.request)
    if lease is None or lease.state == CLOSING:
        return
    end(step, lease, command.reason, aborted=bool(lease.slots))


def end(
    step: Step, lease: Lease, reason: str, *, aborted: bool, at: tuple[Cells, int] | None = None
) -> None:
    """End ``lease``; one that holds no slot is given back in the same breath."""
    cells, generated = at or (lease.cells, lease.generated)
    if lease.state != RUNNING or lease.request in step.house.erasing.values():
        step.freed = True
    step.emit(
        e.LeaseEnded(
            request=lease.request,
            lease=lease.lease,
            reason=reason,
            aborted=aborted,
            slots=lease.slots,
            cells=cells,
            generated=generated,
        )
    )
    if not lease.slots:
        step.emit(e.LeaseReleased(request=lease.request, reason=reason))


def freed(step: Step, command: c.CellsFreed) -> None:
    """A victim's slot is empty: it is parked now. One that left meanwhile stays ended."""
    lease = step.house.leases.get(command.request)
    if lease is None or lease.state != PARKING:
        return
    step.emit(
        e.LeaseParked(
            request=lease.request,
            lease=lease.lease,
            method=command.method,
            cells=command.cells,
            saved_bytes=command.saved_bytes,
            pool_granted=step.house.granted_total,
        )
    )


def take_up(step: Step, command: c.PartialCounted) -> None:
    """What a stranded chat goes on from is counted; one that its pool cannot hold ends."""
    lease = step.house.leases.get(command.request)
    if lease is None or lease.state != PARKED or not lease.stranded:
        return
    step.emit(
        e.PartialMeasured(request=command.request, cells=command.cells, generated=command.generated)
    )
    lease = step.house.leases[command.request]
    if step.house.ready and recovery.outgrown(step.house, lease):
        end(step, lease, "context-full", aborted=False)


def clear(step: Step, command: c.ProgressSeen) -> None:
    """It decodes on the server after the one that died under it: the next may be taken up."""
    lease = step.house.leases.get(command.request)
    if lease is not None and lease.crashes and lease.state in (RUNNING, WAITING):
        step.emit(e.LeaseCleared(request=command.request))


def release(step: Step, command: c.SlotSeen) -> None:
    """The ended lease's slots are idle: everything it held is free again."""
    lease = step.house.leases.get(command.request)
    if lease is None or lease.state != CLOSING:
        return
    step.emit(
        e.LeaseReleased(request=lease.request, reason=lease.end_reason, residue=command.residue)
    )


def erased(step: Step, command: c.SlotErased) -> None:
    """An idle slot's residue is gone. A report that nobody waits for changes nothing."""
    if command.slot in step.house.erasing:
        step.emit(e.SlotCleared(slot=command.slot, cells=command.cells))


def judge_cache(step: Step, command: c.CacheSeen) -> None:
    """Compare what a resume reused with what it should have; three misses demote saving."""
    lease = step.house.leases.get(command.request)
    if lease is None or lease.state not in (RUNNING, WAITING):
        return
    if lease.recomputes >= lease.resumes:
        return
    short = command.expected - command.reused
    if short <= 0:
        step.emit(e.LeaseRestored(request=lease.request, lease=lease.lease, cells=command.reused))
        return
    saved = lease.method == "save"
    miss = saved and 2 * command.reused < command.expected
    step.emit(
        e.LeaseRecomputed(request=lease.request, lease=lease.lease, cells=Cells(short), miss=miss)
    )
    house = step.house
    if miss and house.method == "save" and house.misses >= MISSES_MAX:
        step.emit(e.MethodDemoted(method="save", misses=house.misses))


def judge_silence(step: Step, command: c.SilenceSeen) -> None:
    """Silence is a stall when the stream runs and its deadline has passed."""
    house = step.house
    lease = house.leases.get(command.request)
    if lease is None or lease.state != RUNNING:
        return
    settings, server = house.settings, house.server
    limit = settings.first_token_s if command.phase == "first-token" else settings.stall_s
    if lease.away and server.parks and not server.notices:
        # Its park is seen, but nothing will say that it lasts.
        limit += SILENT_PARK_MAX_S
    if command.silent_s < limit:
        return
    if command.alone and server.state == "ready" and recovery.may_restart(house, step.at_ns):
        # Nobody hears anything of it: not the stream is at fault, and nobody need lose it.
        step.emit(e.ServerHung(generation=server.generation, silent_s=command.silent_s))
        return
    step.emit(
        e.StreamStalled(request=lease.request, phase=command.phase, silent_s=command.silent_s)
    )


def hear(step: Step, command: c.NoticeHeard) -> None:
    """A notice of the server's is a fact, whatever it means."""
    if command.request in step.house.leases:
        step.emit(e.NoticeTaken(request=command.request, notice=command.notice, away=command.away))
