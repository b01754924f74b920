"""Race 25: the power goes at any byte of the journal, and what was decided is all that counts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from trio.testing import MockClock

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.replay import audit
from kvalet.actors.decisions.state import House
from kvalet.actors.journal import open_journal, read_journal
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, Seq
from kvalet.protocol.journal import Decision, encode
from tests.actors.stage import HEADER, Stage, chat, stage, until
from tests.decisions import promises
from tests.decisions.driver import World

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

CREDIT: Final = (e.LeaseGranted, e.LeaseExtended, e.LeaseResumed)
CUT_IN: Final = (*CREDIT, e.PoolPressed, e.LeaseParking, e.LeaseParked, e.LeaseReleased)
SECOND_LIFE: Final = (
    *(e.JournalTorn, e.LeaseEnded, e.LeaseReleased, e.HouseOpened),
    *(e.ServerPlanned, e.ServerSpawned, e.ServerReady, e.ServerProbed),
)
"""All that may happen when a process takes over and starts a server: nothing that was ordered
of the former one."""


def busy_day() -> list[Decision]:
    """Five chats in a pool for two: grants, extensions, parks, resumes, ends."""
    settings = c.Settings(block_min=4, first_block=8, quantum=8)
    world = World(cells=200, slots=3, headroom=3, settings=settings).open()
    for number in range(5):
        world.arrive(20 + number, 60)
    return world.run().decisions


DAY: Final = busy_day()
LINES: Final = [encode(decision) for decision in DAY]
STARTS: Final = [len(encode(HEADER)) + sum(map(len, LINES[:at])) for at in range(len(LINES) + 1)]
WHOLE: Final = encode(HEADER) + b"".join(LINES)


def houses() -> list[House]:
    """The house after none, one, two… of the day's decisions."""
    house = House()
    told = [house]
    for decision in DAY:
        house = fold(house, decision.events, decision.at_ns)
        told.append(house)
    return told


HOUSES: Final = houses()


def last_of_each_kind() -> list[int]:
    """Places of the last decisions that grant, park, resume and so on."""
    places = {
        kind: place
        for kind in CUT_IN
        for place, decision in enumerate(DAY)
        if any(isinstance(event, kind) for event in decision.events)
    }
    assert set(places) == set(CUT_IN)
    return sorted(set(places.values()))


def take_over(torn: int) -> Iterator[c.Command]:
    """What the next process says first, and its launch of a server."""
    url = "http://127.0.0.1:1"
    yield c.OpenHouse(settings=c.Settings(), torn_bytes=torn)
    yield c.LaunchPlanned(generation=2, argv=("llama-server",))
    yield c.SpawnSeen(generation=2, pid=2, url=url)
    yield c.ReadySeen(
        generation=2,
        url=url,
        build="b1",
        model="m",
        cells=Cells(200),
        slots=3,
        headroom=Cells(3),
    )
    yield c.ProbeSeen(generation=2, method="save")


def restart(path: Path, end: int, kept: int) -> list[e.AnyEvent]:
    """The power went when ``end`` bytes were written, ``kept`` decisions among them: start again.
    Returns all that the second life decided."""
    path.write_bytes(WHOLE[:end])
    journal, house, torn = open_journal(path, HEADER)
    assert (house, torn) == (HOUSES[kept], end - STARTS[kept])
    said: list[e.AnyEvent] = []
    for command in take_over(torn):
        events, house = take(house, command, Nanos(10**12))
        seq = Seq(journal.seq + 1)
        journal.append([Decision(seq=seq, at_ns=Nanos(10**12), command=command, events=events)])
        said += events
    journal.close()
    assert promises.is_empty(house)
    assert path.read_bytes().startswith(WHOLE[: STARTS[kept]])
    return said


def check_second_life(said: list[e.AnyEvent], kept: int, torn: int) -> None:
    """Open leases are lost and given back once each, and no order of the first life is repeated."""
    assert [event for event in said if not isinstance(event, SECOND_LIFE)] == []
    leases = HOUSES[kept].leases
    lost = [x for x in said if isinstance(x, e.LeaseEnded)]
    assert [x.request for x in lost] == [x.request for x in leases.values() if not x.end_reason]
    assert {x.reason for x in lost} <= {"lost"}
    assert [x.request for x in said if isinstance(x, e.LeaseReleased)] == list(leases)
    assert [x.dropped_bytes for x in said if isinstance(x, e.JournalTorn)] == [torn] * (torn > 0)


def test_race_25_behind_every_decision_the_next_process_closes_what_is_open(
    tmp_path: Path,
) -> None:
    for kept, end in enumerate(STARTS):
        path = tmp_path / "journal.jsonl"
        check_second_life(restart(path, end, kept), kept, 0)
        assert audit(read_journal(path)).identical


@pytest.mark.parametrize("place", last_of_each_kind())
def test_race_25_at_every_byte_of_a_decision_it_counts_whole_or_not_at_all(
    tmp_path: Path, place: int
) -> None:
    start = STARTS[place]
    for end in range(start + 1, STARTS[place + 1]):
        said = restart(tmp_path / "journal.jsonl", end, place)
        check_second_life(said, place, end - start)


DIGESTS: Final = """
import hashlib, sys
from pathlib import Path
import msgspec
from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.state import House
from kvalet.actors.journal import read_journal
house = House()
for decision in read_journal(Path(sys.argv[1])):
    house = fold(house, decision.events, decision.at_ns)
    print(hashlib.sha256(msgspec.json.encode(house)).hexdigest())
"""


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_race_25_another_process_folds_the_same_house_behind_every_decision(
    tmp_path: Path, seed: str
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(WHOLE)
    env = {**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Kathmandu", "LC_ALL": "C"}
    argv = [sys.executable, "-c", DIGESTS, str(path)]
    folded = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout

    ours = [hashlib.sha256(msgspec.json.encode(house)).hexdigest() for house in HOUSES[1:]]
    assert folded.split() == ours


async def refuse_from(it: Stage, seq: int) -> None:
    """Three chats on a disk that takes nothing more once ``seq`` decisions are on it."""
    for name in ("one", "two", "six"):
        it.invite(chat(name))
    await it.ledger.wait_for(lambda x: it.ledger.journal.seq >= seq or x.totals.finished == 3)
    full = os.open("/dev/full", os.O_RDWR | os.O_APPEND)
    os.dup2(full, it.ledger.journal._descriptor)  # pyright: ignore[reportPrivateUsage]
    os.close(full)
    await until(lambda: all(x.done for x in it.guests))


async def test_race_25_nothing_is_done_that_is_not_in_the_journal_wherever_it_ends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    ends: set[int] = set()
    for seq in range(1, 50):
        folder = tmp_path / str(seq)
        async with stage(folder, cells=240) as it:
            await refuse_from(it, seq)
            legs, routes = it.server.begun, it.server.targets
        events = [x for one in read_journal(folder / "journal.jsonl") for x in one.events]
        assert legs <= sum(isinstance(x, CREDIT) for x in events)
        saves = sum("action=save" in route for route in routes)
        assert saves <= sum(isinstance(x, e.LeaseParking) for x in events)
        restores = sum("action=restore" in route for route in routes)
        assert restores <= sum(isinstance(x, e.LeaseResumed) for x in events)
        ends.add(len(events))
    assert len(ends) > 20
