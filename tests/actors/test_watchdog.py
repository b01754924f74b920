"""The watchdog and attaching: what a server that is not ours answers."""

from __future__ import annotations

import httpx
import pytest
import trio
import trio.testing

from kvalet.actors import attach, watchdog
from kvalet.actors.server import Server
from kvalet.protocol.commands import Command, ExitSeen, HangSeen, ReadySeen
from kvalet.protocol.errors import ConfigFault, EnvironmentFault
from kvalet.protocol.ids import Cells

URL = "http://127.0.0.1:8080"


class FakeServer(httpx.AsyncBaseTransport):
    """Answers by path; ``health`` is a script of statuses, 0 for no answer, the last for ever."""

    def __init__(self, *health: int, key: str = "", slots: str = '[{"n_ctx":4096},{"n_ctx":4096}]'):
        self.health = [*health] or [200]
        self.key = key
        self.slots = slots
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if request.url.path == "/health":
            status = self.health.pop(0) if len(self.health) > 1 else self.health[0]
            if status == 0:
                raise httpx.ConnectError("refused")
            return httpx.Response(status)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401)
        if request.url.path == "/props":
            return httpx.Response(200, text='{"build_info":"b11434-abc","model_path":"/m/x.gguf"}')
        return httpx.Response(200, text=self.slots) if self.slots else httpx.Response(501)


async def heard(server: Server, fake: FakeServer, for_s: float) -> list[Command]:
    send, receive = trio.open_memory_channel[Command](10)
    with trio.move_on_after(for_s):
        await watchdog.run(server, send, transport=fake)
    return [report async for report in receive]


async def test_an_attached_server_that_is_gone_is_reported_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    fake = FakeServer(200, 0, 503, 0)
    reports = await heard(Server(url=URL, generation=3), fake, 600)

    assert reports == [ExitSeen(generation=3, code=0, planned=False, reason="unreachable")]
    assert fake.asked == ["/health"] * 4


async def test_two_failures_are_forgiven(autojump_clock: trio.testing.MockClock) -> None:
    fake = FakeServer(*[0, 503, 200] * 10)

    assert await heard(Server(url=URL), fake, 60) == []


async def test_a_launched_server_that_does_not_answer_hangs(
    autojump_clock: trio.testing.MockClock,
) -> None:
    reports = await heard(Server(url=URL, pid=7, generation=3), FakeServer(200, 0), 60)

    assert reports == [HangSeen(generation=3, silent_s=10.0)]


async def test_one_that_is_heard_on_a_stream_does_not_hang_however_slow_its_health_is(
    autojump_clock: trio.testing.MockClock,
) -> None:
    send, receive = trio.open_memory_channel[Command](10)
    with trio.move_on_after(60):
        # Something came a second ago, whenever it is asked.
        await watchdog.run(
            Server(url=URL, pid=7),
            send,
            heard_at=lambda: trio.current_time() - 1,
            transport=FakeServer(0),
        )

    assert [report async for report in receive] == []


async def attached(
    fake: FakeServer, *, ctx: int | None = None, parallel: int | None = None, key: str = ""
) -> tuple[Server, Command]:
    send, receive = trio.open_memory_channel[Command](10)
    async with trio.open_nursery() as nursery:

        async def use(task_status: trio.TaskStatus[Server]) -> None:
            await attach.run(
                URL,
                ctx,
                parallel,
                send,
                env={"KVALET_UPSTREAM_KEY": key},
                transport=fake,
                task_status=task_status,
            )

        server = await nursery.start(use)
        report = await receive.receive()
        nursery.cancel_scope.cancel()
    return server, report


async def test_an_attached_server_of_unknown_pool_is_taken_for_one_slots_share() -> None:
    server, report = await attached(FakeServer())

    assert report == ReadySeen(
        generation=1,
        url=URL,
        build="b11434-abc",
        model="x",
        cells=Cells(4096),
        slots=2,
        headroom=Cells(2),
    )
    assert (server.url, server.pid, server.slot_dir) == (URL, None, None)


async def test_the_pool_and_fewer_slots_can_be_named() -> None:
    _, report = await attached(FakeServer(), ctx=8000, parallel=1)

    assert isinstance(report, ReadySeen)
    assert (report.cells, report.slots, report.headroom) == (8000, 1, 1)


async def test_more_slots_than_there_are_cannot_be_used() -> None:
    _, report = await attached(FakeServer(key="k"), parallel=9, key="k")

    assert isinstance(report, ReadySeen)
    assert report.slots == 2


@pytest.mark.parametrize(
    ("fake", "fault", "text"),
    [
        (FakeServer(0), EnvironmentFault, "no llama-server answers"),
        (FakeServer(503), EnvironmentFault, "503"),
        (FakeServer(key="k"), ConfigFault, "KVALET_UPSTREAM_KEY"),
        (FakeServer(slots=""), EnvironmentFault, "--no-slots"),
        (FakeServer(slots="{}"), EnvironmentFault, "is no llama-server"),
        (FakeServer(slots="[]"), EnvironmentFault, "no usable slots"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused(
    fake: FakeServer, fault: type[Exception], text: str
) -> None:
    send, _ = trio.open_memory_channel[Command](10)

    with pytest.raises(fault, match=text):
        await attach.run(URL, None, None, send, env={}, transport=fake)


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://"])
async def test_an_address_that_is_none_is_wrong_usage(url: str) -> None:
    send, _ = trio.open_memory_channel[Command](10)

    with pytest.raises(ConfigFault, match="--attach"):
        await attach.run(url, None, None, send, env={})
