"""Deaths: kvalet killed under load and started again, told to stop, and its child killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trio

from kvalet.actors.child import memory_root
from kvalet.actors.decisions.replay import audit, replay
from kvalet.actors.journal import read_journal
from kvalet.protocol import events as e
from tests.processes import wait_gone
from tests.real.clients import (
    ONE_THREAD,
    PROMPTS,
    Bell,
    Heard,
    ask,
    chat_body,
    events_in,
    forced,
    get,
    kvalet,
    listen,
)

pytestmark = pytest.mark.real

CHAT_PATH = "/v1/chat/completions"


@dataclass
class Serving:
    """A kvalet in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def slot_directories(self) -> list[Path]:
        """The private directories of this process."""
        return list(memory_root().glob(f"kvalet-{os.getuid()}-{self.process.pid}-*"))


@contextmanager
def serving(state_dir: Path) -> Generator[Serving]:
    """``kvalet serve`` with the demo model, until the block ends."""
    argv = [sys.executable, "-m", "kvalet", "serve", "--demo", "--port", "0"]
    argv += ["--ctx", "512", "--parallel", "4", "--state-dir", str(state_dir), "--", *ONE_THREAD]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVALET_")}
    with subprocess.Popen(
        argv,
        env={**env, "KVALET_DEBUG": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = re.search(r"ready at (\S+)", process.stdout.readline())
            assert ready is not None
            yield Serving(process, ready[1])
        finally:
            process.kill()


async def child_pid(url: str) -> int:
    """The pid of the llama-server behind ``url``."""
    status = (await get(url + "/kvalet/status")).json()
    return int(status["server"]["pid"])


async def cut_off(url: str, prompt: str, heard: Heard, every: int) -> None:
    """A chat whose server is going to die."""
    with pytest.raises(httpx.TransportError):
        await listen(url, chat_body(prompt, 400), headers=forced(every), heard=heard)


async def wait_talking(heard: list[Heard], pieces: int) -> None:
    """Until that much has been said in all; the clients share a bell."""
    with trio.fail_after(60):
        await heard[0].bell.wait_for(lambda: sum(len(one.pieces) for one in heard) >= pieces)


async def test_a_killed_kvalet_takes_its_child_along_and_goes_on_from_its_journal(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as first:
        pid = await child_pid(first.url)
        bell = Bell()
        everybody = [Heard(bell=bell) for _ in range(8)]
        async with trio.open_nursery() as nursery:
            for number, heard in enumerate(everybody):
                prompt = f"{number}: {PROMPTS[number % len(PROMPTS)]}"
                nursery.start_soon(cut_off, first.url, prompt, heard, 15)
            await wait_talking(everybody, 120)
            first.process.kill()
            with trio.fail_after(5):
                await wait_gone(pid)
    opened = replay(read_journal(tmp_path / "journal.jsonl")).leases
    assert opened

    with serving(tmp_path) as second:
        assert not first.slot_directories()
        status = (await get(second.url + "/kvalet/status")).json()
        assert (status["leases"], status["queue"]) == ([], [])
        assert (status["pool"]["granted"], status["pool"]["saved_bytes"]) == (0, 0)
        assert status["totals"]["requests"] == 8
        pid = await child_pid(second.url)
        last = Heard()
        async with trio.open_nursery() as nursery:
            body = chat_body(PROMPTS[0], 40)
            nursery.start_soon(lambda: listen(second.url, body, heard=last))
            await wait_talking([last], 3)
            second.process.send_signal(signal.SIGTERM)
        assert (last.finish, last.usage["completion_tokens"], last.done) == ("length", 40, True)
        assert await trio.to_thread.run_sync(second.process.wait, 20) == 0
        await wait_gone(pid)
        assert not second.slot_directories()

    events = events_in(tmp_path)
    arrived = [event.request for event in events if isinstance(event, e.RequestArrived)]
    assert arrived == [f"r{number}" for number in range(1, 10)]
    lost = [
        event.request
        for event in events
        if isinstance(event, e.LeaseEnded) and event.reason == "lost"
    ]
    assert lost == [request for request, lease in opened.items() if not lease.end_reason]
    assert replay(read_journal(tmp_path / "journal.jsonl")).totals.finished == 1
    assert audit(read_journal(tmp_path / "journal.jsonl")).identical


async def test_a_killed_child_ends_every_chat_with_one_error_where_none_is_started_again(
    tmp_path: Path,
) -> None:
    async with kvalet(tmp_path, restarts_max=0) as front:
        bell = Bell()
        everybody = [Heard(bell=bell) for _ in range(7)]
        whole: list[httpx.Response] = []

        async def ask_whole() -> None:
            whole.append(await ask(front.url, chat_body("A poem, please.", 400)))

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_whole)
                for number, heard in enumerate(everybody):
                    body = chat_body(f"{number}: {PROMPTS[number % len(PROMPTS)]}", 400)
                    every = forced(20 if number % 2 else 0)
                    nursery.start_soon(listen, front.url, body, CHAT_PATH, every, heard)
                await wait_talking(everybody, 120)
                os.kill(await child_pid(front.url), signal.SIGKILL)
        for heard in everybody:
            errors = [chunk for chunk in heard.data if "error" in chunk]
            assert (len(errors), heard.done, heard.finish) == (1, False, None), heard.comments
            assert set(errors[0]["error"]) >= {"message", "type", "code"}
            assert heard.data[-1] == errors[0]
        assert whole[0].status_code in (502, 503)
        assert "llama-server" in whole[0].json()["error"]["message"]
        status = (await get(front.url + "/kvalet/status")).json()
        assert status["server"]["state"] == "failed"
        assert status["pool"]["granted"] == 0
        for answer in (
            await get(front.url + "/health"),
            await get(front.url + "/props"),
            await ask(front.url, chat_body("Anybody there?", 5)),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "unavailable_error"
