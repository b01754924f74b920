"""Clients who leave, at every point of a request: nothing of theirs stays behind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvalet.actors.app import Handle
from kvalet.actors.child import memory_root
from kvalet.actors.decisions.state import House
from kvalet.protocol import events as e
from tests.real.clients import (
    PROMPTS,
    Heard,
    ask,
    chat_body,
    events_in,
    forced,
    get,
    kvalet,
    listen,
)

pytestmark = [
    pytest.mark.real,
    # httpx leaves the generator of a request's body to the collector when it is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator 'httpx._content:ResourceWarning"),
]

CHAT_PATH = "/v1/chat/completions"
LEAVERS = 200
AT_ONCE = 10
LONG_PROMPT = "One more word about the river and the fox. " * 20


def saved_files() -> list[str]:
    """Names of the chats that this process has saved in memory."""
    ours = f"kvalet-{os.getuid()}-{os.getpid()}-*/slots/*"
    return [file.name for file in memory_root().glob(ours)]


async def wait_house(front: Handle, condition: Callable[[House], bool]) -> None:
    with trio.fail_after(60):
        await front.ledger.wait_for(condition)


async def leave_when(
    front: Handle,
    condition: Callable[[House], bool],
    *bodies: dict[str, Any],
    every: int = 0,
    call: Callable[..., Any] = listen,
) -> None:
    """Send requests and leave as soon as ``condition`` holds; all must come back."""
    async with trio.open_nursery() as nursery:
        for body in bodies:
            nursery.start_soon(lambda body: call(front.url, body, headers=forced(every)), body)
        await wait_house(front, condition)
        nursery.cancel_scope.cancel()
    await wait_house(front, lambda house: len(house.leases) == 0)


def state_is(*states: str) -> Callable[[House], bool]:
    return lambda house: any(lease.state in states for lease in house.leases.values())


def generated(house: House) -> bool:
    return any(lease.generated >= 10 for lease in house.leases.values())


async def check_quiet(front: Handle) -> None:
    """The server works for nobody, kvalet holds nothing, nothing lies saved."""
    await wait_house(front, lambda house: not house.leases)
    house = front.ledger.house
    assert (house.granted_total, house.saved_bytes, dict(house.holders)) == (0, 0, {})
    assert (house.queue, house.parked, house.waiting, house.coming) == ((), (), (), 0)
    slots = (await get(front.url + "/slots")).json()
    assert [slot["is_processing"] for slot in slots] == [False] * len(slots)
    assert saved_files() == []


async def test_a_client_who_leaves_at_any_point_of_a_request_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with kvalet(tmp_path, ctx=512, parallel=2) as front:
        chat = chat_body(PROMPTS[0], 300)
        long = chat_body(LONG_PROMPT, 50)
        await leave_when(front, state_is("arrived"), chat)
        await leave_when(front, state_is("running"), chat)
        await leave_when(front, state_is("running"), long)
        await leave_when(front, generated, chat, every=10)
        await leave_when(front, state_is("parking"), chat, every=7)
        await leave_when(front, state_is("closing"), chat_body(PROMPTS[0], 10))
        await leave_when(front, lambda house: house.totals.resumes > 2, chat, every=7)
        await check_quiet(front)
        await leave_when(front, generated, chat, every=10, call=ask)
        await leave_when(front, state_is("parking"), chat, every=7, call=ask)
        await leave_when(front, state_is("running"), long, call=ask)
        await check_quiet(front)
        assert front.ledger.house.totals.finished <= 1
    reasons = [event.reason for event in events_in(tmp_path) if isinstance(event, e.LeaseEnded)]
    assert reasons.count("left") >= 7


async def test_clients_who_leave_while_one_of_them_is_parked_leave_nothing(
    tmp_path: Path,
) -> None:
    chats = [chat_body(prompt, 200) for prompt in PROMPTS[:3]]
    async with kvalet(tmp_path, ctx=256, parallel=3) as front:
        for call in (listen, ask):
            await leave_when(front, state_is("parked"), *chats, call=call)
            await check_quiet(front)
        parks = front.ledger.house.totals.parks
        resumed = front.ledger.house.totals.resumes
        await leave_when(front, lambda house: house.totals.resumes > resumed, *chats)
        await check_quiet(front)
        assert front.ledger.house.totals.parks > parks >= 2


async def test_a_client_who_leaves_the_queue_gives_up_its_place_only(tmp_path: Path) -> None:
    async with kvalet(tmp_path, ctx=512, parallel=2) as front:
        steady = [Heard(), Heard()]
        async with trio.open_nursery() as nursery:
            for heard, prompt in zip(steady, PROMPTS[:2], strict=True):
                body = chat_body(prompt, 150)
                nursery.start_soon(listen, front.url, body, CHAT_PATH, None, heard)
            await wait_house(front, lambda house: len(house.holders) == 2)
            for call in (listen, ask):
                async with trio.open_nursery() as leavers:
                    leavers.start_soon(call, front.url, chat_body(PROMPTS[2], 20))
                    await wait_house(front, lambda house: len(house.queue) == 1)
                    leavers.cancel_scope.cancel()
                await wait_house(front, lambda house: not house.queue)
        for heard in steady:
            assert (heard.error, heard.finish) == ("", "length")
            assert heard.usage["completion_tokens"] == 150
        assert front.ledger.house.totals.left == 2
        await check_quiet(front)


async def test_two_hundred_random_leavers_leave_every_figure_at_zero(tmp_path: Path) -> None:
    rng = random.Random(20)
    async with kvalet(tmp_path, ctx=512, parallel=4) as front:
        await listen(front.url, chat_body(PROMPTS[0], 5))
        await wait_all_tasks_blocked(0.01)
        before = trio.lowlevel.current_statistics().tasks_living
        limiter = trio.CapacityLimiter(AT_ONCE)

        async def leave_some_time(number: int) -> None:
            prompt = LONG_PROMPT if number % 20 == 0 else rng.choice(PROMPTS)
            body = chat_body(f"{number % 7} {prompt}", rng.choice((5, 20, 60, None)))
            call = ask if number % 5 == 0 else listen
            every = forced(rng.choice((0, 0, 3, 8)))
            async with limiter:
                with trio.move_on_after(rng.uniform(0, 2)):
                    await call(front.url, body, headers=every)

        with trio.fail_after(180):
            async with trio.open_nursery() as nursery:
                for number in range(LEAVERS):
                    nursery.start_soon(leave_some_time, number)
            await front.ledger.wait_for(lambda house: not house.leases)
        await check_quiet(front)
        await wait_all_tasks_blocked(0.01)
        assert trio.lowlevel.current_statistics().tasks_living <= before
        totals = front.ledger.house.totals
        assert totals.failed == 0
        assert totals.left >= LEAVERS // 4
        answer = await listen(front.url, chat_body(PROMPTS[0], 30))
        assert (answer.finish, answer.usage["completion_tokens"]) == ("length", 30)
