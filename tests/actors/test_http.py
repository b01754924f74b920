"""What the HTTP door accepts, refuses and answers, spoken to in plain bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

import httpx
import pytest
import trio
from attrs import evolve

from kvalet.actors.http import App, Exchange, HttpLimits, serve_http
from kvalet.protocol.errors import ClientFault, EnvironmentFault, KvaletError, ServerFault

QUICK = HttpLimits(
    body_bytes=100_000,
    header_bytes=20_000,
    header_deadline_s=0.2,
    body_deadline_s=0.2,
    idle_s=0.2,
    write_deadline_s=5,
)
HOST = b"Host: door\r\n"
TEXT = {"content-type": "text/plain"}


async def echo(exchange: Exchange) -> None:
    """Say what was asked."""
    request = exchange.request
    answer = {"method": request.method, "path": request.path, "query": request.query}
    answer |= {"headers": request.headers, "body": request.body.decode(), "peer": request.peer}
    await exchange.respond(200, TEXT, json.dumps(answer).encode())


async def count_up(exchange: Exchange) -> None:
    """Stream three chunks."""
    await exchange.start_stream(200, TEXT)
    for number in range(3):
        await exchange.send(b"%d\n" % number)
    await exchange.send(b"")
    await exchange.finish()


async def open_door(nursery: trio.Nursery, app: App, limits: HttpLimits = QUICK) -> int:
    """Serve ``app`` until the test ends; the port."""
    serve = partial(serve_http, app, ("127.0.0.1", 0), limits)
    ((_, port),) = await nursery.start(serve)
    return int(port)


async def read_all(stream: trio.SocketStream) -> bytes:
    heard = b""
    with trio.fail_after(5):
        async for chunk in stream:
            heard += chunk
    return heard


async def ask(port: int, wire: bytes) -> bytes:
    """Everything the door says until it closes."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(wire)
        return await read_all(stream)


def body_of(answer: bytes) -> dict[str, object]:
    body: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return body


def refusal(answer: bytes) -> tuple[int, object]:
    """Status and code of an error answer, whose shape is checked."""
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert {"message", "type", "code"} <= error.keys()
    return int(answer.split()[1]), error["code"]


async def test_a_request_arrives_decoded(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo)
    answer = body_of(
        await ask(
            port, b"GET /a%20b?x=1&x=2&y= HTTP/1.1\r\nX-One: 1\r\nx-one: 2\r\n" + HOST + b"\r\n"
        )
    )
    assert (answer["method"], answer["path"]) == ("GET", "/a b")
    assert answer["query"] == {"x": "2", "y": ""}
    assert answer["headers"] == {"x-one": "1, 2", "host": "door"}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", str(answer["peer"]))


async def test_an_absolute_target_is_read_as_its_path(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo)
    for target, path in [(b"http://door/v1/x?q=1", "/v1/x"), (b"http://door", "/")]:
        answer = body_of(await ask(port, b"GET %b HTTP/1.1\r\n%b\r\n" % (target, HOST)))
        assert answer["path"] == path


@pytest.mark.parametrize("together", [True, False])
async def test_two_requests_share_a_connection(nursery: trio.Nursery, together: bool) -> None:
    port = await open_door(nursery, echo)
    first = b"POST /1 HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\nhi"
    second = b"GET /2 HTTP/1.1\r\n" + HOST + b"\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(first + second if together else first)
        heard = b""
        if not together:
            heard = await stream.receive_some()
            await stream.send_all(second)
        heard += await read_all(stream)
    assert heard.count(b"HTTP/1.1 200 OK") == 2
    assert heard.index(b'"/1"') < heard.index(b'"/2"')


async def test_a_connection_serves_on_after_a_stream_and_then_idles_out(
    nursery: trio.Nursery,
) -> None:
    port = await open_door(nursery, count_up)
    started_s = trio.current_time()
    heard = await ask(port, (b"GET / HTTP/1.1\r\n" + HOST + b"\r\n") * 2)
    assert heard.count(b"2\r\n0\n\r\n2\r\n1\n\r\n2\r\n2\n\r\n0\r\n\r\n") == 2
    assert 0.15 < trio.current_time() - started_s < 2


async def test_an_http_1_0_client_gets_bare_bytes_until_the_close(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, count_up)
    heard = await ask(port, b"GET / HTTP/1.0\r\n\r\n")
    assert heard.endswith(b"\r\n\r\n0\n1\n2\n")
    assert b"chunked" not in heard


