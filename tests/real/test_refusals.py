"""Bad input over HTTP: each refused in OpenAI's shape, before any byte, leaving nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio

from kvalet.actors.app import Handle
from tests.real.clients import PROMPTS, ask, chat_body, kvalet, listen

pytestmark = pytest.mark.real

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
MIB = 1024 * 1024


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Handle]:
    async with kvalet(tmp_path, parallel=2) as handle:
        yield handle


def error_in(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, after a look at its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) >= {"message", "type", "code"}
    assert error["message"]
    return error


BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"'),
    (CHAT_PATH, b"\xff\xfe{}"),
    (CHAT_PATH, b""),
    (CHAT_PATH, b"[1, 2]"),
    (CHAT_PATH, b"{}"),
    (CHAT_PATH, b'{"messages": "hello"}'),
    (CHAT_PATH, b'{"messages": []}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": 5}]}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "ten"}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -5}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e30}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"}], "n": 0}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"}], "n": 3, "max_tokens": 5}'),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "x"}], "grammar": "root ::= ("}'),
    (CHAT_PATH, b"[" * 100_000),
    (TEXT_PATH, b'{"prompt": {}}'),
    (TEXT_PATH, b'{"prompt": []}'),
    (TEXT_PATH, b'{"prompt": [99999999], "max_tokens": 5}'),
    (TEXT_PATH, b'{"max_tokens": 5}'),
)


async def test_bad_bodies_are_refused_in_openais_shape_and_leave_nothing(front: Handle) -> None:
    async with httpx.AsyncClient(base_url=front.url, timeout=30, trust_env=False) as client:
        for path, body in BAD_BODIES:
            answer = await client.post(path, content=body)
            assert error_in(answer, 400)["type"].endswith("_error"), body[:80]
        with trio.fail_after(30):
            await front.ledger.wait_for(lambda house: not house.leases)
        house = front.ledger.house
        assert (house.granted_total, house.totals.failed, house.totals.left) == (0, 0, 0)
        assert house.totals.refused == house.totals.requests
        huge = await ask(front.url, chat_body("Say yes.", 2**31 - 1, ignore_eos=False, stop=["e"]))
        assert huge.status_code == 200


async def test_a_huge_body_is_refused_by_its_size(front: Handle) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * MIB

    async with httpx.AsyncClient(base_url=front.url, timeout=30, trust_env=False) as client:
        assert error_in(await client.post(CHAT_PATH, content=b" " * 50 * MIB), 413)
        assert error_in(await client.post(CHAT_PATH, content=endless()), 413)


async def test_a_prompt_larger_than_the_pool_is_told_both_numbers_first(front: Handle) -> None:
    for streaming in (True, False):
        body = chat_body("word " * 600, 5, stream=streaming)
        async with httpx.AsyncClient(base_url=front.url, timeout=30, trust_env=False) as client:
            error = error_in(await client.post(CHAT_PATH, json=body), 400)
        assert error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] > 600
        assert error["n_ctx"] <= 512
        assert str(error["n_prompt_tokens"]) in error["message"]
        assert str(error["n_ctx"]) in error["message"]


async def test_an_unknown_model_name_is_served_by_the_model_that_is_there(front: Handle) -> None:
    answer = await ask(front.url, chat_body(PROMPTS[0], 3, model="no-such-model"))
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3


async def test_unknown_ways_in_are_told_apart(front: Handle) -> None:
    async with httpx.AsyncClient(base_url=front.url, timeout=30, trust_env=False) as client:
        for path in ("/no/such", "/kvalet/no-such", "/v1/chat"):
            assert error_in(await client.get(path), 404)["type"] == "not_found_error"
            assert error_in(await client.post(path, json={}), 404)
        assert error_in(await client.get(CHAT_PATH), 405)
        assert error_in(await client.delete(CHAT_PATH), 405)
        assert error_in(await client.post("/kvalet/status"), 405)
        assert error_in(await client.post("/slots/0?action=erase"), 404)
        assert error_in(await client.post("/props", json={}), 404)
        assert error_in(await client.get("/health", headers={"Host": "a b"}), 400)
        assert error_in(await client.get("/kvalet/events?after=x"), 400)


async def test_what_is_no_http_is_refused_and_hung_up_on(front: Handle) -> None:
    port = urlsplit(front.url).port
    assert port is not None
    for garbage in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 200_000):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            got = b""
            with trio.fail_after(10):
                try:
                    await stream.send_all(garbage)
                    while piece := await stream.receive_some(4096):
                        got += piece
                except trio.BrokenResourceError:
                    pass
            assert got.startswith((b"HTTP/1.1 4", b"HTTP/1.1 505")), garbage[:20]


async def test_only_a_key_of_the_file_opens_the_door(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key\n\nsecond-key\n")
    async with kvalet(tmp_path / "state", parallel=2, api_key_file=keys) as front:
        body = chat_body(PROMPTS[0], 3)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer # ours"}):
            answer = await ask(front.url, body, headers=headers)
            assert error_in(answer, 401)["type"] == "authentication_error"
            heard = await listen(front.url, body, headers=headers)
            assert (heard.status, heard.data) == (401, [])
            async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
                assert (await client.get(front.url + "/kvalet/status")).status_code == 401
                assert (await client.get(front.url + "/slots")).status_code == 401
                assert (await client.get(front.url + "/health")).status_code == 200
        for headers in ({"Authorization": "Bearer second-key"}, {"X-Api-Key": "first-key"}):
            assert (await ask(front.url, body, headers=headers)).status_code == 200
