"""llama-server's HTTP side, one connection per request.

The server closes the connection after every stream although it announces keep-alive, so
nothing is pooled (``Connection: close``). Our key is sent, the client's headers are not:
an ``X-Conversation-Id`` would make a generation outlive its client.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat

import attrs
import httpx
import msgspec
import trio

from kvalet.actors.server import Server, open_client
from kvalet.protocol import llama
from kvalet.protocol.errors import ClientFault, KvaletError, ServerFault, ServerLost
from kvalet.protocol.ids import Cells, SlotId
from kvalet.protocol.openai import CHAT, ParsedRequest, Partial, count_bodies, tokenize_body

CONNECT_S = 5.0
ACTION_S = 600.0
"""Slot actions wait for the slot to be idle and for a running prompt batch."""

ERASE_LOOK_S = 2.1
"""Between two looks at the slot of an erase that has no answer. Asking more often would
hide closed connections from the server (see ``wait_idle``)."""

IDLE_LOOKS_S = (0.005, 0.02, 0.1)
IDLE_POLL_S = 1.05


@attrs.frozen
class Saved:
    """What a save moved out: ``cells`` tokens in ``size`` bytes."""

    cells: Cells
    size: int


class UpstreamClient:
    """Requests to one llama-server. Every error is a ClientFault or a ServerFault."""

    def __init__(self, server: Server, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.server = server
        self.can_erase = True
        self._http = open_client(
            server.url, server.api_key, timeout_s=ACTION_S, transport=transport
        )

    async def __aenter__(self) -> UpstreamClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exit_args: object) -> None:
        await self._http.aclose()

    async def call(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = ACTION_S
    ) -> httpx.Response:
        """One whole exchange; any status. Raises ServerFault when there is no answer, and
        ClientFault for a path that cannot be one."""
        try:
            return await self._http.request(
                method,
                path,
                content=body,
                headers={"Content-Type": "application/json"} if body else None,
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            )
        except httpx.InvalidURL as error:
            raise ClientFault(f"not a request target: {error}") from error
        except httpx.HTTPError as error:
            raise ServerLost(f"llama-server did not answer {method} {path}: {error!r}") from error

    async def ask(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = ACTION_S
    ) -> bytes:
        """The body of a 200 answer. 4xx becomes a ClientFault, anything else a ServerFault."""
        response = await self.call(method, path, body, timeout_s)
        if response.status_code == 200:
            return response.content
        message = llama.decode_error(response.content).message
        if 400 <= response.status_code < 500:
            raise ClientFault(message, status=response.status_code)
        raise ServerFault(
            f"{method} {path}: {response.status_code} {message}", status=response.status_code
        )

    async def count(self, request: ParsedRequest, partial: Partial) -> list[int]:
        """The exact tokens of the request's prompts, the answer so far included."""
        tokens: list[int] = []
        for body in count_bodies(request, partial):
            if request.surface == CHAT:
                answer = await self.ask("POST", "/apply-template", body)
                body = tokenize_body(llama.decode_template(answer))
            tokens += llama.decode_tokens(await self.ask("POST", "/tokenize", body))
        return tokens

    async def slots(self, timeout_s: float = ACTION_S) -> list[llama.SlotState]:
        """The state of every slot."""
        return llama.decode_slots(await self.ask("GET", "/slots", timeout_s=timeout_s))

    async def save(self, slot: SlotId, name: str) -> Saved:
        """Copy the slot's cells to a file. Waits until the slot is idle."""
        action = llama.decode_slot_action(
            await self.ask("POST", f"/slots/{slot}?action=save", _file(name))
        )
        return Saved(Cells(action.n_saved), action.n_written)

    async def restore(self, slot: SlotId, name: str) -> Cells:
        """Copy a file's cells into the slot; how many came back."""
        action = llama.decode_slot_action(
            await self.ask("POST", f"/slots/{slot}?action=restore", _file(name))
        )
        return Cells(action.n_restored)

    async def erase(self, slot: SlotId) -> None:
        """Empty the slot. Waits until it is idle, so success proves both.

        llama-server sets an erase of a busy slot aside and takes it up when *some* slot is
        released: of two set aside, one may stay behind for good. One that waits though its
        slot is idle is woken by a release of that very slot.
        """
        fault: KvaletError | None = None
        answered = trio.Event()
        woken: list[SlotId] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wake_erase, slot, answered, woken)
            try:
                await self._erase_once(slot)
            except KvaletError as error:
                fault = error
            answered.set()
        if fault is not None:
            raise fault
        if woken:
            # The last waking may have run after the erase: its own cell goes too.
            await self._erase_once(slot)

    async def _erase_once(self, slot: SlotId) -> None:
        await self.ask("POST", f"/slots/{slot}?action=erase")

    async def _wake_erase(self, slot: SlotId, answered: trio.Event, woken: list[SlotId]) -> None:
        """Until ``answered``: look now and then; run one token where the slot is idle."""
        body = msgspec.json.encode({"prompt": "a", "n_predict": 1, "id_slot": slot})
        while not answered.is_set():
            with trio.move_on_after(ERASE_LOOK_S):
                await answered.wait()
                return
            # The erase itself tells what is wrong with the server.
            with suppress(KvaletError):
                if any(one.id == slot and not one.is_processing for one in await self.slots()):
                    woken.append(slot)
                    await self.ask("POST", "/completion", body)

    async def empty(self, slot: SlotId) -> None:
        """Empty the slot where the server can; elsewhere wait until it is idle.

        An idle slot's cells are purged by the server itself when they are needed.
        """
        if self.can_erase:
            try:
                await self.erase(slot)
                return
            except ServerFault as fault:
                if fault.status_hint != 501:
                    raise
                self.can_erase = False
        await self.wait_idle(slot)

    async def wait_idle(self, slot: SlotId) -> Cells:
        """Return once the slot is idle, with the cells that stay in it.

        After the first looks it is asked at most once a second: the server notices a closed
        connection only in a second without any result, and asking is one.
        """
        for pause_s in chain(IDLE_LOOKS_S, repeat(IDLE_POLL_S)):
            for state in await self.slots():
                if state.id == slot and not state.is_processing:
                    return Cells(state.n_prompt_tokens)
            await trio.sleep(pause_s)
        raise AssertionError("the looks never end")

    def forget(self, name: str) -> None:
        """Delete a saved file; the server never does."""
        if self.server.slot_dir is not None:
            (self.server.slot_dir / name).unlink(missing_ok=True)

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncGenerator[httpx.Response]:
        """One streamed completion. Leaving the block closes the connection."""
        try:
            async with self._http.stream(
                "POST",
                path,
                content=body,
                headers={"Content-Type": "application/json"},
                timeout=httpx.Timeout(None, connect=CONNECT_S),
            ) as response:
                yield response
        except httpx.HTTPError as error:
            raise ServerLost(f"llama-server broke the stream: {error!r}") from error


def _file(name: str) -> bytes:
    return msgspec.json.encode({"filename": name})