@pytest.mark.parametrize("app", [echo, count_up])
async def test_head_gets_headers_and_no_body(nursery: trio.Nursery, app: App) -> None:
    port = await open_door(nursery, app)
    heard = await ask(port, b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert heard.startswith(b"HTTP/1.1 200 OK\r\n")
    assert heard.endswith(b"\r\n\r\n")
    assert heard.count(b"\r\n\r\n") == 1


async def test_a_status_without_a_body_has_no_length(nursery: trio.Nursery) -> None:
    async def nothing(exchange: Exchange) -> None:
        await exchange.respond(204, {}, b"")

    port = await open_door(nursery, nothing)
    heard = await ask(port, b"DELETE / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert heard.startswith(b"HTTP/1.1 204")
    assert b"content-length" not in heard.lower()


async def test_a_client_who_asks_first_is_told_to_go_on(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo)
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(
            b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n" + HOST + b"\r\n"
        )
        assert await stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await stream.send_all(b"hi")
        assert body_of(await read_all(stream))["body"] == "hi"


async def test_a_chunked_request_is_put_together(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo)
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"\r\n"
    answer = body_of(await ask(port, head + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"))
    assert answer["body"] == "abcde"


async def test_a_client_who_offers_an_upgrade_is_served_without_it(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo)
    offer = b"GET /up HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n" + HOST + b"\r\n"
    heard = await ask(port, offer * 2)
    assert heard.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a/../b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 400),
        (b"GET /%ff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /%0d%0aX HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /?" + b"a&" * 200 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 200),
        (b"GET /?" + b"a=1&" * 300 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"CONNECT door:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n" + HOST + b"\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n" + HOST + b"\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n" + HOST + b"\r\n", 501),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n"
            + HOST
            + b"\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"\r\nzz\r\n", 400),
    ],
)
async def test_a_malformed_request_is_refused(
    nursery: trio.Nursery, wire: bytes, status: int
) -> None:
    port = await open_door(nursery, echo)
    heard = await ask(port, wire)
    assert int(heard.split()[1]) == status
    if status != 200:
        assert refusal(heard)[0] == status
        assert b"connection: close" in heard


@pytest.mark.parametrize(
    ("size", "status"), [(12_000, 200), (19_960, 200), (19_990, 431), (200_000, 431)]
)
async def test_headers_have_a_hard_limit(nursery: trio.Nursery, size: int, status: int) -> None:
    port = await open_door(nursery, echo)
    heard = await ask(port, b"GET / HTTP/1.1\r\nX: " + b"x" * size + b"\r\n" + HOST + b"\r\n")
    assert int(heard.split()[1]) == status


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_over_the_limit_is_refused_and_the_answer_survives(
    nursery: trio.Nursery, chunked: bool
) -> None:
    port = await open_door(nursery, echo)
    size = 350_000
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    body = b"x" * size
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
    with trio.fail_after(1.5):
        heard = await ask(port, b"POST / HTTP/1.1\r\n" + HOST + framing + b"\r\n\r\n" + body)
    assert refusal(heard) == (413, "too_large")


async def test_a_body_over_the_limit_is_refused_before_it_is_sent(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo)
    head = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 999999\r\n" + HOST + b"\r\n"
    assert refusal(await ask(port, head)) == (413, "too_large")


@pytest.mark.parametrize(
    "wire",
    [
        b"GET / HTTP/1.1\r\nHos",
        b"POST / HTTP/1.1\r\nContent-Length: 9\r\n" + HOST + b"\r\nhalf",
    ],
)
async def test_a_request_that_stops_half_way_is_timed_out(
    nursery: trio.Nursery, wire: bytes
) -> None:
    port = await open_door(nursery, echo)
    started_s = trio.current_time()
    assert refusal(await ask(port, wire)) == (408, "timeout")
    assert 0.15 < trio.current_time() - started_s < 2


async def test_a_silent_connection_is_closed_without_a_word(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo)
    assert await ask(port, b"") == b""


async def test_one_connection_too_many_is_refused(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo, evolve(QUICK, connections_max=1, idle_s=5))
    request = b"GET / HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", port) as first:
        assert refusal(await ask(port, request)) == (503, "overloaded")
        await first.send_all(request)
        assert (await read_all(first)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("fault", "status", "fields"),
    [
        (lambda: ClientFault("no", fields={"n_ctx": 7}), 400, {"code": "invalid_request"}),
        (lambda: ServerFault("it died"), 502, {"code": "server_lost", "type": "server_error"}),
        (lambda: EnvironmentFault("no disk"), 503, {"code": "internal"}),
        (
            lambda: ExceptionGroup("from a nursery", [ClientFault("no", status=404, code="gone")]),
            404,
            {"code": "gone", "type": "not_found_error"},
        ),
    ],
)
async def test_a_fault_is_answered_in_the_dialect_and_the_connection_lives(
    nursery: trio.Nursery,
    fault: Callable[[], KvaletError | ExceptionGroup[KvaletError]],
    status: int,
    fields: dict[str, str],
) -> None:
    async def refuse(_exchange: Exchange) -> None:
        raise fault()

    port = await open_door(nursery, refuse)
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(2):
            answer = await client.get(f"http://127.0.0.1:{port}/")
            assert answer.status_code == status
            assert answer.json()["error"].items() >= fields.items()


async def test_a_fault_after_the_headers_cuts_the_stream(nursery: trio.Nursery) -> None:
    async def fail_late(exchange: Exchange) -> None:
        await exchange.start_stream(200, TEXT)
        await exchange.send(b"some")
        raise ServerFault("it died")

    port = await open_door(nursery, fail_late)
    heard = await ask(port, b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert heard.endswith(b"\r\n\r\n4\r\nsome\r\n")


async def test_a_bug_is_answered_500_and_ends_the_service() -> None:
    async def stumble(_exchange: Exchange) -> None:
        raise ZeroDivisionError

    heard = b""
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            port = await open_door(nursery, stumble)
            with trio.CancelScope(shield=True):
                heard = await ask(port, b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert refusal(heard) == (500, "internal")


@pytest.mark.parametrize(
    ("name", "value"),
    [("x", "a\r\nset-cookie: b"), ("x", "a\nb"), ("x\r\ny", "a"), ("", "a"), ("x", "\u2028")],
)
async def test_a_header_cannot_split_the_answer(
    nursery: trio.Nursery, name: str, value: str
) -> None:
    async def split(exchange: Exchange) -> None:
        with pytest.raises(ValueError, match=r"header|control|latin-1"):
            await exchange.respond(200, {name: value}, b"")
        await exchange.respond(200, {"Content-Length": "999", "Connection": "keep"}, b"safe")

    port = await open_door(nursery, split)
    heard = await ask(port, b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert heard.endswith(b"content-length: 4\r\n\r\nsafe")


async def test_a_taken_port_is_the_environments_fault(nursery: trio.Nursery) -> None:
    port = await open_door(nursery, echo)
    with pytest.raises(EnvironmentFault, match=str(port)):
        await serve_http(echo, ("127.0.0.1", port))
