"""The server dies under its chats, over real sockets: they go on, and nothing of them is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from kvalet.actors.app import Handle
from kvalet.actors.decisions.replay import audit
from kvalet.actors.decisions.state import House
from kvalet.actors.journal import read_journal
from kvalet.protocol.events import LeaseEnded, ServerExited, ServerHung, ServerRestarted
from tests.real.clients import Bell, Heard, alone, ask, chat_body, events_in, get, listen
from tests.sims.test_server_mode import PROMPTS, house

# httpx leaves its generators to the collector when a request is cancelled.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")

TOKENS = 600
SLOWLY = {"KVALET_SIM_TOKENS_PER_S": "400"}


async def chat_through(
    handle: Handle, heard: list[Heard], blows: list[Callable[[], bool]], signal_sent: int
) -> None:
    """Chats to their ends; the server gets a signal when each of ``blows`` comes true."""
    async with trio.open_nursery() as nursery:
        for prompt, one in zip(PROMPTS, heard, strict=False):
            body = chat_body(prompt, TOKENS)
            nursery.start_soon(listen, handle.url, body, "/v1/chat/completions", None, one)
        for blow in blows:
            await heard[0].bell.wait_for(blow)
            pid = handle.ledger.house.server.pid
            assert pid is not None
            os.kill(pid, signal_sent)
            await next_server(handle, handle.ledger.house.server.generation)


async def next_server(handle: Handle, generation: int, runners: int = 0) -> None:
    """Until a server after this one takes work, and so many chats run on it."""

    def is_there(house: House) -> bool:
        later = house.server.generation > generation
        return later and house.ready and house.runners >= runners

    await handle.ledger.wait_for(is_there)


def said_by_all(heard: list[Heard], tokens: int) -> Callable[[], bool]:
    return lambda: all(len(one.pieces) >= tokens for one in heard)


def audited(folder: Path) -> bool:
    return audit(read_journal(folder / "state" / "journal.jsonl")).identical


@pytest.mark.parametrize("build", ["G0", "G4", "G1"])
async def test_chats_whose_server_is_killed_say_what_they_would_have_said(
    tmp_path: Path, build: str
) -> None:
    bell = Bell()
    together = [Heard(bell=bell) for _ in PROMPTS]
    async with house(tmp_path, build, env=SLOWLY) as handle:
        solo = [await alone(handle, chat_body(prompt, TOKENS)) for prompt in PROMPTS]
        with trio.fail_after(60):
            await chat_through(handle, together, [said_by_all(together, 100)], signal.SIGKILL)
            await handle.ledger.wait_for(lambda house: not house.leases)
        status = (await get(handle.url + "/kvalet/status")).json()

    assert [heard.error for heard in together] == [""] * 4
    assert [heard.text for heard in together] == [heard.text for heard in solo]
    assert [heard.usage["completion_tokens"] for heard in together] == [TOKENS] * 4
    for heard in together:
        assert heard.comments["server-restarting"] == heard.comments["server-resumed"] == 1
        assert heard.comments["preempt-recomputed"] >= 1
        assert heard.done
    assert status["totals"]["restarts"] == 1
    assert status["pool"]["granted"] == 0
    assert audited(tmp_path)


async def test_a_server_that_stops_answering_is_ended_and_its_chats_go_on(tmp_path: Path) -> None:
    bell = Bell()
    together = [Heard(bell=bell) for _ in PROMPTS]
    async with house(tmp_path, "G0", env=SLOWLY, health_s=0.3) as handle:
        with trio.fail_after(60):
            await chat_through(handle, together, [said_by_all(together, 100)], signal.SIGSTOP)

    assert [(heard.error, heard.done) for heard in together] == [("", True)] * 4
    assert [heard.usage["completion_tokens"] for heard in together] == [TOKENS] * 4
    events = events_in(tmp_path / "state")
    assert [type(event) for event in events].count(ServerHung) == 1
    assert next(event.planned for event in events if isinstance(event, ServerExited)) is False
    assert audited(tmp_path)


async def test_a_server_that_dies_again_and_again_spends_its_budget_and_says_so(
    tmp_path: Path,
) -> None:
    bell = Bell()
    together = [Heard(bell=bell) for _ in PROMPTS]
    blows: list[Any] = [said_by_all(together, 50 * (number + 1)) for number in range(3)]
    async with house(tmp_path, "G0", env=SLOWLY, restart_wait_s=0.01) as handle:
        with trio.fail_after(90):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(chat_through, handle, together, blows, signal.SIGKILL)
                await handle.ledger.wait_for(lambda house: house.totals.restarts == 3)
                await handle.ledger.wait_for(lambda house: house.ready)
                await bell.wait_for(said_by_all(together, 250))
                pid = handle.ledger.house.server.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
        status = (await get(handle.url + "/kvalet/status")).json()
        refused = await ask(handle.url, chat_body("Anybody there?", 5))
        health = await get(handle.url + "/health")

    for heard in together:
        errors = [chunk for chunk in heard.data if "error" in chunk]
        assert (len(errors), heard.done, heard.finish) == (1, False, None)
        assert heard.data[-1] == errors[0]
    assert status["server"]["state"] == "failed"
    assert "started again 3 times" in status["server"]["reason"]
    assert (status["pool"]["granted"], status["totals"]["restarts"]) == (0, 3)
    assert (refused.status_code, health.status_code) == (503, 503)
    assert "started again 3 times" in refused.json()["error"]["message"]
    events = events_in(tmp_path / "state")
    waits = [event.wait_s for event in events if isinstance(event, ServerRestarted)]
    assert waits == [0.0, 0.01, 0.04]
    ended = [event.reason for event in events if isinstance(event, LeaseEnded)]
    assert ended == ["server-lost"] * 4
    assert audited(tmp_path)
