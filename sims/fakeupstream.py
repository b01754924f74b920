"""A llama-server in shape only: it answers the routes kvalet needs and streams what it is told.

``python -m kvalet.sims.fakeupstream SLOTS`` listens on a free port, prints its URL and ends
when its stdin does. An answer has as many events as the request's ``max_tokens``, one write
each. The request's ``events_per_s`` paces them (0 or absent: as fast as they can be
written); ``sent_ns`` in an event is the monotonic clock when it was due to be written.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final
from urllib.parse import urlsplit

import msgspec

CELLS: Final = 1 << 24
"""So many that every answer is one leg."""
CHARS_PER_TOKEN: Final = 4
EVENTS_A_TURN: Final = 16

TEXT: Final = " lorem" * 20
_ID: Final = "chatcmpl-0123456789abcdef0123456789abcdef"

_REASONS: Final = {200: b"OK", 404: b"Not Found", 501: b"Not Implemented"}
_HEAD_STREAM: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)


class _Message(msgspec.Struct):
    content: str = ""


class _Chat(msgspec.Struct):
    """The fields of a chat request that matter here."""

    messages: list[_Message] = []
    max_tokens: int = 16
    id_slot: int = 0
    events_per_s: float = 0.0


class _Text(msgspec.Struct):
    content: str = ""


class FakeUpstream:
    """The server's whole state: which of its ``slots`` are busy."""

    def __init__(self, slots: int) -> None:
        self._busy = [0] * slots

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ", 2)
            fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(fields.get("content-length", "0")))
            path = urlsplit(target).path
            if (method, path) == ("POST", "/v1/chat/completions"):
                await self._stream(writer, msgspec.json.decode(body, type=_Chat))
            else:
                _answer(writer, *self._plain(method, path, body))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # A client that has left needs no answer.
        finally:
            writer.close()

    def _plain(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        slot = {"n_ctx": CELLS, "n_prompt_tokens": 0}
        match method, path:
            case "GET", "/health":
                return 200, {"status": "ok"}
            case "GET", "/props":
                share = {"n_ctx": CELLS}
                return 200, {
                    "default_generation_settings": share,
                    "total_slots": len(self._busy),
                    "build_info": "b0-fake",
                    "model_path": "fake.gguf",
                }
            case "GET", "/slots":
                return 200, [
                    {"id": number, "is_processing": bool(busy), **slot}
                    for number, busy in enumerate(self._busy)
                ]
            case "GET", "/v1/models":
                return 200, {"data": [{"id": "fake"}]}
            case "POST", "/apply-template":
                chat = msgspec.json.decode(body, type=_Chat)
                return 200, {"prompt": "\n".join(message.content for message in chat.messages)}
            case "POST", "/tokenize":
                text = msgspec.json.decode(body, type=_Text).content
                return 200, {"tokens": list(range(len(text) // CHARS_PER_TOKEN + 1))}
            case _:
                # Also slot actions and /completion: chats are parked by recompute then.
                status = 501 if method == "POST" else 404
                return status, {"error": {"message": f"no {method} {path} here", "code": status}}

    async def _stream(self, writer: asyncio.StreamWriter, chat: _Chat) -> None:
        slot = chat.id_slot % len(self._busy)
        self._busy[slot] += 1
        try:
            writer.write(_HEAD_STREAM + _chunk(_event(b'{"role":"assistant","content":null}')))
            await _write_events(writer, chat)
        finally:
            self._busy[slot] -= 1
        done = b"data: [DONE]\n\n"
        writer.write(_chunk(_last_event(chat.max_tokens)) + _chunk(done) + b"0\r\n\r\n")


async def _write_events(writer: asyncio.StreamWriter, chat: _Chat) -> None:
    middle = b'{"content":"%b"}' % TEXT.encode()
    interval_s = 1 / chat.events_per_s if chat.events_per_s else 0.0
    started = time.monotonic()
    for number in range(chat.max_tokens):
        if interval_s:
            await asyncio.sleep(started + number * interval_s - time.monotonic())
        elif number % EVENTS_A_TURN == 0:
            await asyncio.sleep(0)
        writer.write(_chunk(_event(middle, b',"sent_ns":%d' % time.monotonic_ns())))
        await writer.drain()


def _event(delta: bytes, more: bytes = b"", finish: bytes = b"null") -> bytes:
    return (
        b'data: {"choices":[{"finish_reason":%b,"index":0,"delta":%b}],"created":1,"id":"%b",'
        b'"model":"fake","object":"chat.completion.chunk"%b}\n\n'
        % (finish, delta, _ID.encode(), more)
    )


def _last_event(tokens: int) -> bytes:
    timings = b',"timings":{"cache_n":0,"prompt_n":1,"predicted_n":%d}' % tokens
    return _event(b"{}", timings, b'"length"')


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _answer(writer: asyncio.StreamWriter, status: int, answer: object) -> None:
    body = msgspec.json.encode(answer)
    head = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\n" % (status, _REASONS[status])
    writer.write(head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)


async def main(slots: int) -> None:
    """Serve until stdin ends."""
    orphaned = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, orphaned.set)
    server = await asyncio.start_server(FakeUpstream(slots).serve, "127.0.0.1", 0, backlog=128)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await orphaned.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
