"""kvalet's relay and ledger over the simulated server, on a virtual clock: parks of any length."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import pytest
import trio
from trio.testing import MockClock

from kvalet.actors import preemption, slots
from kvalet.actors.app import open_front
from kvalet.actors.config import Config
from kvalet.actors.gate import Gate
from kvalet.actors.journal import open_journal
from kvalet.actors.ledger import Ledger
from kvalet.actors.server import Server
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol import commands as c
from kvalet.protocol.ids import Cells, Nanos
from kvalet.sims.fakeserver.options import read_options
from kvalet.sims.fakeserver.server import open_sim
from kvalet.sims.fakeserver.transport import SimTransport
from kvalet.testing import assert_replays
from tests.actors.stage import HEADER, Guest, Stage, until
from tests.sims.fakeserver.house import Json, prompt

TEXT: Final = "/v1/completions"
pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


@asynccontextmanager
async def behind(folder: Path, build: str, **env: str) -> AsyncGenerator[Stage]:
    """kvalet in front of a server that parks, 2048 cells for two, half a token a second."""
    wishes = {"KVALET_SIM_BUILD": build, "KVALET_SIM_NEIGHBOURS": "0", **env}
    wishes = {"KVALET_SIM_TOKENS_PER_S": "0.4", **wishes}
    argv = ("-np", "2", "-kvu", "-c", "2048", "--metrics", "--preempt-ram", "512")
    journal, house, _ = open_journal(folder / "journal.jsonl", HEADER)
    ledger = Ledger(journal, house, lambda: Nanos(int(trio.current_time() * 1e9)))
    async with open_sim(read_options(argv, wishes)) as sim, trio.open_nursery() as nursery:
        server = Server(url="http://127.0.0.1:9", api_key="k", slot_dir=folder)
        upstream = UpstreamClient(server, SimTransport(sim, nursery))
        front = open_front(
            Config(attach="http://127.0.0.1:9"), (), ledger, Gate(upstream), trio.Event()
        )
        async with upstream:
            nursery.start_soon(ledger.run)
            nursery.start_soon(slots.run, upstream, ledger.tap(65_536), ledger.tell)
            nursery.start_soon(preemption.run, upstream, ledger.tell, lambda: True)
            ledger.decide([c.OpenHouse(settings=c.Settings()), *opened(notices=build != "G1")])
            await trio.sleep(0.1)
            yield Stage(nursery, cast(Any, sim), ledger, upstream, front)
            nursery.cancel_scope.cancel()
    journal.close()
    assert_replays(folder / "journal.jsonl")


def opened(*, notices: bool) -> list[c.Command]:
    ready = c.ReadySeen(
        generation=1,
        url="http://127.0.0.1:9",
        build="b1",
        model="m",
        cells=Cells(2048),
        slots=2,
        headroom=Cells(0),
        parks=True,
        notices=notices,
    )
    return [ready, c.ProbeSeen(generation=1, method="server")]


def long_answer(number: int, tokens: int, cap: int) -> Json:
    return {"prompt": prompt(number, tokens), "max_tokens": cap, "stream": True}


async def finished(it: Stage, *guests: Guest) -> None:
    with trio.fail_after(100_000):
        await until(lambda: all(guest.done for guest in guests), 1.0)
        await it.ledger.wait_for(lambda house: not house.leases)


def notices_of(guest: Guest) -> list[bytes]:
    return [one for one in guest.comments if one not in (b": preempt-keepalive", b":")]


@pytest.mark.parametrize("build", ["G1", "G3", "G4"])
async def test_a_park_of_twenty_five_minutes_is_no_stall_on_any_build(
    tmp_path: Path, autojump_clock: MockClock, build: str
) -> None:
    async with behind(tmp_path, build) as it:
        resident = it.invite(long_answer(1, 700, 1020), path=TEXT)
        await trio.sleep(5)
        smaller = it.invite(long_answer(2, 500, 1020), path=TEXT)
        await finished(it, resident, smaller)

        assert [guest.errors for guest in (resident, smaller)] == [[], []]
        assert notices_of(resident) == []
        assert notices_of(smaller) == [b": preempt-paused", b": preempt-resumed"]
        assert it.house.totals.parks == it.house.totals.resumes == 1
        # A reading every five seconds finds a silent park that much later.
        assert smaller.comments.count(b": preempt-keepalive") > 1400 / 2
        assert len(smaller.chunks) == len(resident.chunks)


@pytest.mark.parametrize("build", ["G1", "G4"])
async def test_a_dead_stream_ends_at_its_deadline_to_the_second(
    tmp_path: Path, autojump_clock: MockClock, build: str
) -> None:
    faults = '[{"kind": "hang", "at_token": 5}]'
    async with behind(tmp_path, build, KVALET_SIM_FAULTS=faults) as it:
        guest = it.invite(long_answer(1, 100, 50), path=TEXT)
        await until(lambda: len(guest.chunks) >= 4, 0.01)
        began = trio.current_time()
        await until(lambda: guest.done, 0.01)

        assert [error["code"] for error in guest.errors] == ["stalled"]
        assert 119.9 <= trio.current_time() - began <= 120.2
