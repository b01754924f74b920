"""More chats than the pool can hold: all of them finish, and the slow one harms nobody."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
import trio

from kvalet.protocol import events as e
from tests.real.clients import (
    PROMPTS,
    Heard,
    chat_body,
    events_in,
    get,
    kvalet,
    listen,
    note,
)

pytestmark = pytest.mark.real

CHAT_PATH = "/v1/chat/completions"
LONG_PREFACE = "A fox went to the river and saw a boat. " * 25


async def talk_at_once(url: str, chats: int, tokens: int, preface: str = "") -> list[Heard]:
    """So many chats at once, each of exactly so many tokens."""
    everybody = [Heard() for _ in range(chats)]
    async with trio.open_nursery() as nursery:
        for number, heard in enumerate(everybody):
            body = chat_body(f"{number}: {preface}{PROMPTS[number % len(PROMPTS)]}", tokens)
            nursery.start_soon(listen, url, body, CHAT_PATH, None, heard)
    return everybody


def check_all_done(everybody: list[Heard], tokens: int) -> None:
    for heard in everybody:
        assert (heard.status, heard.error) == (200, "")
        assert (heard.finish, heard.done) == ("length", True)
        assert heard.usage["completion_tokens"] == tokens
        assert heard.comments["preempt-paused"] == heard.usage["kvalet"]["parks"]
        assert heard.comments["preempt-resumed"] == heard.usage["kvalet"]["resumes"]
        assert heard.comments["preempt-recomputed"] == heard.usage["kvalet"]["recomputes"]


def granted_at_first_park(state_dir: Path, cells: int) -> float:
    """What part of the pool was granted when somebody was parked first."""
    parks = [event for event in events_in(state_dir) if isinstance(event, e.LeaseParked)]
    return parks[0].pool_granted / cells


async def test_eight_chats_on_four_slots_all_finish_in_a_pool_that_is_used_to_the_full(
    tmp_path: Path,
) -> None:
    async with kvalet(tmp_path, ctx=2048, parallel=4) as front:
        with trio.fail_after(300):
            everybody = await talk_at_once(front.url, 8, 250, LONG_PREFACE)
        check_all_done(everybody, 250)
        totals = front.ledger.house.totals
        assert (totals.finished, totals.failed) == (8, 0)
        assert totals.resumes >= 1
        assert totals.recomputes == 0
        waiting = [heard for heard in everybody if heard.comments["admission-done"]]
        assert len(waiting) >= 4
        assert all(heard.usage["kvalet"]["waited_s"] > 0 for heard in waiting)
    assert granted_at_first_park(tmp_path, 2048) >= 0.98


async def test_a_client_who_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    tokens = 150
    # A small buffer and fat chunks, so that what is not read soon stops the writer.
    narrow = httpx.AsyncHTTPTransport(
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)], trust_env=False
    )
    body = chat_body(PROMPTS[0], tokens, logprobs=True, top_logprobs=20)
    async with (
        kvalet(tmp_path, ctx=512, parallel=2) as front,
        httpx.AsyncClient(timeout=None, transport=narrow) as client,
        client.stream("POST", front.url + CHAT_PATH, json=body) as response,
    ):
        quick = await listen(front.url, chat_body(PROMPTS[1], tokens))
        assert (quick.finish, quick.usage["completion_tokens"]) == ("length", tokens)
        assert (await get(front.url + "/health")).status_code == 200
        heard = Heard()
        with trio.fail_after(60):
            async for line in response.aiter_lines():
                note(heard, line)
        assert (heard.finish, heard.done) == ("length", True)
        assert heard.usage["completion_tokens"] == tokens
