"""A real llama-server with a real small model: it comes up, fails clearly, and goes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trio
from attrs import evolve

from kvalet.actors import launcher
from kvalet.actors.binaries import find_model
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.child import memory_root, slot_directory
from kvalet.actors.server import Server, open_client
from kvalet.protocol.commands import (
    Command,
    ExactSeen,
    ExitSeen,
    LaunchPlanned,
    MemorySeen,
    ReadySeen,
    SpawnSeen,
)
from kvalet.protocol.errors import ConfigFault, EnvironmentFault, KvaletError
from tests.processes import is_there, wait_gone

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model() -> Path:
    return find_model(None, demo=True)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> LaunchConfig:
    return LaunchConfig(
        model=model, ctx=500, parallel=2, state_dir=tmp_path / "state", ready_timeout_s=120
    )


def slot_directories() -> set[Path]:
    return set(memory_root().glob(f"kvalet-{os.getuid()}-{os.getpid()}-*"))


async def test_a_launch_comes_up_answers_to_its_key_only_and_leaves_nothing(
    config: LaunchConfig,
) -> None:
    send, receive = trio.open_memory_channel[Command](10)
    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(launcher.run, config, send)
        planned, spawned, ready, weighed, armed = [await receive.receive() for _ in range(5)]

        assert isinstance(planned, LaunchPlanned)
        assert planned.native_ctx >= planned.max_ctx > 0
        assert isinstance(spawned, SpawnSeen)
        assert isinstance(ready, ReadySeen)
        assert isinstance(armed, ExactSeen)
        assert (armed.mode, armed.state) == ("proxy", "off")
        assert isinstance(weighed, MemorySeen)
        assert {figure.name for figure in weighed.figures} >= {"context non_swa", "context swa"}
        assert (ready.cells, ready.slots, ready.headroom) == (512, 2, 2)
        assert ready.pid == spawned.pid == server.pid
        assert ready.url == server.url
        assert ready.build.startswith("b")
        assert ready.model
        assert server.capabilities.slot_save_path
        await check_key_and_slots(server, planned)
        directories = slot_directories()
        assert len(directories) == 1
        nursery.cancel_scope.cancel()

    (ended,) = [report async for report in receive]
    assert isinstance(ended, ExitSeen)
    assert (ended.code, ended.planned, ended.generation) == (0, True, 1)
    assert not is_there(spawned.pid)
    assert not slot_directories() & directories
    assert (config.state_dir / launcher.LOG_NAME).stat().st_size > 0


async def check_key_and_slots(server: Server, planned: LaunchPlanned) -> None:
    assert server.api_key not in " ".join(planned.argv)
    assert server.api_key not in repr(server)
    async with open_client(server.url, "wrong", timeout_s=10) as stranger:
        assert (await stranger.get("/slots")).status_code == 401
    async with open_client(server.url, server.api_key, timeout_s=60) as client:
        assert [slot["n_ctx"] for slot in (await client.get("/slots")).json()] == [512, 512]
        body = {"prompt": "Once upon a time", "n_predict": 4, "id_slot": 0}
        assert (await client.post("/completion", json=body)).status_code == 200
        saved = await client.post("/slots/0?action=save", json={"filename": "r1"})
        assert saved.status_code == 200
    assert server.slot_dir is not None
    assert [file.name for file in server.slot_dir.iterdir()] == ["r1"]


async def test_a_server_that_dies_is_reported_with_its_status(config: LaunchConfig) -> None:
    send, receive = trio.open_memory_channel[Command](10)
    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(launcher.run, config, send)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)

    reports = [report async for report in receive]
    assert reports[-1] == ExitSeen(
        generation=1, code=-9, planned=False, reason="killed by SIGKILL", cause="killed"
    )


async def test_a_launch_that_is_cancelled_while_loading_leaves_nothing(
    config: LaunchConfig,
) -> None:
    send, receive = trio.open_memory_channel[Command](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(launcher.run, config, send)
        await receive.receive()
        spawned = await receive.receive()
        assert isinstance(spawned, SpawnSeen)
        nursery.cancel_scope.cancel()

    assert not is_there(spawned.pid)
    assert not slot_directories()


async def failure_of(
    config: LaunchConfig, pick_port: Callable[[], int] = launcher.free_port
) -> tuple[KvaletError, list[Command]]:
    send, receive = trio.open_memory_channel[Command](20)
    with pytest.raises(KvaletError) as caught:
        await launcher.run(config, send, pick_port=pick_port)
    return caught.value, [report async for report in receive]


async def test_a_missing_model_is_named(config: LaunchConfig, tmp_path: Path) -> None:
    fault, reports = await failure_of(evolve(config, model=tmp_path / "missing.gguf"))

    assert isinstance(fault, EnvironmentFault)
    assert "missing.gguf" in str(fault)
    assert reports == []


@pytest.mark.parametrize("kept_bytes", [100, 4_000_000], ids=["in its header", "in its tensors"])
async def test_a_model_that_is_cut_off_is_told_from_the_servers_own_words(
    config: LaunchConfig, model: Path, tmp_path: Path, kept_bytes: int
) -> None:
    broken = tmp_path / "broken.gguf"
    copy_head(model, broken, kept_bytes)
    fault, reports = await failure_of(evolve(config, model=broken))

    assert isinstance(fault, EnvironmentFault)
    assert "failed to load model from" in str(fault) or "corrupted" in str(fault)
    assert isinstance(reports[-1], ExitSeen)
    assert not reports[-1].planned
    assert not slot_directories()


def copy_head(source: Path, target: Path, kept_bytes: int) -> None:
    with source.open("rb") as whole:
        target.write_bytes(whole.read(kept_bytes))


async def test_a_flag_that_the_server_does_not_know_is_wrong_usage(config: LaunchConfig) -> None:
    fault, _ = await failure_of(evolve(config, extra_args=("--no-such-flag",)))

    assert isinstance(fault, ConfigFault)
    assert "--no-such-flag" in str(fault)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


async def test_a_port_that_was_snatched_away_is_replaced(
    config: LaunchConfig, taken_port: int
) -> None:
    ports = iter([taken_port, launcher.free_port()])
    send, receive = trio.open_memory_channel[Command](20)
    async with trio.open_nursery() as nursery:

        async def launch(task_status: trio.TaskStatus[Server]) -> None:
            await launcher.run(config, send, pick_port=lambda: next(ports), task_status=task_status)

        server = await nursery.start(launch)
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{server.url}/health")).status_code == 200
        nursery.cancel_scope.cancel()

    kinds = [type(report) for report in [report async for report in receive]]
    assert kinds == [*[LaunchPlanned, SpawnSeen] * 2, ReadySeen, MemorySeen, ExactSeen, ExitSeen]


async def test_a_port_that_stays_taken_is_given_up(config: LaunchConfig, taken_port: int) -> None:
    fault, reports = await failure_of(config, lambda: taken_port)

    assert isinstance(fault, EnvironmentFault)
    assert str(taken_port) in str(fault)
    assert [type(report) for report in reports].count(LaunchPlanned) == launcher.PORT_TRIES


PARENT = """
import sys, trio
from pathlib import Path
from kvalet.actors import launcher
from kvalet.actors.blueprint import LaunchConfig

async def main():
    config = LaunchConfig(
        model=Path(sys.argv[1]), ctx=512, parallel=2, state_dir=Path(sys.argv[2])
    )
    send, _receive = trio.open_memory_channel(10)
    async with trio.open_nursery() as nursery:
        server = await nursery.start(launcher.run, config, send)
        sys.stdout.write(f"{server.pid}\\n")
        sys.stdout.flush()

trio.run(main)
"""


def test_the_server_dies_with_a_parent_that_is_killed(model: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(model), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        left = set(memory_root().glob(f"kvalet-{os.getuid()}-{parent.pid}-*"))
        assert is_there(pid)
        parent.kill()

    trio.run(wait_gone, pid)
    assert len(left) == 1
    # The next launch sweeps what the killed one could not remove.
    with slot_directory():
        assert not any(path.exists() for path in left)
