"""Runs the llama-server child and reports what it sees."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import httpx
import trio
from attrs import evolve, field, frozen

from kvalet.actors.binaries import ServerBinary, find_model, find_server, probe_capabilities
from kvalet.actors.blueprint import Blueprint, LaunchConfig, draw
from kvalet.actors.child import Child, slot_directory, spawn_child
from kvalet.actors.decisions.capabilities import Capabilities
from kvalet.actors.decisions.exact import refusal_in
from kvalet.actors.decisions.launch import Exit, classify_exit, redacted
from kvalet.actors.decisions.plan.concede import Concession
from kvalet.actors.decisions.plan.judge import agrees, compare, read_log
from kvalet.actors.decisions.plan.plan import Plan
from kvalet.actors.decisions.plan.speculation import effective_spec_types
from kvalet.actors.facts_host import read_memory_available
from kvalet.actors.probe import decodes
from kvalet.actors.server import Server, open_client, read_props
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
from kvalet.protocol.ids import Cells
from kvalet.protocol.llama import Props

T = TypeVar("T")

LOG_NAME: Final = "llama-server.log"
PORT_TRIES: Final = 3
_POLL_FIRST_S: Final = 0.05
_POLL_MAX_S: Final = 0.25
_POLL_TIMEOUT_S: Final = 1.0


@frozen(kw_only=True)
class _Launch:
    """One launch: the same for all its starts."""

    config: LaunchConfig
    binary: ServerBinary
    capabilities: Capabilities
    generation: int
    env: Mapping[str, str]
    api_key: str = field(repr=False)
    directory: Path
    given: tuple[Concession, ...] = ()

    @property
    def slots(self) -> Path:
        return self.directory / "slots"

    @property
    def log_path(self) -> Path:
        return self.config.state_dir / LOG_NAME

    def draw(self, given: tuple[Concession, ...]) -> Blueprint:
        return draw(self.config, self.binary, self.capabilities, self.env, self.slots, given)

    def child_env(self, blueprint: Blueprint) -> dict[str, str]:
        return blueprint.child_env(
            self.env,
            api_key=self.api_key,
            config_home=str(self.directory / "config"),
            library_path=self.binary.library_path,
        )

    def server(self, url: str, pid: int, argv: tuple[str, ...]) -> Server:
        return Server(
            url=url,
            api_key=self.api_key,
            slot_dir=self.slots if str(self.slots) in argv else None,
            capabilities=self.capabilities,
            generation=self.generation,
            pid=pid,
        )

    def fault(self, end: _End) -> KvaletError:
        if end.fault is not None:
            return end.fault
        if end.refusal and self.config.exact == "on":
            return ConfigFault(f"llama-server refuses exact concurrency: {end.refusal}")
        if end.slow:
            return EnvironmentFault(
                f"llama-server was not ready within {self.config.ready_timeout_s:g} s: "
                f"see {self.log_path}"
            )
        text = f"llama-server did not start: {end.exit}"
        if end.exit.kind == "flag":
            return ConfigFault(text)
        return EnvironmentFault(f"{text} (its log: {self.log_path})")


@frozen(kw_only=True)
class _End:
    """How one attempt went: ``ready`` is true when the server had come up."""

    ready: bool
    slow: bool
    code: int
    exit: Exit
    refusal: str = ""
    fault: KvaletError | None = None


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def run(
    config: LaunchConfig,
    reports: trio.MemorySendChannel[Command],
    *,
    env: Mapping[str, str] | None = None,
    generation: int = 1,
    given: tuple[Concession, ...] = (),
    directory: Path | None = None,
    pick_port: Callable[[], int] = free_port,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Launch one llama-server, start with its :class:`Server`, return when it has ended.

    ``given`` is what this load has given up already. It saves slots in ``directory``, which
    stays; without one in a directory of its own.
    Reports LaunchPlanned and SpawnSeen per attempt, ReadySeen, and one ExitSeen; closes
    ``reports``. Cancelled, it stops the child first; nothing of it is left behind. Raises
    EnvironmentFault or ConfigFault when the server does not come up.
    """
    env = dict(os.environ) if env is None else env
    async with reports:
        model = await trio.to_thread.run_sync(lambda: find_model(config.model))
        binary = await trio.to_thread.run_sync(find_server, config.server_bin, env)
        capabilities = await trio.to_thread.run_sync(probe_capabilities, binary, env)
        with nullcontext(directory) if directory else slot_directory() as directory:
            launch = _Launch(
                config=evolve(config, model=model),
                binary=binary,
                capabilities=capabilities,
                generation=generation,
                env=env,
                api_key=secrets.token_urlsafe(32),
                directory=directory,
                given=given,
            )
            for folder in (launch.slots, directory / "config"):
                folder.mkdir(mode=0o700, exist_ok=True)
            await _launch(launch, reports, pick_port, task_status)


