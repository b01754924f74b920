"""The Responses dialect beside llama-server's own: the same request, asked on both surfaces."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvalet.protocol.errors import ClientFault
from kvalet.protocol.responses import Stream, to_chat, whole
from kvalet.protocol.sse import SseSplitter
from tests.protocol.responses_truth import (
    FLAGS,
    REQUESTS,
    TEMPLATE,
    Json,
    differences,
    payloads,
)
from tests.real.clients import ONE_THREAD, llama_server

pytestmark = pytest.mark.real

RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"
LIMIT = "max_output_tokens"
CAP = 22
"""The most tokens of one answer here: all of a call, and no more of a second one."""
LEFT_OUT = {"turns", "instructions", "stop_begun", "tool_cut_short"}
"""Requests that others are like, and that would only take longer."""
WHOLE = ("text", "empty", "thought_cut_short")
"""The requests that are also asked without a stream."""

Ask = Callable[[str, bytes], Awaitable[httpx.Response]]

REFUSED: list[Json] = [
    {},
    {"input": 5},
    {"input": [{}]},
    {"input": [{"role": "assistant", "content": "a"}]},
    {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
    {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
    {"input": [{"type": "reasoning", "summary": [], "content": []}]},
    {"input": "x", "previous_response_id": "resp_1"},
    {"input": "x", "tools": None},
    {"input": "x", "max_output_tokens": "5"},
]


@asynccontextmanager
async def asking(state_dir: Path) -> AsyncGenerator[Ask]:
    """A server with thoughts and tools, and a way to ask it."""
    template = state_dir / "template.jinja"
    template.write_text(TEMPLATE)
    flags = (*ONE_THREAD, "--swa-full", *FLAGS, str(template))
    async with (
        llama_server(state_dir, ctx=1024, parallel=1, extra_args=flags) as server,
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
    ):
        headers = {"Authorization": f"Bearer {server.api_key}", "Connection": "close"}

        async def ask(path: str, body: bytes) -> httpx.Response:
            return await client.post(server.url + path, content=body, headers=headers)

        yield ask


async def test_both_surfaces_tell_the_same_answers_and_refuse_the_same(tmp_path: Path) -> None:
    async with asking(tmp_path) as ask:
        await check_refusals(ask)
        for name in (one for one in REQUESTS if one not in LEFT_OUT):
            request = REQUESTS[name]
            capped = {**request, LIMIT: min(CAP, request.get(LIMIT, CAP))}
            # The first to ask has to compute the prompt that the others reuse.
            await ask(RESPONSES, json.dumps({**capped, LIMIT: 1}).encode())
            found = await differences_of_streams(ask, {**capped, "stream": True})
            if name in WHOLE:
                found += await differences_of_answers(ask, capped)
            assert found == [], name


async def check_refusals(ask: Ask) -> None:
    """What the server refuses is refused before it is asked."""
    for request in REFUSED:
        body = json.dumps(request).encode()
        assert (await ask(RESPONSES, body)).status_code == 400, request
        with pytest.raises(ClientFault):
            to_chat(body)


async def differences_of_streams(ask: Ask, request: Json) -> list[str]:
    """Where the streamed answers are not the same."""
    body = json.dumps(request).encode()
    real = payloads((await ask(RESPONSES, body)).content)
    chat = (await ask(CHAT, to_chat(body))).content
    stream = Stream()
    ours = [stream.feed(event.data) for event in SseSplitter().feed(chat) if event.data]
    return differences(real, payloads(b"".join([*ours, stream.close()])))


async def differences_of_answers(ask: Ask, request: Json) -> list[str]:
    """Where the answers that come whole are not the same."""
    body = json.dumps(request).encode()
    real = (await ask(RESPONSES, body)).json()
    ours = whole((await ask(CHAT, to_chat(body))).content)
    return differences([real], [json.loads(ours)])
