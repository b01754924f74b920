"""A simulated server in this program, and clients who note when each byte came."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import msgspec
import trio

from kvalet.sims.fakeserver.options import read_options
from kvalet.sims.fakeserver.server import SimServer, open_sim
from kvalet.sims.fakeserver.transport import SimTransport

Json = dict[str, Any]
POOL = ("-np", "2", "-kvu", "-c", "2048", "--metrics", "-cram", "0")


@attrs.define
class Guest:
    """One client's answer so far: its chunks, each with when it came."""

    status: int = 0
    opened_at: float = 0.0
    chunks: list[tuple[float, bytes]] = attrs.field(factory=list[tuple[float, bytes]])
    over: bool = False
    broken: str = ""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def raw(self) -> bytes:
        return b"".join(chunk for _, chunk in self.chunks)

    @property
    def blocks(self) -> list[bytes]:
        return [block for block in self.raw.split(b"\n\n") if block]

    @property
    def comments(self) -> list[bytes]:
        return [block for block in self.blocks if block.startswith(b":")]

    @property
    def notices(self) -> list[str]:
        """Comments about parks, keepalives left out."""
        said = [comment[2:].decode() for comment in self.comments if len(comment) > 1]
        return [text for text in said if text != "preempt-keepalive"]

    @property
    def events(self) -> list[Json]:
        lines = [line for block in self.blocks for line in block.split(b"\n")]
        return [
            msgspec.json.decode(line.removeprefix(b"data: "))
            for line in lines
            if line.startswith(b"data: {")
        ]

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.raw)

    @property
    def text(self) -> str:
        return "".join(event.get("content", "") for event in self.events)

    def when(self, text: bytes) -> list[float]:
        """When each chunk that holds ``text`` came."""
        return [at for at, chunk in self.chunks if text in chunk]


@attrs.define(eq=False)
class House:
    """The server, one client of it, and everybody's answers."""

    server: SimServer
    client: httpx.AsyncClient
    nursery: trio.Nursery
    log: list[str]

    def invite(self, body: Json | bytes, path: str = "/completion") -> Guest:
        guest = Guest()
        self.nursery.start_soon(self._serve, guest, path, body)
        return guest

    async def ask(self, body: Json | bytes, path: str = "/completion") -> Guest:
        guest = self.invite(body, path)
        await self.until(lambda: guest.over)
        return guest

    async def _serve(self, guest: Guest, path: str, body: Json | bytes) -> None:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        with guest.scope:
            try:
                async with self.client.stream("POST", path, content=raw) as response:
                    guest.status, guest.opened_at = response.status_code, trio.current_time()
                    async for chunk in response.aiter_raw():
                        guest.chunks.append((trio.current_time(), chunk))
            except httpx.HTTPError as error:
                guest.broken = str(error)
        guest.over = True

    async def until(self, condition: Any, every_s: float = 0.1) -> None:
        with trio.fail_after(100_000):
            while not condition():  # noqa: ASYNC110
                await trio.sleep(every_s)

    async def get(self, path: str) -> Any:
        return (await self.client.get(path)).json()

    async def metric(self, name: str) -> float:
        page = (await self.client.get("/metrics")).text
        values = dict(line.split(" ") for line in page.splitlines() if line[:1] != "#")
        return float(values[f"llamacpp:{name}"])

    def logged(self, text: str) -> list[str]:
        return [line for line in self.log if text in line]


def prompt(number: int, tokens: int) -> list[int]:
    """Ids of a prompt of a size that is its own."""
    return [1024 + number * 1000 + at % 900 for at in range(tokens)]


def streamed(number: int, tokens: int, n_predict: int, **more: Any) -> Json:
    return {"prompt": prompt(number, tokens), "n_predict": n_predict, "stream": True, **more}


@asynccontextmanager
async def house(*argv: str, build: str = "G4", **env: str) -> AsyncGenerator[House]:
    """A pool of 2048 cells for two, unless ``argv`` says otherwise."""
    wishes = {"KVALET_SIM_BUILD": build, "KVALET_SIM_NEIGHBOURS": "0", **env}
    options = read_options((*POOL, *argv), wishes)
    log: list[str] = []
    async with open_sim(options, log.append) as server, trio.open_nursery() as nursery:
        transport = SimTransport(server, nursery)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://sim", timeout=None
        ) as client:
            await trio.sleep(0.1)
            yield House(server, client, nursery, log)
        nursery.cancel_scope.cancel()
