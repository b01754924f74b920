"""Uses a llama-server that somebody else runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec
import trio

from kvalet.actors.server import Server, open_client, read_props
from kvalet.protocol.commands import Command, ReadySeen
from kvalet.protocol.errors import ConfigFault, EnvironmentFault
from kvalet.protocol.ids import Cells

_ATTACH_TIMEOUT_S: Final = 10.0


class _Slot(msgspec.Struct, frozen=True):
    n_ctx: int = 0


async def run(
    url: str,
    ctx: int | None,
    parallel: int | None,
    reports: trio.MemorySendChannel[Command],
    *,
    env: Mapping[str, str] | None = None,
    generation: int = 1,
    transport: httpx.AsyncBaseTransport | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Use a server that somebody else runs: report ReadySeen, then stay until cancelled.

    ``ctx`` is its pool in cells; without it one slot's share is taken, which fits any
    server. ``parallel`` may use fewer slots than it has. KVALET_UPSTREAM_KEY is its API
    key. Closes ``reports``. Raises EnvironmentFault when the server does not answer as
    needed, ConfigFault when the address or the key is wrong.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigFault(f"--attach wants an address like http://127.0.0.1:8080, not {url!r}")
    env = os.environ if env is None else env
    server = Server(
        url=url.rstrip("/"), api_key=env.get("KVALET_UPSTREAM_KEY", ""), generation=generation
    )
    async with reports:
        async with open_client(
            server.url, server.api_key, timeout_s=_ATTACH_TIMEOUT_S, transport=transport
        ) as client:
            await _ask(client, "/health")
            props = read_props(await _ask(client, "/props"))
            slots = await _ask_slots(client)
        seats = min(parallel or len(slots), len(slots))
        await reports.send(
            ReadySeen(
                generation=generation,
                url=server.url,
                build=props.build,
                model=props.model,
                cells=Cells(ctx or min(slot.n_ctx for slot in slots)),
                slots=seats,
                headroom=Cells(seats),
            )
        )
        task_status.started(server)
        await trio.sleep_forever()


async def _ask(client: httpx.AsyncClient, path: str) -> bytes:
    try:
        answer = await client.get(path)
    except httpx.TransportError as error:
        raise EnvironmentFault(
            f"no llama-server answers at {client.base_url}: {type(error).__name__}"
        ) from error
    if answer.status_code == 401:
        raise ConfigFault(f"{client.base_url} wants an API key: set KVALET_UPSTREAM_KEY")
    if answer.status_code != 200:
        raise EnvironmentFault(
            f"{client.base_url} answered {path} with status {answer.status_code}: "
            "it must be a llama-server that is ready and started without --no-slots"
        )
    return answer.content


async def _ask_slots(client: httpx.AsyncClient) -> list[_Slot]:
    body = await _ask(client, "/slots")
    try:
        slots = msgspec.json.decode(body, type=list[_Slot])
    except msgspec.DecodeError as error:
        raise EnvironmentFault(
            f"{client.base_url} is no llama-server: its /slots: {error}"
        ) from error
    if not slots or min(slot.n_ctx for slot in slots) < 1:
        raise EnvironmentFault(f"{client.base_url} lists no usable slots")
    return slots
