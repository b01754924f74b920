"""A crowd of random requests, some of whom leave, on a server that fails now and then."""

from __future__ import annotations

import os
import random
from pathlib import Path

import httpx
import pytest
import trio
from trio.testing import MockClock

from tests.actors.stage import Guest, Stage, chat, stage

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

VISITS = 60
SEEDS = int(os.environ.get("KVALET_TEST_SEEDS", "4"))
FAULTS = ["cut", "cut-mid-event", "garbage", "error-event", "no-finish", "400", "notices"]
ROUTES = ["POST /apply-template", "POST /tokenize", "POST /slots/0", "POST /slots/1", "GET /slots"]


def wild(rng: random.Random) -> dict[str, object]:
    fields: dict[str, object] = {"stream": rng.random() < 0.7}
    if rng.random() < 0.5:
        fields["max_tokens"] = rng.randrange(1, 90)
    if rng.random() < 0.2:
        fields["tools"] = [{"type": "function"}]
    if rng.random() < 0.2:
        fields["stop"] = ["mnop", "zz"]
    return chat("hello " * rng.randrange(1, 20), **fields)


async def visit(it: Stage, rng: random.Random) -> Guest:
    wish = {"kvalet-park-every": str(rng.randrange(1, 30))} if rng.random() < 0.3 else {}
    guest = it.invite(wild(rng), headers=wish)
    if rng.random() < 0.4:
        await trio.sleep(rng.random())
        guest.scope.cancel()
    elif rng.random() < 0.1:
        guest.paper.reads = trio.Event()
        await trio.sleep(rng.random() * 200)
        guest.paper.reads.set()
    return guest


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_nothing_is_left_of_a_crowd(
    tmp_path: Path, autojump_clock: MockClock, seed: int, faulty: bool
) -> None:
    rng = random.Random(seed)
    method = rng.choice(["save", "recompute"])
    async with stage(tmp_path, cells=rng.choice([200, 300, 600]), method=method, debug=True) as it:
        it.server.answer = bytes(range(97, 123)) * 2 + "→😀→".encode() + b"end"
        await trio.testing.wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        if faulty:
            it.server.legs = {n: rng.choice(FAULTS) for n in range(600) if rng.random() < 0.05}
            it.server.faults = [
                (rng.choice(ROUTES), lambda: httpx.ReadError("gone")) for _ in range(10)
            ]
        async with trio.open_nursery() as nursery:
            for _ in range(VISITS):
                nursery.start_soon(visit, it, rng)
                await trio.sleep(rng.random() * 0.5)
        await it.all_gone()
        await trio.sleep(10)
        for guest in it.guests:
            if (
                not guest.scope.cancelled_caught
                and guest.exchange.request.body.find(b'"stream":true') > 0
            ):
                guest.check_ended_once()
        if not faulty:
            it.check_empty()
            assert it.house.totals.failed == 0
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
