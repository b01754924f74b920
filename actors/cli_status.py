"""``kvalet status``: another kvalet's status document, for a person."""

from __future__ import annotations

from typing import Final

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvalet.actors.cli_tables import coloured, new_table
from kvalet.actors.render import printable
from kvalet.protocol.errors import EnvironmentFault

TIMEOUT_S: Final = 5.0
_BAR_CELLS: Final = 40


class _Server(msgspec.Struct, frozen=True):
    state: str = "unknown"
    pid: int | None = None
    generation: int = 0
    build: str = ""
    model: str = ""
    slots: int = 0
    reason: str = ""


class _Pool(msgspec.Struct, frozen=True):
    cells: int = 0
    granted: int = 0
    resident: int = 0
    parked: int = 0
    idle: int = 0
    headroom: int = 0


class _Lease(msgspec.Struct, frozen=True):
    request: str = ""
    surface: str = ""
    state: str = ""
    prompt: int = 0
    generated: int = 0
    granted: int = 0
    parks: int = 0
    resumes: int = 0
    recomputes: int = 0
    age_s: float = 0.0
    parked_s: float = 0.0


class _Waiting(msgspec.Struct, frozen=True):
    request: str = ""
    position: int = 0
    waiting_s: float = 0.0


class _Warning(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""


class _JournalPlace(msgspec.Struct, frozen=True):
    path: str = ""
    seq: int = 0


class StatusDocument(msgspec.Struct, frozen=True):
    """What this command reads of ``/kvalet/status``; fields it does not know are let be."""

    version: str
    mode: str = ""
    park_method: str = ""
    server: _Server = _Server()
    pool: _Pool = _Pool()
    leases: list[_Lease] = []
    queue: list[_Waiting] = []
    totals: dict[str, int] = {}
    warnings: list[_Warning] = []
    journal: _JournalPlace = _JournalPlace()


def fetch(url: str, api_key: str | None, client: httpx.Client | None = None) -> bytes:
    """The status document of the kvalet at ``url``. Raises EnvironmentFault."""
    address = url.rstrip("/") + "/kvalet/status"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        if client is None:
            with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as opened:
                answer = opened.get(address, headers=headers)
        else:
            answer = client.get(address, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(url, error) from error
    check_answer(url, answer.status_code)
    return answer.content


def unreachable(url: str, error: Exception) -> EnvironmentFault:
    """Nobody answers at ``url``; what a person can do about it."""
    why = str(error) or type(error).__name__
    return EnvironmentFault(
        f"no kvalet answers at {url} ({why}): start one with kvalet serve, or name its URL"
    )


def check_answer(url: str, status: int) -> None:
    """Raises EnvironmentFault unless ``status`` is 200."""
    if status == 401:
        raise EnvironmentFault(f"{url} wants an API key: pass --api-key-file FILE")
    if status != 200:
        raise EnvironmentFault(f"{url} is no kvalet: it answered with status {status}")


def read_status(url: str, body: bytes) -> StatusDocument:
    """The document in ``body``. Raises EnvironmentFault when it is another server's."""
    try:
        return msgspec.json.decode(body, type=StatusDocument)
    except msgspec.DecodeError as error:
        raise EnvironmentFault(f"{url} is no kvalet: {error}") from error


def show(console: Console, document: StatusDocument) -> None:
    """Print ``document`` for a person."""
    console.print(status_view(document))


def status_view(document: StatusDocument) -> RenderableType:
    """The whole document on one screen."""
    parts: list[RenderableType] = [_head(document), pool_bar(document.pool)]
    if document.leases:
        parts.append(_leases(document.leases))
    parts += [
        Text(f"waiting, place {one.position}: {one.request} for {one.waiting_s:.1f} s")
        for one in document.queue
    ]
    totals = ", ".join(f"{count} {name}" for name, count in document.totals.items())
    parts.append(Text(f"totals: {totals or 'none'}"))
    parts += [
        Text(printable(f"warning: {warning.message} ({warning.code})"), style="yellow")
        for warning in document.warnings
    ]
    parts.append(Text(printable(f"journal: {document.journal.path}, seq {document.journal.seq}")))
    return Group(*parts)


def _head(document: StatusDocument) -> Text:
    server = document.server
    pid = f", pid {server.pid}" if server.pid else ""
    reason = f": {server.reason}" if server.reason else ""
    return Text.assemble(
        f"kvalet {document.version}, mode {document.mode}, park method {document.park_method}\n",
        "server ",
        coloured(server.state),
        printable(
            f"{reason}, {server.model} on {server.build}, {server.slots} slots, "
            f"launch {server.generation}{pid}"
        ),
    )


def pool_bar(pool: _Pool) -> Text:
    """The pool as a bar: resident, granted but empty yet, and free cells."""
    size = max(pool.cells, 1)
    resident = min(_BAR_CELLS, round(_BAR_CELLS * pool.resident / size))
    granted = min(_BAR_CELLS - resident, round(_BAR_CELLS * pool.granted / size) - resident)
    granted = max(granted, 0)
    return Text.assemble(
        "pool ",
        ("█" * resident, "green"),
        ("▒" * granted, "yellow"),
        ("·" * (_BAR_CELLS - resident - granted), "dim"),
        f" {pool.granted} of {pool.cells} cells granted, {pool.resident} resident, "
        f"{pool.parked} parked, {pool.idle} idle, headroom {pool.headroom}",
    )


def _leases(leases: list[_Lease]) -> Table:
    numbers = ("prompt", "generated", "granted", "parks", "recomputes", "age", "parked for")
    table = new_table("request", "state", "surface", *numbers, numbers=numbers)
    for lease in leases:
        table.add_row(
            lease.request,
            coloured(lease.state),
            lease.surface,
            str(lease.prompt),
            str(lease.generated),
            str(lease.granted),
            str(lease.parks),
            str(lease.recomputes),
            f"{lease.age_s:.1f} s",
            f"{lease.parked_s:.1f} s",
        )
    return table
