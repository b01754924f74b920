"""What a client may write into a request, and what of it reaches llama-server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from kvalet.protocol import commands as c
from tests.actors.scripted import Json
from tests.actors.stage import CHAT, Guest, Stage, chat, opening, stage, until

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


async def answered(it: Stage, guest: Guest) -> Guest:
    await it.all_gone()
    return guest


@pytest.mark.parametrize(
    "target",
    [
        "http://attacker.example/props",
        "https://attacker.example:9/props",
        "//attacker.example/props",
        "//a:b/props",
        "//[/props",
        "/:x",
        "/props?x=http://attacker.example/",
        "*",
    ],
)
async def test_a_passed_request_goes_to_the_server_and_nowhere_else(
    tmp_path: Path, autojump_clock: MockClock, target: str
) -> None:
    path = "/props" if "://" in target.partition("?")[0] else target.partition("?")[0]
    async with stage(tmp_path) as it:
        guest = it.invite(path=path, target=target, method="GET")
        await it.all_gone()
        assert guest.status == 404
        assert [url.startswith("http://127.0.0.1:9/") for url in it.server.targets] == [True]


async def test_a_target_that_no_url_can_hold_is_a_400(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as it:
        guest = it.invite(path="/" + '"' * 40_000, method="GET")
        await it.all_gone()
        assert guest.status == 400


@pytest.mark.parametrize("after", ["²", "9" * 5000, "-1", "x", "1e3"])
async def test_an_after_that_is_no_sequence_number_is_a_400(
    tmp_path: Path, autojump_clock: MockClock, after: str
) -> None:
    async with stage(tmp_path) as it:
        asked = it.invite(path=f"/kvalet/events?after={after}", method="GET")
        headers = {"last-event-id": after}
        reconnected = it.invite(path="/kvalet/events", method="GET", headers=headers)
        await it.all_gone()
        assert (asked.status, reconnected.status) == (400, 400)


async def test_a_reader_of_events_beyond_the_end_hears_only_what_is_new(tmp_path: Path) -> None:
    async with stage(tmp_path) as it:
        it.server.token_s = it.server.prefill_s = 0.0
        reader = it.invite(path="/kvalet/events?after=6", method="GET")
        it.invite(chat())
        last = b"lease.released"
        with trio.fail_after(20):
            await until(lambda: last in reader.body)
        assert reader.events[0] == b": ping"
        ids = [int(block.split(b"\n")[0][4:]) for block in reader.events if block[:1] == b"i"]
        assert ids == sorted(ids)
        assert ids[0] > 6
        assert ids[-1] == it.ledger.journal.seq
        reader.scope.cancel()
        await it.all_gone()


@pytest.mark.parametrize("wish", ["²", "9" * 5000, "x", "-1", "9" * 30])
async def test_a_wish_for_parks_that_is_no_number_is_a_400_even_before_the_server_is_up(
    tmp_path: Path, autojump_clock: MockClock, wish: str
) -> None:
    async with stage(tmp_path, debug=True, ready=False) as it:
        guest = it.invite(chat(), headers={"kvalet-park-every": wish})
        await trio.sleep(1)
        it.ledger.decide(opening(400, 3, "save"))
        await it.all_gone()
        assert guest.status == 400


async def test_nothing_of_the_clients_headers_reaches_the_server(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    mine = {
        "x-conversation-id": "mine",
        "accept-encoding": "br",
        "connection": "keep-alive",
        "authorization": "Bearer client-key",
        "x-big": "x" * 60_000,
        "content-type": "text/odd",
    }
    async with stage(tmp_path, keys=("client-key",)) as it:
        asked = [
            it.invite(chat(), headers=mine),
            it.invite(path="/props", method="GET", headers=mine),
            it.invite({"content": "a"}, path="/tokenize", headers=mine),
        ]
        await it.all_gone()
        assert [guest.status for guest in asked] == [200, 404, 200]
        for headers in it.server.headers:
            assert headers["authorization"] == "Bearer upstream-key"
            assert "client-key" not in str(headers.raw)
            assert not {"x-conversation-id", "x-big"} & set(headers)
            assert "br" not in headers.get("accept-encoding", "").replace(" ", "").split(",")
    assert b"-key" not in (tmp_path / "journal.jsonl").read_bytes()


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", "Bearer client-ke", "Bearer \xe9"])
async def test_a_wrong_key_opens_nothing_and_is_not_repeated(
    tmp_path: Path, autojump_clock: MockClock, given: str
) -> None:
    async with stage(tmp_path, keys=("client-key",)) as it:
        guest = it.invite(chat(), headers={"authorization": given})
        await it.all_gone()
        assert guest.status == 401
        assert b"client-key" not in guest.body
        assert it.server.targets == []


async def test_a_chat_that_waits_for_the_server_is_told_when_it_failed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, ready=False) as it:
        streamed, whole = it.invite(chat()), it.invite(chat(stream=False))
        await trio.sleep(7)
        assert streamed.comments.count(b": admission-wait") == 4
        it.ledger.decide([c.ExitSeen(generation=0, code=1, planned=False, reason="no memory")])
        await it.all_gone()
        assert whole.status == 503
        assert [error["code"] for error in streamed.errors] == ["server_unavailable"]
        assert streamed.whole


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2**31 - 1},
        {"max_tokens": 2**31 - 1},
        {"max_tokens": 0},
        {"seed": 10**300},
        {"seed": 1e300},
        {"stop": ["", "zz", "😀"]},
        {"id_slot": 99},
        {"stream_options": {"include_usage": True}},
        {"cache_prompt": False},
    ],
)
async def test_odd_fields_neither_hang_nor_break_anything(
    tmp_path: Path, autojump_clock: MockClock, fields: Json
) -> None:
    async with stage(tmp_path) as it:
        asked = [it.invite(chat(stream=flag, **fields)) for flag in (True, False)]
        await it.all_gone()
        assert {guest.status for guest in asked} <= {200, 400}
        asked[0].check_ended_once()
        await trio.sleep(5)
        it.check_empty()


async def test_a_body_of_raw_nonsense_is_a_400(tmp_path: Path, autojump_clock: MockClock) -> None:
    bodies = [b"", b"\xff\xfe", b"[]", b"{", b"[" * 100_000, b'{"messages":[{"role":5}]}', b"null"]
    async with stage(tmp_path) as it:
        asked = [it.invite(path=CHAT, body=body) for body in bodies]
        await it.all_gone()
        assert {guest.status for guest in asked} == {400}
        assert all("error" in msgspec.json.decode(guest.body) for guest in asked)
