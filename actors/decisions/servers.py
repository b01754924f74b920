"""The server's life as the ledger sees it: launch, readiness, probe, exit, restart of ours."""

from __future__ import annotations

from kvalet.actors.decisions import recovery, requests
from kvalet.actors.decisions.evolve_lease import CRASH, RELOAD
from kvalet.actors.decisions.evolve_server import ORDERED
from kvalet.actors.decisions.state import CLOSING, DOWN, HOLDING, RUNNING, Server
from kvalet.actors.decisions.step import Step
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells

UP = ("probing", "ready")


def open_house(step: Step, command: c.OpenHouse) -> None:
    """A process takes the journal over: what was open is lost, nothing is repeated."""
    if command.torn_bytes:
        step.emit(e.JournalTorn(dropped_bytes=command.torn_bytes))
    close_all(step, "lost")
    step.emit(e.HouseOpened(settings=command.settings))


def close_all(step: Step, reason: str) -> None:
    """End and release every lease at once: the server that held their cells is gone."""
    for lease in list(step.house.leases.values()):
        if lease.request not in step.house.leases:
            continue
        if not lease.end_reason:
            requests.end(step, lease, reason, aborted=False)
        if lease.request in step.house.leases:
            step.emit(e.LeaseReleased(request=lease.request, reason=lease.end_reason or reason))


def plan(step: Step, command: c.LaunchPlanned) -> None:
    """A launch is about to happen; what a former server held is gone with it."""
    server = step.house.server
    if command.generation < max(server.generation, server.wanted):
        return
    if server.state in UP:
        close_all(step, "server-lost")
    step.emit(
        e.ServerPlanned(
            generation=command.generation,
            argv=command.argv,
            warnings=command.warnings,
            native_ctx=command.native_ctx,
            max_ctx=command.max_ctx,
        )
    )


def spawn(step: Step, command: c.SpawnSeen) -> None:
    """The child exists."""
    if command.generation != step.house.server.generation:
        return
    step.emit(e.ServerSpawned(generation=command.generation, pid=command.pid, url=command.url))


def ready(step: Step, command: c.ReadySeen) -> None:
    """The server answers. Leases start once the park method is known.

    Who was queued or parked in a larger pool than this one ends now, or it would stand at
    the head of its line for ever.
    """
    server = step.house.server
    if command.generation < max(server.generation, server.wanted) or server.state in UP:
        return
    if command.generation == server.generation and server.state in DOWN:
        return
    step.emit(
        e.ServerReady(
            generation=command.generation,
            url=command.url,
            build=command.build,
            model=command.model,
            cells=command.cells,
            slots=command.slots,
            headroom=command.headroom,
            pid=command.pid,
            parks=command.parks,
            notices=command.notices,
            given=command.given,
            drafting=command.drafting,
            drafting_asked=command.drafting_asked,
            split=command.split,
        )
    )
    for request in step.house.queue:
        refusal = requests.refuse(step.house, step.house.leases[request])
        if refusal is not None:
            step.emit(refusal)
    for request in step.house.parked:
        lease = step.house.leases[request]
        if not lease.stranded and recovery.outgrown(step.house, lease):
            requests.end(step, lease, "context-full", aborted=False)


def weigh(step: Step, command: c.MemorySeen) -> None:
    """What this server allocated is known."""
    server = step.house.server
    if command.generation == server.generation and server.state in UP:
        step.emit(
            e.ServerWeighed(
                generation=command.generation, figures=command.figures, exact=command.exact
            )
        )


def arm(step: Step, command: c.ExactSeen) -> None:
    """How this server came up is known: one record for each launch."""
    server = step.house.server
    if command.generation == server.generation and server.state in UP:
        step.emit(
            e.ExactJudged(
                generation=command.generation,
                mode=command.mode,
                state=command.state,
                reason=command.reason,
            )
        )


def probe(step: Step, command: c.ProbeSeen) -> None:
    """The park method is settled; the pool opens. A dead server's probe opens nothing."""
    server = step.house.server
    if command.generation != server.generation or server.state not in UP:
        return
    step.emit(
        e.ServerProbed(
            generation=command.generation,
            method=command.method,
            saved=command.saved,
            reused=command.reused,
            detail=command.detail,
        )
    )


