"""The Anthropic dialect against llama-server's own: the same request at both of its surfaces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio

from kvalet.actors.server import Server
from kvalet.protocol import anthropic
from kvalet.protocol.openai import CHAT, Assembler, KvaletUsage, Totals, read_chunk
from kvalet.protocol.sse import SseEvent, SseSplitter
from tests.real.clients import ONE_THREAD, llama_server

pytestmark = pytest.mark.real

GOLDEN = Path(__file__).parents[1] / "protocol" / "golden"
TEMPLATE = GOLDEN / "anthropic_template.jinja"
"""A chat template that knows tools and thoughts, which the demo model's own does not."""

MESSAGES, CHATS = "/v1/messages", "/v1/chat/completions"
SHORT, LONG = 6, 12
"""Tokens: a longer answer is compared as a stream only, and no longer than this."""

ALIKE = {"no_limit_of_its_own", "a_thought_and_two_tools"}
"""Cases that differ from others only in what is cut off here."""

Json = dict[str, Any]


class Case(msgspec.Struct):
    """A request whose answers have been recorded once; here they are asked for again."""

    case: str
    request: Json


def cases() -> list[Case]:
    """What the recorded answers were answers to."""
    lines = (GOLDEN / "anthropic_answers.jsonl").read_bytes().splitlines()
    recorded = [msgspec.json.decode(line, type=Case) for line in lines]
    return [one for one in recorded if one.case not in ALIKE]


def neutral(answer: bytes) -> bytes:
    """``answer`` with the names that are made up for each one replaced by their order."""
    names: dict[bytes, bytes] = {}

    def renamed(found: re.Match[bytes]) -> bytes:
        return names.setdefault(found[0], b'"id":"%d"' % len(names))

    return re.sub(rb'"id":"(chatcmpl-)?\w{32}"', renamed, answer)


class Asker:
    """One server, asked at whichever surface."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def post(self, path: str, body: bytes) -> bytes:
        """What is answered, with neutral names."""
        answer = await self._client.post(path, content=body)
        assert answer.status_code == 200, answer.text
        return neutral(answer.content)

    async def messages(self, request: Json) -> bytes:
        """The answer of the server's own surface."""
        return await self.post(MESSAGES, msgspec.json.encode(request))

    async def chat(self, request: Json) -> list[bytes]:
        """The chunks of the chat that the request is made into."""
        stream = await self.post(CHATS, anthropic.to_chat(msgspec.json.encode(request)))
        payloads = [event.data for event in SseSplitter().feed(stream) if event.data]
        assert payloads.pop() == b"[DONE]"
        return payloads


def streamed(chunks: list[bytes], totals: Totals) -> bytes:
    """The dialect's stream of a chat."""
    stream = anthropic.Stream()
    stream.count(totals.prompt, totals.cached)
    return b"".join(map(stream.feed, chunks)) + stream.close()


def whole(chunks: list[bytes], totals: Totals) -> Json:
    """The dialect's whole answer of a chat, less what only kvalet tells."""
    assembler = Assembler(CHAT)
    for chunk in chunks:
        assembler.add(chunk)
    answer: Json = msgspec.json.decode(anthropic.whole(assembler.result(totals, KvaletUsage())))
    del answer["usage"]["kvalet"]
    return answer


def totals_of(chunks: list[bytes]) -> Totals:
    """The figures of the chat's usage chunk."""
    timings = read_chunk(chunks[-1]).timings
    assert timings is not None
    return Totals().after(timings)


def parsed(stream: bytes) -> list[tuple[bytes | None, Json]]:
    """The events of a stream: names, and what is in them."""

    def payload(event: SseEvent) -> Json:
        read: Json = msgspec.json.decode(event.data or b"")
        return read

    return [(event.event, payload(event)) for event in SseSplitter().feed(stream)]


async def compare(asker: Asker, request: Json) -> None:
    """Both surfaces give the same answer to ``request``, streamed and, if short, whole."""
    limit = min(request.get("max_tokens", SHORT), LONG)
    streaming = {**request, "max_tokens": limit, "stream": True}
    # What is found in the cache decides about the last bits of what is computed.
    await asker.messages({**request, "max_tokens": 2})
    theirs = parsed(await asker.messages(streaming))
    chunks = await asker.chat(streaming)
    totals = totals_of(chunks)
    assert parsed(neutral(streamed(chunks, totals))) == theirs
    if limit <= SHORT:
        answer = msgspec.json.decode(await asker.messages({**request, "max_tokens": limit}))
        assert whole(chunks, totals) == answer


async def compare_refusals(client: httpx.AsyncClient) -> None:
    """A refused chat is told with the words and figures of the server's own surface."""
    request: Json = {"messages": [{"role": "user", "content": "word " * 600}]}
    refused = await client.post(MESSAGES, json=request)
    chat = await client.post(CHATS, content=anthropic.to_chat(msgspec.json.encode(request)))
    assert chat.status_code == refused.status_code == 400
    theirs = refused.json()["error"]
    told = msgspec.json.decode(anthropic.refusal_body(chat.content, status=400))
    assert told["error"] == {
        "type": "invalid_request_error",
        "message": theirs["message"],
        "n_prompt_tokens": theirs["n_prompt_tokens"],
        "n_ctx": theirs["n_ctx"],
    }


def client_of(server: Server) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {server.api_key}", "Connection": "close"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=None, trust_env=False)


async def test_the_dialect_says_what_the_server_says_at_its_own_surface(tmp_path: Path) -> None:
    flags = (*ONE_THREAD, "--chat-template-file", str(TEMPLATE))
    async with (
        llama_server(tmp_path, parallel=1, extra_args=flags) as server,
        client_of(server) as client,
    ):
        for case in cases():
            with trio.fail_after(60):
                await compare(Asker(client), case.request)
        await compare_refusals(client)
