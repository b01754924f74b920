"""The plan beside what a real llama-server says that it allocated."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
import trio

from kvalet.actors.binaries import ServerBinary, find_model, find_server, probe_capabilities
from kvalet.actors.child import spawn_child
from kvalet.actors.decisions.launch import child_environment
from kvalet.actors.decisions.plan.judge import agrees, compare, read_log
from kvalet.actors.launcher import free_port
from kvalet.actors.planner import Machine, plan_launch
from kvalet.protocol import events as e
from tests.real.clients import events_in, get, kvalet

pytestmark = pytest.mark.real

FLAG_SETS = (
    "-c 512 -np 1",
    "-c 2048 -np 4 -kvu",
    "-c 2048 -np 4 -kvu --swa-full",
    "-c 8192 -np 1",
    "-c 8192 -np 1 --swa-full",
    "-c 8192 -np 4",
    "-c 8192 -np 4 -kvu",
    "-c 8192 -np 4 --swa-full",
    "-c 4096 -np 8",
    "-c 8192 -np 8 -kvu",
    "-c 5000 -np 3",
    "-c 5000 -np 3 -kvu",
    "-c 300 -np 8",
    "-c 8192 -np 1 -ub 1024",
    "-c 8192 -np 2 -ub 256",
    "-c 8192 -np 2 -kvu -b 4096 -ub 2048",
    "-c 4096 -np 2 -kvu -ctk q8_0 -ctv q8_0 -fa on",
    "-c 4096 -np 2 -ctk q4_0",
    "-c 4096 -np 2 -fa off",
    "-c 4096 -np 1 -ctk f32 -ctv f32",
    "-c 4096",
)


@pytest.fixture(scope="module")
def model() -> Path:
    return find_model(None, demo=True)


@pytest.fixture(scope="module")
def binary() -> ServerBinary:
    return find_server(None, os.environ)


async def wait_ready(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await trio.sleep(0.05)


async def start_and_read(binary: ServerBinary, argv: list[str], env: dict[str, str]) -> list[str]:
    """The lines that a server has logged when it has come up; it is gone again afterwards."""
    port = free_port()
    child = spawn_child([str(binary.path), *argv, "--port", str(port)], env, Path(os.devnull))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.attend, 1.0)
        with trio.fail_after(60):
            await wait_ready(port)
        lines = list(child.lines)
        nursery.cancel_scope.cancel()
    return lines


@pytest.mark.parametrize("flags", FLAG_SETS)
async def test_what_is_planned_is_what_the_server_allocates(
    flags: str, model: Path, binary: ServerBinary, tmp_path: Path
) -> None:
    env = child_environment(
        os.environ, api_key="", config_home=str(tmp_path), library_path=binary.library_path
    )
    build = probe_capabilities(binary, env).build
    plan = plan_launch(model, flags.split(), env, Machine(), build=build)
    argv = ["-m", str(model), *flags.split(), "-lv", "4", "--no-warmup", "--cache-ram", "0"]

    reported = read_log(await start_and_read(binary, argv, env))

    assert reported.seen
    figures = {one.name: one for one in compare(plan, reported)}
    for name, figure in figures.items():
        if not name.startswith("compute"):
            assert agrees(figure), figure
    compute = figures["compute CPU"]
    assert -0.02 * compute.planned <= -compute.excess <= 0.25 * compute.planned, compute


async def test_a_launch_is_weighed_and_its_status_says_so(tmp_path: Path) -> None:
    async with kvalet(tmp_path, ctx=1024, parallel=2) as front:
        document = (await get(f"{front.url}/kvalet/status")).json()

    weighed = [event for event in events_in(tmp_path) if isinstance(event, e.ServerWeighed)]
    assert len(weighed) == 1
    named = {figure.name: figure for figure in weighed[0].figures}
    assert named["context swa"].planned == named["context swa"].reported > 0
    assert document["server"]["memory"] == [
        {"name": one.name, "planned": one.planned, "reported": one.reported}
        for one in weighed[0].figures
    ]
