"""A llama-server in the same process whose every answer is known beforehand.

One token is one byte of UTF-8. The model's whole answer to any prompt is ``answer``; a
continued prompt goes on where its text stands. Cells, slots, saved files and the way a
server holds text back are played; faults come when a test asks for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import httpx
import msgspec
import trio

from tests.actors.misbehaviour import HARMLESS, HOURS_S, misbehave

OPEN, CLOSE = "<think>", "</think>"
SEAT = "<assistant>"
Json = dict[str, Any]
Outcome = Callable[[], httpx.Response | Exception | None]


@attrs.define
class Slot:
    """One seat: the tokens in its cells, and until when it is busy."""

    tokens: list[int] = attrs.field(factory=list[int])
    busy: bool = False
    idle: trio.Event = attrs.field(factory=trio.Event)
    released: trio.Event = attrs.field(factory=trio.Event)
    streams: bool = False

    def take(self, *, streams: bool = False) -> None:
        self.busy, self.streams, self.idle = True, streams, trio.Event()

    def let_go(self) -> None:
        self.busy = self.streams = False
        self.idle.set()


class Wire(httpx.AsyncByteStream):
    """The body of one streamed answer; closing it is how a client leaves."""

    def __init__(self, pieces: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        self._pieces = pieces
        self._on_close = on_close

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            yield piece

    async def aclose(self) -> None:
        self._on_close()


@attrs.define(eq=False)
class ScriptedServer(httpx.AsyncBaseTransport):
    """``faults`` maps a route's beginning to what it answers next, once each (None: it hangs);
    ``legs`` maps a leg's number (0 is the first streamed request of all) to what goes wrong."""

    nursery: trio.Nursery
    slot_dir: Path
    cells: int
    slots: list[Slot]
    answer: bytes = b"abcdefghijklmnopqrstuvwxyz" * 3
    thought: bytes = b""
    token_s: float = 0.01
    prefill_s: float = 0.02
    action_s: float = 0.05
    abort_s: float = 0.3
    can_erase: bool = True
    forgets_erases: bool = False
    keeps_half_stops: bool = False
    faults: list[tuple[str, Outcome]] = attrs.field(factory=list[tuple[str, Outcome]])
    legs: dict[int, str] = attrs.field(factory=dict[int, str])
    begun: int = 0
    bodies: list[Json] = attrs.field(factory=list[Json])
    headers: list[httpx.Headers] = attrs.field(factory=list[httpx.Headers])
    targets: list[str] = attrs.field(factory=list[str])
    broken_rules: list[str] = attrs.field(factory=list[str])
    saved: dict[str, list[int]] = attrs.field(factory=dict[str, list[int]])

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        target = request.url.raw_path.decode()
        route = f"{request.method} {target}"
        self.headers.append(request.headers)
        self.targets.append(str(request.url))
        await trio.lowlevel.checkpoint()
        for number, (prefix, outcome) in enumerate(self.faults):
            if route.startswith(prefix):
                del self.faults[number]
                given = outcome()
                if given is None:
                    await trio.sleep(request.extensions["timeout"]["read"])
                    raise httpx.ReadTimeout("silence")
                if isinstance(given, Exception):
                    raise given
                return given
        fields: Json = msgspec.json.decode(body) if body else {}
        if request.url.path in ("/v1/chat/completions", "/v1/completions"):
            return self._begin(request.url.path, fields)
        if request.url.path.startswith("/slots/"):
            return await self._act(int(request.url.path[7:]), request.url.params["action"], fields)
        return self._plain(request.url.path, fields)

    def _plain(self, path: str, fields: Json) -> httpx.Response:
        match path:
            case "/apply-template":
                return httpx.Response(200, json={"prompt": rendered(fields)})
            case "/tokenize":
                return httpx.Response(200, json={"tokens": list(fields["content"].encode())})
            case "/slots":
                slots = [
                    {"id": n, "is_processing": slot.busy, "n_prompt_tokens": len(slot.tokens)}
                    for n, slot in enumerate(self.slots)
                ]
                return httpx.Response(200, json=slots)
            case "/completion":
                slot = self.slots[int(fields["id_slot"])]
                slot.tokens = list(fields["prompt"].encode()) + [0] * int(fields["n_predict"])
                slot.released.set()
                return httpx.Response(200, json={"content": ""})
            case _:
                return httpx.Response(404, json={"error": {"message": "no such route"}})

    # -- slot actions ----------------------------------------------------------------

    async def _act(self, number: int, action: str, fields: Json) -> httpx.Response:
        if not self.can_erase and action == "erase":
            return httpx.Response(501, json={"error": {"message": "not here"}})
        done = trio.Event()
        answers: list[Json] = []
        # The server goes on with it, whether or not its client is still there.
        self.nursery.start_soon(self._do, number, action, fields, answers, done)
        await done.wait()
        return httpx.Response(200, json=answers[0])

    async def _do(
        self, number: int, action: str, fields: Json, answers: list[Json], done: trio.Event
    ) -> None:
        slot = self.slots[number]
        if self.forgets_erases and action == "erase" and slot.busy:
            slot.released = trio.Event()
            await slot.released.wait()
        while slot.busy:
            await slot.idle.wait()
        slot.take()
        await trio.sleep(self.action_s)
        name = fields.get("filename", "")
        answer: Json = {"id_slot": number}
        if action == "save":
            self.saved[name] = list(slot.tokens)
            (self.slot_dir / name).write_bytes(bytes(slot.tokens))
            answer |= {"n_saved": len(slot.tokens), "n_written": len(slot.tokens)}
        elif action == "restore":
            slot.tokens = list(self.saved[name])
            answer |= {"n_restored": len(slot.tokens)}
        else:
            slot.tokens = []
        slot.let_go()
        answers.append(answer)
        done.set()

    # -- streams ---------------------------------------------------------------------

    def _begin(self, path: str, fields: Json) -> httpx.Response:
        leg, self.begun = self.begun, self.begun + 1
        self.bodies.append(fields)
        fault = self.legs.get(leg, "")
        if fault == "400":
            refused = {"error": {"message": "no\n\ndata: [DONE]\n\n", "code": 400, "x": 1}}
            return httpx.Response(400, json=refused)
        slot = self.slots[int(fields["id_slot"])]
        if slot.busy:
            self.broken_rules.append(f"leg {leg} in a busy slot")
        slot.take(streams=True)
        chat = path.startswith("/v1/chat")
        prompt = rendered(fields) if chat else fields["prompt"]
        state = [False]

        def closed() -> None:
            if state[0]:
                slot.let_go()
            else:
                self.nursery.start_soon(self._notice_abort, slot)

        wire = Wire(self._generate(slot, fields, prompt.encode(), leg, fault, chat, state), closed)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=wire)

    async def _notice_abort(self, slot: Slot) -> None:
        await trio.sleep(self.abort_s)
        slot.let_go()

    async def _generate(
        self,
        slot: Slot,
        fields: Json,
        prompt: bytes,
        leg: int,
        fault: str,
        chat: bool,
        state: list[bool],
    ) -> AsyncIterator[bytes]:
        shared = 0
        for ours, theirs in zip(prompt, slot.tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        shared = min(shared, len(prompt) - 1)
        slot.tokens = slot.tokens[:shared]
        if fields.get("return_progress"):
            progress = {"total": len(prompt), "cache": shared, "processed": shared}
            yield data({"choices": [], "prompt_progress": progress, **self._name(leg)})
        if fault == "mute":
            await trio.sleep(HOURS_S)
        if fault == "slow-prefill":
            await trio.sleep(150)
        if fault == "early-park":
            async for piece in misbehave("long-park"):
                yield piece
        await trio.sleep(self.prefill_s)
        slot.tokens = list(prompt)
        voice = Voice(fields, chat, self._name(leg))
        if chat:
            yield voice.role()
        whole = (
            OPEN.encode() + self.thought + CLOSE.encode() if self.thought else b""
        ) + self.answer
        at = len(prompt.partition(SEAT.encode())[2])
        reason, made = "length", 0
        for made in range(1, int(fields["max_tokens"]) + 1):
            if at + made > len(whole):
                reason, made = "stop", made - 1
                break
            if fault and made == 3:
                async for piece in misbehave(fault):
                    yield piece
                if fault not in HARMLESS:
                    state[0] = True
                    slot.let_go()
                    return
            await trio.sleep(self.token_s)
            slot.tokens.append(whole[at + made - 1])
            self._fit(f"leg {leg} of {fields['max_tokens']} at {made}")
            piece, stopped = voice.say(whole[:at], whole[at : at + made])
            if piece:
                yield piece
            if stopped:
                reason = "stop"
                break
        if reason == "stop" or not self.keeps_half_stops:
            rest = voice.rest(whole[:at], whole[at : at + made])
            if rest:
                yield rest
        timings = {"cache_n": shared, "prompt_n": len(prompt) - shared, "predicted_n": made}
        state[0] = True
        slot.let_go()
        if fault == "no-finish":
            return
        yield voice.last(reason, {} if fault == "no-timings" else {"timings": timings})
        yield b"data: [DONE]\n\n"

    def _fit(self, where: str) -> None:
        """Idle slots are purged when their cells are needed; what streams must fit by itself."""
        for slot in self.slots:
            if sum(len(one.tokens) for one in self.slots) > self.cells and not slot.streams:
                slot.tokens = []
        held = [len(one.tokens) for one in self.slots]
        if sum(held) > self.cells:
            self.broken_rules.append(f"Context size has been exceeded: {where}: {held}")

    def _name(self, leg: int) -> Json:
        return {"id": f"chatcmpl-{leg}", "created": 1000 + leg}


class Voice:
    """Turns the tokens of one leg into events, holding back as a server does."""

    def __init__(self, fields: Json, chat: bool, name: Json) -> None:
        self._chat = chat
        self._name = name
        stops: str | list[str] = fields.get("stop") or []
        self._stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
        self._said = 0
        self.stopped = False

    def role(self) -> bytes:
        return self._event({"delta": {"role": "assistant", "content": None}})

    def say(self, before: bytes, made: bytes) -> tuple[bytes, bool]:
        """What may be sent after ``made``, and whether a stop string ends the answer."""
        text = made.decode(errors="ignore")
        stopped = False
        for stop in self._stops:
            cut = text.find(stop)
            if cut >= 0:
                text, stopped = text[:cut], True
                self.stopped = True
        if not stopped:
            for stop in self._stops:
                for size in range(len(stop) - 1, 0, -1):
                    if text.endswith(stop[:size]):
                        text = text[:-size]
                        break
        fresh, self._said = text[self._said :], max(self._said, len(text))
        if not fresh:
            return b"", stopped
        return self._spoken(before + made[: len(text.encode())], fresh), stopped

    def rest(self, before: bytes, made: bytes) -> bytes:
        """What was held back, now that no more is to come."""
        if self.stopped:
            return b""
        fresh = made.decode(errors="ignore")[self._said :]
        return self._spoken(before + made, fresh) if fresh else b""

    def _spoken(self, so_far: bytes, fresh: str) -> bytes:
        if not self._chat:
            return self._event({"text": fresh})
        whole = so_far.decode(errors="ignore")
        earlier = split(whole[: len(whole) - len(fresh)])
        now = split(whole)
        delta = {
            "reasoning_content": now[0][len(earlier[0]) :],
            "content": now[1][len(earlier[1]) :],
        }
        delta = {name: text for name, text in delta.items() if text}
        return self._event({"delta": delta}) if delta else b""

    def last(self, reason: str, more: Json) -> bytes:
        choice: Json = {"delta": {}} if self._chat else {"text": ""}
        return self._event({**choice, "finish_reason": reason}, more)

    def _event(self, choice: Json, more: Json | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        choices = [{"finish_reason": None, "index": 0, **choice}]
        return data({"choices": choices, "object": kind, **self._name, **(more or {})})


def split(text: str) -> tuple[str, str]:
    """The thought and the content in what a model has said so far."""
    if not text.startswith(OPEN[: len(text)]):
        return "", text
    thought, closed, content = text.removeprefix(OPEN).partition(CLOSE)
    if len(text) < len(OPEN):
        return "", ""
    if not closed:
        for size in range(len(CLOSE) - 1, 0, -1):
            if thought.endswith(CLOSE[:size]):
                return thought[:-size], ""
    return thought, content


def rendered(fields: Json) -> str:
    """A chat under the simplest template there is."""
    *before, last = fields["messages"]
    text = "".join(f"<{one['role']}>{one['content']}" for one in before)
    going_on = fields.get("continue_final_message")
    if not going_on:
        return f"{text}<{last['role']}>{last['content']}{SEAT}"
    thought = last.get("reasoning_content", "")
    if going_on == "reasoning_content":
        return f"{text}{SEAT}{OPEN}{thought}"
    return f"{text}{SEAT}" + (f"{OPEN}{thought}{CLOSE}" if thought else "") + str(last["content"])


def data(fields: Json) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
