"""Silence: what is a stall, what excuses it, and who is told that it is still waited for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from kvalet.protocol import commands as c
from kvalet.protocol.ids import Cells, SlotId
from tests.actors.scripted import Json
from tests.actors.stage import Guest, Stage, chat, opening, stage, until

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


async def ends(it: Stage, guest: Guest) -> float:
    """How many seconds until the guest's answer ended."""
    began = trio.current_time()
    await until(lambda: guest.done)
    return trio.current_time() - began


async def settle(it: Stage) -> None:
    await it.all_gone()
    await trio.sleep(5)
    it.check_empty()


def stalls(guest: Guest) -> list[Json]:
    return [error for error in guest.errors if error["code"] == "stalled"]


@pytest.mark.parametrize(("fault", "limit_s"), [("silence", 120), ("pings", 120), ("mute", 1200)])
async def test_silence_is_one_stall_error_at_its_deadline(
    tmp_path: Path, autojump_clock: MockClock, fault: str, limit_s: int
) -> None:
    async with stage(tmp_path) as it:
        it.server.legs = {0: fault}
        silent = it.invite(chat("one"))
        await until(lambda: bool(it.server.begun))
        neighbour = it.invite(chat("two"))
        spent_s = await ends(it, silent)
        await settle(it)
        silent.check_ended_once()
        assert len(stalls(silent)) == 1
        assert limit_s - 1 <= spent_s < limit_s + 5
        assert neighbour.content == it.server.answer.decode()


async def test_a_stalled_answer_that_is_not_streamed_is_a_504(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as it:
        it.server.legs = {0: "silence"}
        guest = it.invite(chat(stream=False))
        await settle(it)
        assert guest.status == 504


async def test_waiting_clients_hear_every_two_seconds_that_they_wait(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, seats=1) as it:
        it.server.legs = {0: "pause"}
        it.invite(chat("one"))
        await trio.sleep(0.5)
        queued = it.invite(chat("two"))
        await settle(it)
        assert 45 <= queued.comments.count(b": admission-wait") <= 55
        assert queued.comments.count(b": admission-done") == 1
        assert queued.content == it.server.answer.decode()


async def test_silence_while_parked_is_no_stall_and_is_filled_with_comments(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, cells=240) as it:
        it.server.token_s = 12.0
        guests = [it.invite(chat(name)) for name in ("one", "two", "six")]
        await settle(it)
        for guest in guests:
            guest.check_ended_once()
            assert guest.content == it.server.answer.decode()
        kept = [guest.comments.count(b": preempt-keepalive") for guest in guests]
        assert max(kept) > 50


async def test_a_long_prefill_that_tells_its_progress_is_no_stall(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, cells=216) as it:
        it.server.legs = dict.fromkeys(range(200), "slow-prefill")
        guests = [it.invite(chat(name)) for name in ("one", "two", "six")]
        await settle(it)
        assert it.house.totals.resumes > 0
        assert [guest.errors for guest in guests] == [[], [], []]


async def test_a_server_that_hangs_between_two_legs_fails_one_answer_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, cells=120) as it:
        guest = it.invite(chat())
        await until(lambda: bool(it.server.begun))
        it.server.faults = [("POST /apply-template", lambda: None)]
        await settle(it)
        guest.check_ended_once()
        assert len(guest.errors) == 1


async def test_a_client_who_reads_slowly_is_not_taken_for_a_stalled_server(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as it:
        slow, quick = it.invite(chat("one")), it.invite(chat("two"))
        await until(lambda: bool(slow.content))
        slow.paper.reads = trio.Event()
        await trio.sleep(400)
        assert quick.content == it.server.answer.decode()
        slow.paper.reads.set()
        await settle(it)
        slow.check_ended_once()
        assert slow.content == it.server.answer.decode()


async def test_a_client_who_reads_slowly_while_its_chat_is_recomputed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, cells=240, method="recompute") as it:
        guests = [it.invite(chat(name)) for name in ("one", "two", "six")]
        await until(lambda: bool(it.house.totals.resumes))
        for guest in guests:
            guest.paper.reads = trio.Event()
        await trio.sleep(50)
        for guest in guests:
            guest.paper.reads.set()
        await settle(it)
        for guest in guests:
            guest.check_ended_once()
            assert guest.content == it.server.answer.decode()


