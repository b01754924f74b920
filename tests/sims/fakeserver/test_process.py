"""The simulated server as a process: how it starts, refuses to, dies and is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvalet.sims.fakeserver.build import BUILDS

PROGRAM = (sys.executable, "-m", "kvalet.sims.fakeserver")
POOL = ("-np", "2", "-kvu", "-c", "2048", "--port", "0")


def environment(**env: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA", "KVALET"))}
    return {**plain, **env}


def told(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*PROGRAM, *argv), env=environment(**env), capture_output=True, text=True, timeout=60
    )


class Running:
    """A server that has said where it listens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.log.append(line)
            if "listening on" in line:
                break
        self.url = self.log[-1].split("listening on ")[1].strip()

    def rest(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def running(*argv: str, **env: str) -> Generator[Running]:
    process = subprocess.Popen(
        (*PROGRAM, *POOL, *argv), env=environment(**env), stderr=subprocess.PIPE, text=True
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def client(it: Running, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=it.url, trust_env=False, timeout=20, headers=headers)


def listens(guest: httpx.Client) -> bool:
    try:
        return guest.get("/health", headers={"connection": "close"}).status_code == 200
    except httpx.HTTPError:
        return False


def test_help_and_version_are_printed_and_that_is_all() -> None:
    assert told("--help", KVALET_SIM_BUILD="G1").stdout == BUILDS["G1"].help_text
    said = told("--version")
    assert (said.returncode, said.stdout.splitlines()[0]) == (0, "version: 11434 (sim-g4)")


def test_an_unknown_argument_ends_the_start_in_the_servers_words() -> None:
    said = told("--preempt-ram", "64", KVALET_SIM_BUILD="G0")
    assert (said.returncode, said.stderr) == (1, "error: invalid argument: --preempt-ram\n")


def test_a_directory_for_slots_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    said = told("--slot-save-path", str(tmp_path / "none"))
    assert said.returncode == 1
    assert "--slot-save-path" in said.stderr


def test_a_port_that_is_taken_ends_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = told("--port", port)
    assert said.returncode == 1
    assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}" in said.stderr
    assert "exiting due to HTTP server error" in said.stderr


@pytest.mark.parametrize(("code", "left"), [(3, 3), (-9, -9)])
def test_a_fault_ends_the_start_with_its_code(code: int, left: int) -> None:
    said = told(KVALET_SIM_FAULTS=f'[{{"kind":"exit","code":{code},"line":"out of memory"}}]')
    assert (said.returncode, said.stderr) == (left, "out of memory\n")


def test_a_server_says_what_it_loads_answers_and_ends_well_on_a_signal(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\nfrom-file\n")
    argv = ("--preempt-ram", "64", "--api-key-file", str(keys))
    with running(*argv, LLAMA_API_KEY="secret") as it:
        log = "".join(it.log)
        assert (
            "load_model: initializing, n_slots = 2, n_ctx_slot = 2048, kv_unified = 'true'" in log
        )
        assert "parking and resuming asynchronously" in log
        with client(it) as stranger:
            assert stranger.get("/health").json() == {"status": "ok"}
            assert stranger.get("/metrics").status_code == 401
        for key in ("secret", "from-file"):
            with client(it, authorization=f"Bearer {key}") as friend:
                assert friend.get("/props").json()["exact_concurrency"] is False
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(10) == 0


def test_a_signal_in_the_middle_of_a_stream_cuts_it_when_its_ping_is_due() -> None:
    with running(KVALET_SIM_TOKENS_PER_S="20") as it, client(it) as guest:
        body = {"prompt": "hi", "n_predict": 2000, "stream": True, "sse_ping_interval": 1}
        with guest.stream("POST", "/completion", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            it.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert it.process.wait(10) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with running(KVALET_SIM_TOKENS_PER_S="20") as it, client(it) as guest:
        body = {"prompt": "hi", "n_predict": 2000, "stream": True}
        with guest.stream("POST", "/completion", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            it.process.send_signal(signal.SIGTERM)
            with client(it) as other:
                while listens(other):
                    pass
            it.process.send_signal(signal.SIGTERM)
            assert it.process.wait(10) == 1
        assert "Received second interrupt" in it.rest()


def test_a_crash_takes_the_process_with_it() -> None:
    faults = '[{"kind":"crash","at_token":5}]'
    with running(KVALET_SIM_FAULTS=faults) as it, client(it) as guest:
        body = {"prompt": "hi", "n_predict": 50, "stream": True}
        with guest.stream("POST", "/completion", json=body) as answer:
            lines = answer.iter_lines()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert it.process.wait(10) == -signal.SIGABRT