async def _launch(
    launch: _Launch,
    reports: trio.MemorySendChannel[Command],
    pick_port: Callable[[], int],
    task_status: trio.TaskStatus[Server],
) -> None:
    """Start it as planned; while it does not come up and something is left to give up, again."""
    given: tuple[Concession, ...] | None = launch.given
    end: _End | None = None
    while given is not None:
        blueprint = await trio.to_thread.run_sync(launch.draw, given)
        refused = end.refusal if end is not None else ""
        end = await _start(launch, blueprint, refused, reports, pick_port, task_status)
        over = end.ready or end.slow or end.fault is not None
        given = None if over else blueprint.after(end.exit.kind, end.refusal)
        end = evolve(end, refusal=end.refusal or refused)
    assert end is not None
    await reports.send(
        ExitSeen(
            generation=launch.generation,
            code=end.code,
            planned=False,
            reason="not ready in time" if end.slow else end.exit.reason,
            cause=end.exit.kind,
        )
    )
    if not end.ready:
        raise launch.fault(end)


async def _start(
    launch: _Launch,
    blueprint: Blueprint,
    refused: str,
    reports: trio.MemorySendChannel[Command],
    pick_port: Callable[[], int],
    task_status: trio.TaskStatus[Server],
) -> _End:
    """One start, at another port while the port is the trouble."""
    ends: list[_End] = []
    while len(ends) < PORT_TRIES:
        end = await _attempt(launch, blueprint, refused, pick_port(), reports, task_status)
        ends.append(end)
        over = end.ready or end.slow or end.fault is not None or bool(end.refusal)
        if over or end.exit.kind not in ("port", "silent"):
            break
    if ends[-1].refusal:
        return ends[-1]
    # A silent end after one that gave its reason explains nothing.
    return next((end for end in reversed(ends) if end.exit.kind != "silent"), ends[-1])


async def _attempt(
    launch: _Launch,
    blueprint: Blueprint,
    refused: str,
    port: int,
    reports: trio.MemorySendChannel[Command],
    task_status: trio.TaskStatus[Server],
) -> _End:
    """One child from its spawn to its end."""
    line, plan = blueprint.argv(port), blueprint.plan
    warnings = list(line.warnings)
    if launch.binary.warning:
        warnings.append(("cpu-kernels", launch.binary.warning))
    await reports.send(
        LaunchPlanned(
            generation=launch.generation,
            argv=redacted(line.argv),
            warnings=tuple(warnings),
            native_ctx=Cells(plan.native_ctx if plan else 0),
            max_ctx=Cells(plan.max_ctx if plan else 0),
        )
    )
    child = spawn_child(line.argv, launch.child_env(blueprint), launch.log_path)
    ready = ended = undecided = False
    failure: str | None = ""
    fault: KvaletError | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.attend, launch.config.stop_grace_s)
            url = f"http://127.0.0.1:{port}"
            await reports.send(SpawnSeen(generation=launch.generation, pid=child.pid, url=url))
            with trio.move_on_after(launch.config.ready_timeout_s) as patience:
                props = await _wait_ready(child, url, launch.api_key)
                if props is not None and blueprint.drafts:
                    failure = await _until_end(child, partial(decodes, url, launch.api_key))
                    undecided = failure != ""
                if props is not None and not undecided:
                    await reports.send(_ready_seen(launch, blueprint, props, url, child.pid))
                    if plan is not None:
                        await _weigh(launch, plan, child, reports)
                    fault = await _arm(launch, blueprint, props, refused, reports)
                    ready = fault is None
            if ready:
                task_status.started(launch.server(url, child.pid, line.argv))
            elif fault is not None or failure or patience.cancelled_caught:
                nursery.cancel_scope.cancel()
        ended = True
    finally:
        if not ended:
            _report_stop(launch, child, reports)
    code = await child.wait()
    seen = classify_exit(code, tuple(child.lines))
    if undecided:
        # It came up, so what it said at its end matters less than that it cannot decode.
        seen = Exit(kind="decode", reason=failure or seen.reason)
    return _End(
        ready=ready,
        slow=patience.cancelled_caught,
        code=code,
        exit=seen,
        refusal="" if ready else refusal_in(tuple(child.lines)),
        fault=fault,
    )