@pytest.mark.parametrize(("fault", "kept"), [("long-park", 180), ("early-park", 180)])
async def test_a_park_by_the_server_of_any_length_is_no_stall_before_or_after_the_first_token(
    tmp_path: Path, autojump_clock: MockClock, fault: str, kept: int
) -> None:
    async with stage(tmp_path, method="server", first_token_s=200) as it:
        it.server.legs = {0: fault}
        guest = it.invite(chat())
        await settle(it)
        guest.check_ended_once()
        assert guest.errors == []
        assert guest.content == it.server.answer.decode()
        told = [one for one in guest.comments if one != b": preempt-keepalive"]
        assert told == [b": preempt-paused", b": preempt-resumed"]
        assert guest.comments.count(b": preempt-keepalive") > kept
        assert it.house.totals.parks == it.house.totals.resumes == 1


async def test_silence_after_the_server_has_resumed_is_a_stall_at_its_deadline(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, method="server") as it:
        it.server.legs = {0: "dead-park"}
        guest = it.invite(chat())
        spent_s = await ends(it, guest)
        await settle(it)
        assert len(stalls(guest)) == 1
        assert 119 <= spent_s < 125


async def test_a_recompute_of_the_servers_is_told_behind_its_resume_and_counted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, method="server") as it:
        it.server.legs = {0: "recompute"}
        guest = it.invite(chat())
        await settle(it)
        told = [one for one in guest.comments if one != b": preempt-keepalive"]
        assert told == [b": preempt-paused", b": preempt-resumed", b": preempt-recomputed"]
        assert it.house.totals.recomputes == 1
        assert it.server.begun == 1, "one upstream request for the whole answer"


async def test_a_whole_answer_says_how_often_and_how_long_the_server_had_it_parked(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, method="server") as it:
        it.server.legs = {0: "long-park", 1: "recompute"}
        guests: list[Guest] = []
        for name in ("one", "two"):
            guests.append(it.invite(chat(name, stream=False)))
            await settle(it)
        parked, again = (msgspec.json.decode(guest.body)["usage"]["kvalet"] for guest in guests)
        assert (parked["parks"], parked["resumes"], parked["recomputes"]) == (1, 1, 0)
        assert 420 <= parked["parked_s"] <= 424
        assert (again["parks"], again["resumes"], again["recomputes"]) == (1, 1, 1)


async def test_on_a_build_that_parks_in_silence_a_slot_read_as_parked_excuses_its_own_stream(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, ready=False, method="server") as it:
        ready, probed = opening(400, 3, "server")
        assert isinstance(ready, c.ReadySeen)
        it.ledger.decide([replace(ready, parks=True, headroom=Cells(0)), probed])
        it.server.legs = {0: "silent-park", 1: "silence"}
        parked = it.invite(chat("one"))
        await until(lambda: it.server.begun == 1)
        dead = it.invite(chat("two"))
        await until(lambda: it.server.begun == 2)
        busy = tuple((SlotId(slot), Cells(0), True) for slot in range(3))
        it.ledger.tell(c.PressureRead(slots=busy, parked=(SlotId(0),)))
        spent_s = await ends(it, dead)
        assert 119 <= spent_s < 125
        assert len(stalls(dead)) == 1
        await settle(it)
        assert parked.errors == []
        assert parked.content == it.server.answer.decode()
        told = [one for one in parked.comments if one != b": preempt-keepalive"]
        assert told == [b": preempt-paused", b": preempt-resumed"]
        assert parked.comments.count(b": preempt-keepalive") > 700
        assert it.house.totals.parks == it.house.totals.resumes == 1
