"""Facts about the server: ordered, planned, started, probed, ended. Part of ``events``."""

from __future__ import annotations

import msgspec

from kvalet.protocol.commands import Load, MemoryFigure
from kvalet.protocol.ids import Cells


class Event(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True
):
    """Base of all events: immutable, tagged by hand, strict about its fields."""


class LoadOrdered(Event, frozen=True, kw_only=True, tag="load.ordered"):
    """A server is to run with these settings from now on, as ``generation``."""

    generation: int
    load: Load


class LoadDropped(Event, frozen=True, kw_only=True, tag="load.dropped"):
    """No server is to run until the next load."""

    generation: int


class ServerPlanned(Event, frozen=True, kw_only=True, tag="server.planned"):
    """A launch is about to happen: ``native_ctx`` is what the model was trained for, ``max_ctx``
    the most that is planned to fit; 0: not known."""

    generation: int
    argv: tuple[str, ...]
    warnings: tuple[tuple[str, str], ...] = ()
    native_ctx: Cells = Cells(0)
    max_ctx: Cells = Cells(0)


class ServerSpawned(Event, frozen=True, kw_only=True, tag="server.spawned"):
    """The child process exists."""

    generation: int
    pid: int
    url: str


class ServerReady(Event, frozen=True, kw_only=True, tag="server.ready"):
    """The server answers; the pool is open for leases. ``parks``: it parks chats by itself, and
    ``notices``: it says so in their streams."""

    generation: int
    url: str
    build: str
    model: str
    cells: Cells
    slots: int
    headroom: Cells
    pid: int | None = None
    parks: bool = False
    notices: bool = False
    given: tuple[str, ...] = ()
    drafting: tuple[str, ...] = ()
    drafting_asked: tuple[str, ...] = ()
    split: str = ""


class ServerWeighed(Event, frozen=True, kw_only=True, tag="server.weighed"):
    """What the server allocated, figure by figure beside what was planned."""

    generation: int
    figures: tuple[MemoryFigure, ...]
    exact: bool


class ExactJudged(Event, frozen=True, kw_only=True, tag="exact.judged"):
    """Who parks on this launch (``mode``), and whether exact concurrency is certified: ``on``,
    ``off``, or ``unavailable`` with the reason."""

    generation: int
    mode: str
    state: str
    reason: str = ""


class ServerProbed(Event, frozen=True, kw_only=True, tag="server.probed"):
    """A probe settled how chats are parked on this server."""

    generation: int
    method: str
    saved: Cells = Cells(0)
    reused: Cells = Cells(0)
    detail: str = ""


class ServerExited(Event, frozen=True, kw_only=True, tag="server.exited"):
    """The child is gone."""

    generation: int
    code: int
    planned: bool
    reason: str = ""
    cause: str = ""


class ServerHung(Event, frozen=True, kw_only=True, tag="server.hung"):
    """The child lives and gives no sign of it: it is to be ended."""

    generation: int
    silent_s: float


class ServerFellBack(Event, frozen=True, kw_only=True, tag="server.fell_back"):
    """The load gives something up, from ``generation`` on: its drafter, the split by tensor, a
    part of its context. What was asked for stays known; a fresh load tries it again."""

    generation: int
    given: str
    reason: str


class ServerRestarted(Event, frozen=True, kw_only=True, tag="server.restarted"):
    """A server is started again as ``generation``, ``wait_s`` seconds from now.

    ``attempt`` counts the restarts that are remembered (``Settings.restart_window_s``), this
    one included.
    """

    generation: int
    attempt: int
    wait_s: float
