"""Races 4 and 21: a read that has raised is over, and a slow look at the slots holds nobody up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import httpx
import msgspec
import pytest
import trio
from trio.testing import MockClock

from kvalet.protocol.sse import SseSplitter
from tests.actors.stage import TEXT, Guest, Stage
from tests.races.house import (
    HOURS_S,
    KEEPALIVE,
    PREEMPTED,
    RESUMED,
    URL,
    PlayingServer,
    Script,
    ended,
    house,
    kept_alive,
    over,
    said,
    stalls,
    steady,
    visit,
)

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

READ_S: Final = 120.0
AFTER: Final = ((0.0, said("c")), (1.0, said("d")), (0.0, ended(4)))
PARKED: Final = {
    "in silence": (False, ((600.0, b""),)),
    "with notices": (True, kept_alive(600)),
    "with one notice": (True, ((0.0, PREEMPTED), (110.0, KEEPALIVE), (110.0, RESUMED))),
}


def parked_in_the_middle(park: tuple[tuple[float, bytes], ...]) -> PlayingServer:
    return PlayingServer([Script(((0.0, said("a")), (1.0, said("b")), *park, *AFTER))], parked={0})


async def read_again_and_again(server: PlayingServer) -> tuple[str, bool]:
    """What a relay makes of the stream that waits out a park by asking its iterator again: the
    text, and whether it takes the answer for complete."""
    text = ""
    splitter = SseSplitter()
    async with httpx.AsyncClient(transport=server, base_url=URL, timeout=READ_S) as client:
        body = {"prompt": "once", "stream": True, "id_slot": 0}
        async with client.stream("POST", TEXT, json=body) as response:
            pieces = response.aiter_raw()
            while True:
                try:
                    piece = await anext(pieces)
                except httpx.ReadTimeout:
                    continue
                except StopAsyncIteration:
                    return text, splitter.at_boundary
                for event in splitter.feed(piece):
                    if event.data is not None and event.data.startswith(b"{"):
                        text += msgspec.json.decode(event.data)["choices"][0]["text"]


@pytest.mark.parametrize("world", PARKED)
async def test_race_04_the_client_gets_all_that_follows_a_park(
    tmp_path: Path, autojump_clock: MockClock, world: str
) -> None:
    notices, park = PARKED[world]
    server = parked_in_the_middle(park)
    async with house(tmp_path, server, notices=notices) as it:
        guest = await visit(it, server)
        await over(guest)

        assert (guest.errors, guest.content, guest.ended_well) == ([], "abcd", True)
        assert len(server.bodies) == 1, "the stream was never asked for again"


async def test_race_04_an_iterator_that_is_asked_again_ends_the_answer_early(
    autojump_clock: MockClock,
) -> None:
    _, park = PARKED["in silence"]

    assert await read_again_and_again(parked_in_the_middle(park)) == ("ab", True)
    assert await read_again_and_again(parked_in_the_middle(())) == ("abcd", True)


async def test_race_04_a_read_that_raises_is_an_error_and_no_end_of_the_answer(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    server = parked_in_the_middle(((HOURS_S, b""),))
    async with house(tmp_path, server, notices=True) as it:
        guest = await visit(it, server)
        await over(guest)

        guest.check_ended_once()
        assert (guest.content, guest.ended_well) == ("ab", False)
        assert [error["code"] for error in guest.errors] == ["stalled"]


CROWD: Final = 20
TOKEN_S: Final = 2.0
WATCH_S: Final = 200.0


async def watched(it: Stage, server: PlayingServer) -> tuple[list[Guest], list[list[int]]]:
    """Twenty healthy streams and a dead one, and the bytes that each healthy one had at every half
    second, from the first to far behind the dead one's deadline."""
    guests = [await visit(it, server) for _ in range(CROWD + 1)]
    seen: list[list[int]] = []
    # Between two tokens, so that no look depends on the order within a moment.
    await trio.sleep(0.25)
    while trio.current_time() < WATCH_S:
        seen.append([len(guest.paper.wire) for guest in guests[1:]])
        await trio.sleep(0.5)
    return guests, seen


async def crowd(folder: Path, look_s: float) -> tuple[list[list[int]], int, float]:
    """What the crowd saw, how many looks at the slots were under way at once, and when the dead
    stream was ended."""
    scripts = [Script(((HOURS_S, b""),)), *(steady(110, TOKEN_S) for _ in range(CROWD))]
    server = PlayingServer(scripts, seats=CROWD + 1, looks_s=[look_s])
    async with house(folder, server, notices=False, first_token_s=120) as it:
        guests, seen = await watched(it, server)
        at_once = server.most_looking
        await over(guests[0])
        ((at, _),) = stalls(it)
        server.looks_s = [0.0]
        await over(*guests)
        assert [len(guest.content) for guest in guests[1:]] == [110] * CROWD
        return seen, at_once, at


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The crowd before a server that answers every look at once."""
    folder = tmp_path_factory.mktemp("quick")
    seen, _, _ = trio.run(crowd, folder, 0.0, clock=MockClock(autojump_threshold=0))
    return seen


@pytest.mark.parametrize("look_s", [3.0, 7.0, math.inf])
def test_race_21_slow_looks_at_the_slots_delay_no_token_of_anybody(
    tmp_path: Path, undisturbed: list[list[int]], look_s: float
) -> None:
    clock = MockClock(autojump_threshold=0)
    seen, at_once, dead_at = trio.run(crowd, tmp_path, look_s, clock=clock)

    assert seen == undisturbed
    assert at_once == 1
    assert dead_at == pytest.approx(120, abs=0.1)


async def test_a_look_that_is_never_answered_hides_no_park_for_ever(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(((0.0, said("a")), (700.0, said("b")), (0.0, ended(2))))
    server = PlayingServer([script], parked={0}, looks_s=[math.inf, 0.0])
    async with house(tmp_path, server, notices=False) as it:
        guest = await visit(it, server)
        await over(guest)

        assert (guest.errors, guest.content) == ([], "ab")