def lose(step: Step, command: c.ExitSeen) -> None:
    """The child is gone: its leases are carried over or closed before anything is granted.

    Several watch over it, so its end may be reported again; the first report counts.
    """
    house = step.house
    server = house.server
    if not _is_news(server, command):
        return
    # One that gave no sign of life was ended by us, and is a crash all the same.
    planned = command.planned and server.state != "hung"
    replaced = server.state in ORDERED and command.generation == server.generation
    again = not planned and not replaced and recovery.may_restart(house, step.at_ns)
    ends = recovery.recent_ends(house, step.at_ns)
    reason = command.reason
    if server.state == "hung":
        reason = f"it gave no sign of life; {reason}"
    if ends and not (planned or replaced or again):
        reason += f" (started again {ends} times before)"
    step.emit(
        e.ServerExited(
            generation=command.generation,
            code=command.code,
            planned=planned or replaced,
            reason=reason,
            cause=command.cause,
        )
    )
    if again:
        _restart(step, ends, reason)
    elif not replaced:
        close_all(step, "server-lost")


def _is_news(server: Server, command: c.ExitSeen) -> bool:
    if server.state in ORDERED:
        # Of the one that was ended for it, or of the one that was ordered and never began.
        ended = command.generation == server.generation and server.pid is not None
        return ended or (server.state == "restarting" and command.generation == server.wanted)
    return command.generation == server.generation and server.state not in DOWN


def _restart(step: Step, ends: int, reason: str) -> None:
    """Carry the chats over, give up what may have been the cause, and order the next server."""
    server = step.house.server
    strand(step, CRASH)
    generation = max(server.generation, server.wanted) + 1
    rung = recovery.next_rung(server)
    if rung:
        step.emit(e.ServerFellBack(generation=generation, given=rung, reason=reason))
    wait_s = recovery.wait_before(step.house, ends)
    step.emit(e.ServerRestarted(generation=generation, attempt=ends + 1, wait_s=wait_s))


def load(step: Step, command: c.LoadAsked) -> None:
    """Another server is wanted. Chats of the same model go on there; a load that asks for what
    is wanted already changes nothing."""
    server = step.house.server
    if command.load == server.load and server.state not in DOWN:
        return
    if command.load.model == server.load.model and server.state != "failed":
        strand(step, RELOAD)
    else:
        close_all(step, "unloaded")
    generation = max(server.generation, server.wanted) + 1
    step.emit(e.LoadOrdered(generation=generation, load=command.load))


def unload(step: Step, command: c.UnloadAsked) -> None:
    """No server is wanted, whatever was being started."""
    server = step.house.server
    if server.state == "unloaded":
        return
    close_all(step, "unloaded")
    step.emit(e.LoadDropped(generation=max(server.generation, server.wanted) + 1))


def strand(step: Step, cause: str) -> None:
    """Take every lease off a server that is gone. Those that only wait keep their places."""
    for lease in list(step.house.leases.values()):
        if lease.state not in HOLDING:
            continue
        if lease.state == CLOSING:
            step.emit(e.LeaseReleased(request=lease.request, reason=lease.end_reason))
        elif cause == CRASH and lease.crashes + 1 >= recovery.CRASHES_MAX:
            requests.end(step, lease, recovery.POISON, aborted=False)
            step.emit(e.LeaseReleased(request=lease.request, reason=recovery.POISON))
        else:
            step.emit(
                e.LeaseParked(
                    request=lease.request,
                    lease=lease.lease,
                    method="recompute",
                    cells=lease.cells,
                    saved_bytes=0,
                    pool_granted=step.house.granted_total,
                    cause=cause,
                )
            )


def hang(step: Step, command: c.HangSeen) -> None:
    """The child gives no sign of life: whoever started it is to end it."""
    server = step.house.server
    if command.generation == server.generation and server.state in UP:
        step.emit(e.ServerHung(generation=command.generation, silent_s=command.silent_s))


def read_pressure(step: Step, command: c.PressureRead) -> None:
    """A reading of the slots; an event only when the figures moved."""
    resident = Cells(sum(cells for _, cells, _ in command.slots))
    busy = sum(1 for _, _, working in command.slots if working)
    if resident != step.house.resident_read:
        step.emit(e.PoolRead(resident=resident, busy=busy))
    if step.house.server.parks and not step.house.server.notices:
        _see_parks(step, command)


def _see_parks(step: Step, command: c.PressureRead) -> None:
    """A build that parks in silence is read slot by slot: nobody's park excuses another."""
    for lease in list(step.house.leases.values()):
        away = any(slot in command.parked for slot in lease.slots)
        if lease.state == RUNNING and away != lease.away:
            step.emit(e.ParkSeen(request=lease.request, away=away))
