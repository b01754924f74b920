"""``serve`` may be ended at any moment of its life: it returns, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trio

from kvalet.actors.app import Handle, serve
from kvalet.actors.config import Config
from kvalet.actors.journal import open_journal
from kvalet.protocol.events import LeaseEnded
from kvalet.testing import assert_replays
from tests.actors.stage import HEADER
from tests.actors.test_relay_leaving import Guillotine

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

STRIDE = 17


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    argv = [sys.executable, "-m", "kvalet.sims.fakeupstream", "4"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield child.stdout.readline().decode().strip()
        child.terminate()


def config(url: str, directory: Path, drain_s: float = 0.5) -> Config:
    return Config(attach=url, port=0, state_dir=directory, drain_s=drain_s)


def check_closed(directory: Path) -> None:
    """The journal is whole, and nobody holds it any more."""
    path = directory / "journal.jsonl"
    if path.exists():
        journal, _, _ = open_journal(path, HEADER)
        journal.close()
        assert_replays(path)


async def test_serve_can_be_cancelled_between_any_two_steps_of_its_start(
    tmp_path: Path, upstream: str
) -> None:
    for step in range(1, 600, STRIDE):
        directory = tmp_path / str(step)
        tasks = trio.lowlevel.current_statistics().tasks_living
        started: list[Handle] = []
        scope = trio.CancelScope()
        blade = Guillotine(scope, step)
        with trio.fail_after(20), scope:
            trio.lowlevel.add_instrument(blade)
            try:
                async with trio.open_nursery() as nursery:
                    started.append(await nursery.start(serve, config(upstream, directory)))
                    await trio.sleep(0.2)
                    nursery.cancel_scope.cancel()
            finally:
                trio.lowlevel.remove_instrument(blade)
        check_closed(directory)
        assert trio.lowlevel.current_statistics().tasks_living <= tasks + 1
        if blade.made < step:
            break


async def talk(url: str, ends: list[bytes]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    body |= {"max_tokens": 1000, "events_per_s": 5}
    try:
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
        ):
            heard = b"".join([piece async for piece in answer.aiter_raw()])
            ends.append(heard.rstrip().splitlines()[-1])
    except httpx.HTTPError as error:
        ends.append(type(error).__name__.encode())


async def test_a_drain_ends_at_its_deadline_whoever_runs_or_waits(
    tmp_path: Path, upstream: str
) -> None:
    ends: list[bytes] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            handle: Handle = await nursery.start(serve, config(upstream, tmp_path))
            # More than there are slots, so that some are queued.
            for _ in range(6):
                nursery.start_soon(talk, handle.url, ends)
            await handle.ledger.wait_for(lambda house: len(house.queue) == 2)
            began = trio.current_time()
            handle.drain()
        assert trio.current_time() - began < 6
    assert len(ends) == 6
    assert all(b'"code":"stopping"' in end for end in ends), ends
    check_closed(tmp_path)
    # What the server had not let go of within the last second is closed by the next start.
    story = assert_replays(tmp_path / "journal.jsonl")
    ended = [event for event in story.events() if isinstance(event, LeaseEnded)]
    assert [event.reason for event in ended] == ["stopping"] * 6
    left = story.fold().leases
    assert {lease.state for lease in left.values()} <= {"closing"}
