"""The server's part of ``evolve``: what a launch, its readiness and its end change.

Cells live and die with the server's process, so the pool's figures do too.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvalet.actors.decisions.state import House, Server
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos

NANOS = 1_000_000_000
ORDERED = ("restarting", "unloaded")

LaunchEvent = (
    e.ServerPlanned
    | e.ServerSpawned
    | e.ServerReady
    | e.ServerWeighed
    | e.ExactJudged
    | e.ServerProbed
    | e.ServerExited
)
OrderEvent = e.ServerHung | e.ServerFellBack | e.ServerRestarted | e.LoadOrdered | e.LoadDropped
ServerEvent = LaunchEvent | OrderEvent


def opened(house: House, event: e.HouseOpened, at_ns: Nanos) -> House:
    """A process took over: no server yet, and nothing of the former one's pool."""
    return replace(_emptied(house), settings=event.settings, server=Server())


def _emptied(house: House) -> House:
    return replace(
        house,
        cells=Cells(0),
        slots=0,
        headroom=Cells(0),
        residue={},
        residue_total=Cells(0),
        erasing={},
        resident_read=Cells(0),
    )


def changed(house: House, event: LaunchEvent, at_ns: Nanos) -> House:
    """The house after something happened to the server."""
    server = house.server
    match event:
        case e.ServerPlanned():
            server = Server(
                generation=event.generation,
                warnings=event.warnings,
                native_ctx=event.native_ctx,
                max_ctx=event.max_ctx,
                wanted=server.wanted,
                ends=server.ends,
                load=server.load,
                given=server.given,
                drafting_asked=server.drafting_asked,
            )
            return replace(house, server=server)
        case e.ServerSpawned():
            return replace(house, server=replace(server, pid=event.pid, url=event.url))
        case e.ServerReady():
            server = replace(
                server,
                generation=event.generation,
                pid=event.pid,
                url=event.url,
                build=event.build,
                model=event.model,
                state="probing",
                parks=event.parks,
                notices=event.notices,
                given=event.given or server.given,
                drafting=event.drafting,
                drafting_asked=event.drafting_asked,
                split=event.split,
            )
            return replace(
                _emptied(house),
                server=server,
                cells=event.cells,
                slots=event.slots,
                headroom=event.headroom,
            )
        case e.ServerWeighed():
            return replace(house, server=replace(server, memory=event.figures))
        case e.ExactJudged():
            told = (("exact-unavailable", event.reason),) if event.reason else ()
            server = replace(server, exact=event.state, warnings=(*server.warnings, *told))
            return replace(house, server=server)
        case e.ServerProbed():
            return replace(
                house, server=replace(server, state="ready"), method=event.method, misses=0
            )
        case e.ServerExited():
            ended = "stopped" if event.planned else "failed"
            # One that was ended for another, or for none, leaves what was ordered as it is.
            state = server.state if server.state in ORDERED else ended
            server = replace(server, state=state, pid=None, reason=event.reason, cause=event.cause)
            return replace(_emptied(house), server=server)


def ordered(house: House, event: OrderEvent, at_ns: Nanos) -> House:
    """The house after it was settled which server runs next."""
    server = house.server
    match event:
        case e.LoadOrdered():
            server = Server(
                state="restarting",
                generation=server.generation,
                pid=server.pid,
                wanted=event.generation,
                load=event.load,
            )
            return replace(_emptied(house), server=server)
        case e.LoadDropped():
            server = replace(server, state="unloaded", wanted=event.generation, reason="")
            return replace(_emptied(house), server=server)
        case e.ServerFellBack():
            return replace(house, server=replace(server, given=(*server.given, event.given)))
        case e.ServerHung():
            return replace(house, server=replace(server, state="hung"))
        case e.ServerRestarted():
            server = replace(
                server,
                state="restarting",
                wanted=event.generation,
                due_ns=Nanos(at_ns + round(event.wait_s * NANOS)),
                ends=(*server.ends[len(server.ends) + 1 - event.attempt :], at_ns),
            )
            totals = replace(house.totals, restarts=house.totals.restarts + 1)
            return replace(house, server=server, totals=totals)


def pool_read(house: House, event: e.PoolRead, at_ns: Nanos) -> House:
    """What the server said it holds."""
    return replace(house, resident_read=event.resident)


def demoted(house: House, event: e.MethodDemoted, at_ns: Nanos) -> House:
    """Saving did not pay: from now on parked chats are computed again."""
    return replace(house, method="recompute", misses=0)