async def _arm(
    launch: _Launch,
    blueprint: Blueprint,
    props: Props,
    refused: str,
    reports: trio.MemorySendChannel[Command],
) -> KvaletError | None:
    """Tell who parks and whether exact concurrency is certified; a fault where it must be."""
    verdict = blueprint.judge(props.exact, refused, read_memory_available())
    mode = "server" if blueprint.parks else "proxy" if launch.config.preempt else "off"
    await reports.send(
        ExactSeen(
            generation=launch.generation, mode=mode, state=verdict.state, reason=verdict.reason
        )
    )
    if launch.config.exact != "on" or verdict.state == "on":
        return None
    return ConfigFault(f"exact concurrency cannot be had: {verdict.reason}")


async def _weigh(
    launch: _Launch, plan: Plan, child: Child, reports: trio.MemorySendChannel[Command]
) -> None:
    """Compare what the child says that it allocated with what was planned."""
    reported = read_log(child.lines)
    if not reported.seen:
        return
    figures = compare(plan, reported)
    exact = all(map(agrees, figures))
    await reports.send(MemorySeen(generation=launch.generation, figures=figures, exact=exact))


def _report_stop(launch: _Launch, child: Child, reports: trio.MemorySendChannel[Command]) -> None:
    """We were told to stop: whoever still listens hears it, nobody is waited for."""
    with suppress(trio.WouldBlock, trio.BrokenResourceError):
        reports.send_nowait(
            ExitSeen(
                generation=launch.generation,
                code=child.returncode or 0,
                planned=True,
                reason="stopped",
            )
        )


async def _wait_ready(child: Child, url: str, api_key: str) -> Props | None:
    """Poll ``/health`` until the server is up; None when the child ends before."""
    async with open_client(url, api_key, timeout_s=_POLL_TIMEOUT_S) as client:
        return await _until_end(child, partial(_poll, client))


async def _until_end(child: Child, ask: Callable[[], Awaitable[T]]) -> T | None:
    """What ``ask`` finds, or None when the child ends before: a stranger on our port may hold
    its answer back."""
    found: T | None = None
    async with trio.open_nursery() as asking:
        asking.start_soon(_cancel_at_end, child, asking.cancel_scope)
        found = await ask()
        asking.cancel_scope.cancel()
    return found


async def _cancel_at_end(child: Child, scope: trio.CancelScope) -> None:
    await child.wait()
    scope.cancel()


async def _poll(client: httpx.AsyncClient) -> Props:
    pause_s = _POLL_FIRST_S
    while True:
        with suppress(httpx.TransportError):
            healthy = (await client.get("/health")).status_code == 200
            # Whoever answers without our key is a stranger on our port, not the child.
            if healthy and await _wants_key(client):
                return read_props((await client.get("/props")).content)
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_MAX_S)


async def _wants_key(client: httpx.AsyncClient) -> bool:
    return (await client.get("/props", headers={"Authorization": ""})).status_code == 401


def _ready_seen(
    launch: _Launch, blueprint: Blueprint, props: Props, url: str, pid: int
) -> ReadySeen:
    parks = blueprint.parks
    return ReadySeen(
        generation=launch.generation,
        url=url,
        build=launch.capabilities.build or props.build,
        model=props.model or launch.config.model.stem,
        cells=blueprint.cells,
        slots=launch.config.parallel,
        # A step of all slots takes one cell each. A server that parks keeps its own margin.
        headroom=Cells(0 if parks else launch.config.parallel),
        pid=pid,
        parks=parks,
        notices=props.exact is not None,
        given=blueprint.given,
        drafting=blueprint.drafting,
        drafting_asked=effective_spec_types(launch.config.extra_args, launch.env),
        split=blueprint.split,
    )
