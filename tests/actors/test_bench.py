"""What the bench counts, against servers that are scripted byte by byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import httpx
import pytest
import trio
import trio.testing

from kvalet.actors.bench import BenchReport, ChatView, prompt_for, run_bench
from kvalet.actors.http import serve_http
from kvalet.actors.http_exchange import Exchange, HttpLimits
from kvalet.protocol.errors import ConfigFault, EnvironmentFault

Piece = bytes | float
"""Bytes to send, or seconds to be silent."""

URL = "http://server"
DONE = b"data: [DONE]\n\n"


def token(text: str = "a") -> bytes:
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def finish(reason: str = "length") -> bytes:
    delta: dict[str, str] = {}
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def usage(tokens: int, **kvalet: float) -> bytes:
    figures: dict[str, object] = {"completion_tokens": tokens, "prompt_tokens": 9}
    if kvalet:
        figures["kvalet"] = kvalet
    return b"data: " + json.dumps({"choices": [], "usage": figures}).encode() + b"\n\n"


class Script(httpx.AsyncByteStream):
    """An answer that comes piece by piece, with silences, and may break off."""

    def __init__(self, pieces: Sequence[Piece | Exception]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, bytes):
                yield piece
            else:
                await trio.sleep(piece)


class ScriptedServer(httpx.AsyncBaseTransport):
    """Answers the n-th chat with the n-th script; keeps what it was asked."""

    def __init__(self, *scripts: Sequence[Piece | Exception], status: int = 200) -> None:
        self._scripts = scripts
        self._status = status
        self.bodies: list[dict[str, object]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "tiny"}]})
        assert isinstance(request.stream, httpx.AsyncByteStream)
        body = b"".join([piece async for piece in request.stream])
        self.bodies.append(json.loads(body))
        script = self._scripts[(len(self.bodies) - 1) % len(self._scripts)]
        return httpx.Response(self._status, stream=Script(script))


async def bench(
    server: ScriptedServer,
    chats: int = 1,
    tokens: int = 3,
    on_update: Callable[[tuple[ChatView, ...]], None] | None = None,
) -> BenchReport:
    async with httpx.AsyncClient(transport=server) as client:
        return await run_bench(URL, chats, tokens, on_update, client=client)


async def test_a_chat_that_ends_well_is_finished_and_counted_as_billed() -> None:
    report = await bench(ScriptedServer([token(), token("bc"), finish(), usage(3), DONE]))
    (chat,) = report.chats
    assert (chat.finished, chat.tokens, chat.finish_reason, chat.error) == (
        *(True, 3, "length"),
        None,
    )
    assert (report.finished, report.failed) == (1, 0)


async def test_tokens_are_counted_by_chunks_where_nothing_is_billed() -> None:
    report = await bench(ScriptedServer([token(), token(), finish("stop"), DONE]))
    assert report.chats[0].tokens == 2


async def test_every_chat_asks_for_the_same_number_of_tokens_with_another_prompt() -> None:
    server = ScriptedServer([token(), finish(), DONE])
    await bench(server, chats=3, tokens=5)
    assert len({json.dumps(body["messages"]) for body in server.bodies}) == 3
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 5, 0)
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}


def test_no_two_prompts_are_alike() -> None:
    assert len({prompt_for(number) for number in range(40)}) == 40


async def test_an_error_in_the_stream_fails_the_chat_and_keeps_its_tokens() -> None:
    error = b'data: {"error":{"code":500,"message":"Context size has been exceeded."}}\n\n'
    report = await bench(ScriptedServer([token(), token(), error]))
    (chat,) = report.chats
    assert not chat.finished
    assert (chat.tokens, chat.error) == (2, "Context size has been exceeded.")
    assert report.failed == 1


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([token(), DONE], "the stream ended without a finish_reason"),
        ([token(), finish()], "the stream ended without [DONE]"),
        ([token(), b"data: {nonsense\n\n"], "llama-server sent a stream event that is not und"),
        ([token(), httpx.ReadError("cut")], "the connection broke: cut"),
        ([token(), httpx.ReadError("")], "the connection broke: ReadError"),
    ],
)
async def test_a_stream_that_does_not_end_as_it_should_is_a_failure(
    script: list[Piece | Exception], error: str
) -> None:
    (chat,) = (await bench(ScriptedServer(script))).chats
    assert not chat.finished
    assert (chat.error or "").startswith(error)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error":{"message":"too large","code":400}}', "status 400: too large"),
        (b'{"error":"busy"}', "status 400: busy"),
        (b"<html>\nno", "status 400: <html> no"),
        (b"", "status 400: no reason given"),
    ],
)
async def test_a_refusal_is_told_in_the_servers_own_words(body: bytes, error: str) -> None:
    (chat,) = (await bench(ScriptedServer([body], status=400))).chats
    assert (chat.finished, chat.error) == (False, error)


async def test_parks_are_counted_from_comments() -> None:
    script: list[Piece] = [
        *(token(), b": preempt-paused\n\n", b": preempt-keepalive\n\n"),
        *(b": preempt-resumed\n\n", b": preempt-recomputed\n\n", token(), finish(), DONE),
    ]
    (chat,) = (await bench(ScriptedServer(script))).chats
    assert (chat.parks, chat.resumes, chat.recomputes) == (1, 1, 1)


async def test_a_server_that_parks_by_itself_is_understood_too() -> None:
    script = [token(), b": preempted\n\n", b": resumed 0\n\n", token(), finish(), DONE]
    (chat,) = (await bench(ScriptedServer(script))).chats
    assert (chat.parks, chat.resumes, chat.recomputes) == (1, 1, 0)


async def test_kvalets_own_figures_are_trusted_over_the_comments() -> None:
    script = [token(), b": preempt-paused\n\n", usage(1, parks=3, resumes=2), finish(), DONE]
    (chat,) = (await bench(ScriptedServer(script))).chats
    assert (chat.parks, chat.resumes, chat.recomputes) == (3, 2, 0)


async def test_silence_is_between_data_and_comments_do_not_break_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    script: list[Piece] = [
        1.5,
        token(),
        2.0,
        b": preempt-keepalive\n\n",
        2.0,
        token(),
        finish(),
        DONE,
    ]
    report = await bench(ScriptedServer(script))
    (chat,) = report.chats
    assert chat.ttft_s == pytest.approx(1.5)
    assert chat.longest_silence_s == pytest.approx(4.0)
    assert report.wall_s == pytest.approx(5.5)
    assert report.tokens_per_s == pytest.approx(2 / 5.5, abs=0.001)


async def test_one_failed_chat_does_not_disturb_the_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    good: list[Piece] = [token(), 1.0, token(), finish(), DONE]
    report = await bench(ScriptedServer(good, [httpx.ReadError("cut")]), chats=4)
    assert (report.finished, report.failed) == (2, 2)


async def test_whoever_watches_sees_each_state() -> None:
    seen: list[str] = []

    def watch(views: tuple[ChatView, ...]) -> None:
        seen.append(views[0].state)

    script = [token(), b": preempt-paused\n\n", b": preempt-resumed\n\n", finish(), DONE]
    await bench(ScriptedServer(script), on_update=watch)
    assert list(dict.fromkeys(seen)) == ["running", "paused", "done"]


async def test_an_address_that_is_none_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigFault, match="wants an address"):
        await run_bench("localhost:8383", 1, 1)


async def test_nobody_there_is_a_matter_of_the_environment() -> None:
    with pytest.raises(EnvironmentFault, match="no server answers"):
        await run_bench("http://127.0.0.1:1", 1, 1)


async def test_a_real_connection_carries_the_key_and_an_address_with_v1() -> None:
    keys: list[str | None] = []

    async def answer(exchange: Exchange) -> None:
        keys.append(exchange.request.headers.get("authorization"))
        if exchange.request.path == "/v1/models":
            await exchange.respond(200, {}, b"[]")
            return
        await exchange.start_stream(200, {"content-type": "text/event-stream"})
        for piece in (token(), finish(), DONE):
            await exchange.send(piece)
        await exchange.finish()

    async with trio.open_nursery() as nursery:
        door = partial(serve_http, answer, ("127.0.0.1", 0), HttpLimits())
        ((_, port),) = await nursery.start(door)
        report = await run_bench(f"http://127.0.0.1:{port}/v1/", 2, 1, api_key="k")
        nursery.cancel_scope.cancel()
    assert report.finished == 2
    assert keys == ["Bearer k"] * 3


async def test_a_server_that_wants_a_key_says_so() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.respond(401, {}, b"{}")

    async with trio.open_nursery() as nursery:
        door = partial(serve_http, refuse, ("127.0.0.1", 0), HttpLimits())
        ((_, port),) = await nursery.start(door)
        try:
            with pytest.raises(EnvironmentFault, match="--api-key-file"):
                await run_bench(f"http://127.0.0.1:{port}", 1, 1)
        finally:
            nursery.cancel_scope.cancel()
