"""llama-server fails in every way it can: one outcome for its client, none for the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.actors.stage import Stage, chat, stage

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

BROKEN = ["cut", "cut-mid-event", "garbage", "error-event", "no-finish"]


Outcome = Callable[[], httpx.Response | Exception | None]


def oops(status: int) -> Outcome:
    return lambda: httpx.Response(status, json={"error": {"message": "oops", "code": status}})


def garbage(content: bytes) -> Outcome:
    return lambda: httpx.Response(200, stream=httpx.ByteStream(content))


async def settle(it: Stage) -> None:
    await it.all_gone()
    await trio.sleep(5)
    it.check_empty()


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("leg", [0, 3])
@pytest.mark.parametrize("fault", BROKEN)
async def test_a_stream_that_breaks_ends_its_own_answer_once(
    tmp_path: Path, autojump_clock: MockClock, fault: str, leg: int, streaming: bool
) -> None:
    async with stage(tmp_path, cells=240) as it:
        it.server.legs = {leg: fault}
        guests = [it.invite(chat(name, stream=streaming)) for name in ("one", "two", "six")]
        await settle(it)
        failed = [guest for guest in guests if guest.status != 200 or guest.errors]
        assert len(failed) == 1
        for guest in guests:
            if streaming:
                guest.check_ended_once()
            if guest not in failed:
                assert guest.content == it.server.answer.decode()
        assert it.house.totals.failed == 1
        if not streaming:
            assert failed[0].status in (500, 502)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_refused_first_leg_is_told_in_the_servers_own_words(
    tmp_path: Path, autojump_clock: MockClock, streaming: bool
) -> None:
    async with stage(tmp_path) as it:
        it.server.legs = {0: "400"}
        guest = it.invite(chat(stream=streaming))
        await settle(it)
        assert guest.status == 400
        assert msgspec.json.decode(guest.body)["error"]["x"] == 1
        assert it.house.totals.refused == 1


async def test_a_refused_later_leg_is_one_error_event_and_no_injected_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, cells=120) as it:
        it.server.legs = {1: "400"}
        guest = it.invite(chat())
        await settle(it)
        guest.check_ended_once()
        assert guest.errors[0]["message"] == "no\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("route", "outcome", "status"),
    [
        ("POST /apply-template", oops(500), 500),
        ("POST /apply-template", oops(400), 400),
        ("POST /tokenize", lambda: httpx.ConnectError("refused"), 502),
        ("POST /tokenize", garbage(b"garbage"), 502),
        ("POST /v1/chat", lambda: httpx.ConnectError("refused"), 502),
        ("POST /v1/chat", garbage(b'{"choices":[]}'), 502),
    ],
)
async def test_a_first_word_that_fails_is_an_http_status(
    tmp_path: Path,
    autojump_clock: MockClock,
    route: str,
    outcome: Outcome,
    status: int,
    streaming: bool,
) -> None:
    async with stage(tmp_path) as it:
        it.server.faults = [(route, outcome)]
        guest = it.invite(chat(stream=streaming))
        await settle(it)
        if guest.status == 200:
            guest.check_ended_once()
            assert guest.errors
        else:
            assert guest.status == status


@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize(
    "outcome",
    [oops(500), oops(400), garbage(b"?"), lambda: httpx.ReadError("gone")],
    ids=["500", "400", "garbage", "cut"],
)
async def test_cells_that_cannot_be_moved_are_computed_again(
    tmp_path: Path, autojump_clock: MockClock, action: str, outcome: Outcome
) -> None:
    async with stage(tmp_path, cells=240) as it:
        it.server.faults = [(f"POST /slots/{n}?action={action}", outcome) for n in range(3)]
        guests = [it.invite(chat(name)) for name in ("one", "two", "six")]
        await settle(it)
        for guest in guests:
            guest.check_ended_once()
            assert guest.content == it.server.answer.decode()
        assert it.house.totals.parks > 0
        assert len(it.server.faults) < 3


@pytest.mark.parametrize("outcome", [oops(500), lambda: httpx.ReadError("gone")])
async def test_a_slot_that_cannot_be_emptied_harms_no_neighbour(
    tmp_path: Path, autojump_clock: MockClock, outcome: Outcome
) -> None:
    async with stage(tmp_path, cells=240) as it:
        it.server.faults = [("POST /slots/1?action=erase", outcome)]
        guests = [it.invite(chat(name)) for name in ("one", "two", "six")]
        await settle(it)
        for guest in guests:
            guest.check_ended_once()
        assert sum(bool(guest.errors) for guest in guests) <= 1


async def test_a_server_that_cannot_erase_still_serves_everybody(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, cells=240, method="recompute") as it:
        it.server.can_erase = False
        guests = [it.invite(chat(name)) for name in ("one", "two", "six")]
        await it.all_gone()
        for guest in guests:
            guest.check_ended_once()
            assert guest.content == it.server.answer.decode()


async def test_slots_that_are_reported_as_garbage_are_asked_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as it:
        it.server.faults = [("GET /slots", garbage(b"[7]"))] * 3
        guest = it.invite(chat())
        await settle(it)
        assert guest.content == it.server.answer.decode()


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_build_that_hides_its_timings_still_gives_whole_answers(
    tmp_path: Path, autojump_clock: MockClock, streaming: bool
) -> None:
    async with stage(tmp_path, cells=120) as it:
        it.server.legs = dict.fromkeys(range(50), "no-timings")
        guest = it.invite(chat(stream=streaming))
        await settle(it)
        assert guest.content == it.server.answer.decode()


async def test_a_burst_of_notices_in_one_read_disturbs_nobody(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as it:
        it.server.legs = {0: "notices"}
        guests = [it.invite(chat("one")), it.invite(chat("two"))]
        await settle(it)
        assert [guest.content for guest in guests] == [it.server.answer.decode()] * 2
