"""Clients for tests against a real llama-server: what a user's program would see."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from kvalet.actors import launcher
from kvalet.actors.app import Handle, serve
from kvalet.actors.binaries import find_model
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.config import Config
from kvalet.actors.decisions.replay import audit
from kvalet.actors.journal import read_journal
from kvalet.actors.server import Server
from kvalet.protocol.commands import Command
from kvalet.protocol.events import AnyEvent

PROMPTS = (
    "Write a long story about a fox and a river.",
    "Explain how rain forms, step by step.",
    "Describe a city in the far future.",
    "Tell me everything about baking bread.",
    "List the planets and say something about each.",
    "What does a lighthouse keeper do all night?",
)


ONE_THREAD = ("-t", "1")
"""Threads that wait for one another crawl on a machine with more to do than cores."""


class Bell:
    """Wakes whoever waits for a client to hear something. Clients may share one."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def ring(self) -> None:
        """Something has been heard."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until ``condition`` holds; it is looked at after every ring."""
        while not condition():
            await self._event.wait()


@dataclass
class Heard:
    """One streamed answer: its text, the data lines as they came, and the comments."""

    status: int = 0
    text: str = ""
    reasoning: str = ""
    data: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    comments: Counter[str] = field(default_factory=Counter[str])
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""
    done: bool = False
    pieces: list[str] = field(default_factory=list[str])
    bell: Bell = field(default_factory=Bell)


def chat_body(prompt: str, tokens: int | None, **more: Any) -> dict[str, Any]:
    """A greedy chat of exactly ``tokens`` tokens."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    if tokens is not None:
        body["max_tokens"] = tokens
    return body


async def listen(
    url: str,
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    heard: Heard | None = None,
) -> Heard:
    """Stream one answer to its end. A given ``heard`` can be watched meanwhile."""
    heard = heard or Heard()
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("POST", url + path, json=body, headers=headers) as response,
    ):
        heard.status = response.status_code
        if response.status_code != 200:
            heard.error = (await response.aread()).decode()
            return heard
        async for line in response.aiter_lines():
            note(heard, line)
            heard.bell.ring()
    return heard


async def alone(server: Handle, body: dict[str, Any], **how: Any) -> Heard:
    """The same, once nobody is left: so it is given the slot that holds most of its prompt."""
    await server.ledger.wait_for(lambda house: not house.leases)
    return await listen(server.url, body, **how)


def note(heard: Heard, line: str) -> None:
    """Take one line of a stream in."""
    if line.startswith(":"):
        heard.comments[line[1:].strip()] += 1
    elif line == "data: [DONE]":
        heard.done = True
    elif line.startswith("data: "):
        chunk = json.loads(line[6:])
        heard.data.append(chunk)
        if "error" in chunk:
            heard.error = chunk["error"]["message"]
        heard.usage = chunk.get("usage") or heard.usage
        for choice in chunk.get("choices", []):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            heard.text += piece
            heard.pieces.append(piece)
            heard.reasoning += choice.get("delta", {}).get("reasoning_content") or ""
            heard.finish = choice.get("finish_reason") or heard.finish


def forced(every: int) -> dict[str, str]:
    """Headers that wish for a park every so many tokens."""
    return {"Kvalet-Park-Every": str(every)}


async def ask(
    url: str,
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """One whole answer, not streamed."""
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        return await client.post(url + path, json={**body, "stream": False}, headers=headers)


async def get(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """What a GET says."""
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        return await client.get(url, headers=headers)


def events_in(state_dir: Path) -> list[AnyEvent]:
    """All events of a journal, in order."""
    decisions = read_journal(state_dir / "journal.jsonl")
    return [event for decision in decisions for event in decision.events]


@asynccontextmanager
async def llama_server(state_dir: Path, **settings: Any) -> AsyncGenerator[Server]:
    """A llama-server with the demo model and no kvalet in front."""
    chosen: dict[str, Any] = {"ctx": 512, "parallel": 4, "extra_args": ONE_THREAD, **settings}
    launch = LaunchConfig(model=find_model(None, demo=True), state_dir=state_dir, **chosen)
    send, _receive = trio.open_memory_channel[Command](100)
    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(launcher.run, launch, send)
        yield server
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def kvalet(state_dir: Path, **settings: Any) -> AsyncGenerator[Handle]:
    """A whole kvalet with the demo model; afterwards its promises are checked.

    The journal must replay to the same bytes, nothing may be left over, and the child's
    log may not hold the overflow that kvalet exists to prevent.
    """
    demo = "attach" not in settings
    config = Config(demo=demo, port=0, debug=True, state_dir=state_dir)
    config = attrs.evolve(
        config, **{"ctx": 512, "parallel": 4, "server_args": ONE_THREAD, **settings}
    )
    async with trio.open_nursery() as nursery:
        handle: Handle = await nursery.start(serve, config)
        yield handle
        with trio.fail_after(30):
            await handle.ledger.wait_for(lambda house: not house.leases)
        house = handle.ledger.house
        assert house.granted_total == 0
        assert not house.holders
        assert house.saved_bytes == 0
        handle.drain()
    report = audit(read_journal(config.journal_path))
    assert report.identical, report.first_difference
    if demo:
        log = state_dir / "llama-server.log"
        assert "Context size has been exceeded" not in log.read_text(errors="replace")
