"""kvalet in front of servers that park by themselves: the whole of both, over real sockets."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvalet.actors.app import Handle, serve
from kvalet.actors.config import Config
from kvalet.protocol.events import ExactJudged, LeaseParking, PoolPressed, ServerProbed
from tests.real.clients import Heard, alone, chat_body, events_in, get, listen

MODEL: Final = Path(__file__).resolve().parents[1] / "data" / "gguf_headers" / "llama32-1b.gguf"
PROMPTS: Final = tuple(f"Chat {name}: tell me a long story. " * 24 for name in "abcd")
CELLS: Final = 8192
TOKENS: Final = 2300


def simulated(folder: Path, build: str, **env: str) -> Path:
    """A llama-server of this generation, fast enough for a test."""
    settings = {"TOKENS_PER_S": "4000", "PREFILL_PER_S": "400000", "COPY_MIB_PER_S": "1e6"}
    said = {f"KVALET_SIM_{name}": value for name, value in settings.items()}
    said |= {"KVALET_SIM_BUILD": build, "KVALET_SIM_NEIGHBOURS": "0", **env}
    program = folder / "llama-server"
    exports = "".join(f"export {name}='{value}'\n" for name, value in said.items())
    program.write_text(
        f'#!/bin/sh\n{exports}exec {sys.executable} -m kvalet.sims.fakeserver "$@"\n'
    )
    program.chmod(0o755)
    return program


@asynccontextmanager
async def house(folder: Path, build: str, **settings: Any) -> AsyncGenerator[Handle]:
    env: dict[str, str] = settings.pop("env", {})
    chosen: dict[str, Any] = {"model": MODEL, "ctx": CELLS, "parallel": 4, **settings}
    config = Config(
        server_bin=simulated(folder, build, **env),
        port=0,
        state_dir=folder / "state",
        **chosen,
    )
    async with trio.open_nursery() as nursery:
        handle: Handle = await nursery.start(serve, config)
        yield handle
        handle.drain()


async def four(handle: Handle, tokens: int = TOKENS) -> list[Heard]:
    """Four chats at once, which the pool cannot hold to their ends."""
    answers = [Heard() for _ in PROMPTS]
    async with trio.open_nursery() as nursery:
        for prompt, heard in zip(PROMPTS, answers, strict=True):
            body = chat_body(prompt, tokens)
            nursery.start_soon(listen, handle.url, body, "/v1/chat/completions", None, heard)
    return answers


def paired(heard: Heard) -> bool:
    paused, resumed = heard.comments["preempt-paused"], heard.comments["preempt-resumed"]
    counted = heard.usage["kvalet"]
    return (paused, resumed) == (counted["parks"], counted["resumes"]) and paused == resumed


@pytest.mark.parametrize("build", ["G4", "G3"])
async def test_four_chats_share_a_server_that_parks_and_all_of_them_finish_as_if_alone(
    tmp_path: Path, build: str
) -> None:
    async with house(tmp_path, build) as handle:
        solo = [await alone(handle, chat_body(prompt, TOKENS)) for prompt in PROMPTS]
        together = await four(handle)
        status = (await get(handle.url + "/kvalet/status")).json()

    assert [heard.error for heard in together] == [""] * 4
    assert [heard.usage["completion_tokens"] for heard in together] == [TOKENS] * 4
    assert [heard.text for heard in together] == [heard.text for heard in solo]
    assert sum(heard.comments["preempt-paused"] for heard in together) >= 1
    assert all(map(paired, together))
    assert (status["mode"], status["park_method"]) == ("server", "server")
    assert (status["pool"]["headroom"], status["totals"]["finished"]) == (0, 8)
    events = events_in(tmp_path / "state")
    assert not any(isinstance(event, PoolPressed | LeaseParking) for event in events)
    assert [event.mode for event in events if isinstance(event, ExactJudged)] == ["server"]


async def test_forced_parks_every_64_tokens_leave_the_answer_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "forced").mkdir()
    body = chat_body(PROMPTS[0], 1200)
    async with house(tmp_path / "plain", "G4") as handle:
        plain = await listen(handle.url, body)
    async with house(tmp_path / "forced", "G4", env={"LLAMA_SERVER_PREEMPT_EVERY": "64"}) as handle:
        parked = await listen(handle.url, body)

    assert parked.text == plain.text
    assert parked.usage["kvalet"]["parks"] == 1200 // 64 == 18
    assert parked.comments["preempt-paused"] == parked.comments["preempt-resumed"] == 18
    assert plain.comments == {}


async def test_a_stock_server_and_mode_proxy_are_parked_by_kvalet(tmp_path: Path) -> None:
    for build, mode in (("G0", "auto"), ("G4", "proxy")):
        folder = tmp_path / build
        folder.mkdir()
        async with house(folder, build, mode=mode) as handle:
            together = await four(handle)
            status = (await get(handle.url + "/kvalet/status")).json()

        assert [heard.error for heard in together] == [""] * 4
        assert [heard.usage["completion_tokens"] for heard in together] == [TOKENS] * 4
        assert status["mode"] == "proxy"
        assert status["totals"]["parks"] >= 1
        methods = [x.method for x in events_in(folder / "state") if isinstance(x, ServerProbed)]
        assert methods == ["save"]
        argv = json.loads((folder / "state" / "journal.jsonl").read_bytes().splitlines()[2])
        assert "--slot-save-path" in argv["command"]["argv"]


async def test_exact_concurrency_is_certified_on_a_build_that_has_it(tmp_path: Path) -> None:
    async with house(tmp_path, "G4", exact="auto", ctx=1024) as handle:
        status = (await get(handle.url + "/kvalet/status")).json()
        alone_first = await listen(handle.url, chat_body("Hello there.", 60))
        beside = await four(handle, 60)

    assert status["exact_concurrency"] == "on", status["warnings"]
    assert alone_first.error == ""
    assert all(heard.error == "" for heard in beside)
