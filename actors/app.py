"""``serve``: opens every channel and nests the nurseries. The data-flow picture in code.

The ledger and the journal outlive everybody, so that the last word of each guest is heard
and stored. Among the guests the door closes first, then the relays end, then the child.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import cast

import attrs
import trio

from kvalet.actors import attach, launcher, preemption, probe, slots, watchdog
from kvalet.actors.binaries import find_model
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.config import DEFAULT_PARALLEL, Config, unstructure
from kvalet.actors.decisions.exact import VARIABLE, wish_of
from kvalet.actors.decisions.parker import Mode
from kvalet.actors.decisions.plan.devices import budget_of
from kvalet.actors.decisions.refusal import STOPPING
from kvalet.actors.decisions.state import HANDED_OVER
from kvalet.actors.facts_host import read_memory_available
from kvalet.actors.front import Front, FrontConfig, Gate
from kvalet.actors.http import serve_http
from kvalet.actors.http_exchange import HttpLimits
from kvalet.actors.journal import open_journal
from kvalet.actors.ledger import Ledger
from kvalet.actors.server import Server
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol.commands import CloseHouse, OpenHouse, Settings
from kvalet.protocol.errors import ConfigFault
from kvalet.protocol.ids import Nanos
from kvalet.protocol.journal import SCHEMA, Header

# Slots hear every event; a burst this long without reading is a bug.
TAP_MAX = 65_536
MIB = 1024 * 1024
# The server needs a second of silence to notice that a cut stream's client is gone.
LAST_WORDS_S = 3.0


def wall_clock() -> Nanos:
    """Nanoseconds since 1970."""
    return Nanos(time.time_ns())


@attrs.define
class Handle:
    """A running kvalet: where it listens, and how to end it gently."""

    host: str
    port: int
    ledger: Ledger
    draining: trio.Event

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def drain(self) -> None:
        """Take nothing new, let what runs end; ``serve`` returns afterwards."""
        self.draining.set()


async def serve(
    config: Config, *, task_status: trio.TaskStatus[Handle] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run kvalet until cancelled or drained. Start it in a nursery you own:
    ``handle = await nursery.start(serve, config)``; it has started when it takes requests.

    Raises ConfigFault, EnvironmentFault or JournalFault when it cannot start.
    """
    keys = read_keys(config)
    check(config)
    async with open_ledger(config) as ledger:
        draining = trio.Event()
        async with trio.open_nursery() as house:
            house.start_soon(ledger.run)
            await open_house(config, keys, ledger, draining, task_status)
            await wait_quiet(ledger)
            house.cancel_scope.cancel()


async def open_house(
    config: Config,
    keys: tuple[str, ...],
    ledger: Ledger,
    draining: trio.Event,
    task_status: trio.TaskStatus[Handle],
) -> None:
    """Open the door, bring the server up, and close both in the other order.

    The door is open while the model loads: ``/health`` says so, and chats wait in line.
    """
    gate = Gate()
    front = open_front(config, keys, ledger, gate, draining)
    async with AsyncExitStack() as stack, trio.open_nursery() as guests:
        async with trio.open_nursery() as door:
            host, port = await door.start(run_door, config, front, ledger, draining)
            server = await guests.start(start_server, config, ledger)
            upstream = await stack.enter_async_context(UpstreamClient(server))
            gate.upstream = upstream
            guests.start_soon(slots.run, upstream, ledger.tap(TAP_MAX), ledger.tell)
            guests.start_soon(preemption.run, upstream, ledger.tell, partial(is_busy, ledger))
            guests.start_soon(watchdog.run, server, ledger.reports())
            await open_pool(config, ledger, upstream, server)
            task_status.started(Handle(host=host, port=port, ledger=ledger, draining=draining))
        await wait_closed(ledger)
        guests.cancel_scope.cancel()


def is_busy(ledger: Ledger) -> bool:
    """Whether anybody holds or waits for cells."""
    return bool(ledger.house.leases)


def check(config: Config) -> None:
    """Refuse what cannot work. Raises ConfigFault."""
    if config.attach and (config.model or config.demo):
        raise ConfigFault("--attach uses a running server; leave --model and --demo out")
    if not (config.attach or config.model or config.demo):
        raise ConfigFault("name a model with -m MODEL.gguf, or use --demo or --attach URL")
    if config.attach and "@" in config.attach:
        raise ConfigFault("no password in --attach: it would be logged; set KVALET_UPSTREAM_KEY")
    if config.attach and config.exact == "on":
        raise ConfigFault("--attach uses a server as it runs: start it with exact concurrency")
    if config.host not in ("127.0.0.1", "localhost", "::1") and config.api_key_file is None:
        raise ConfigFault(
            f"refusing to listen on {config.host} without a key; give --api-key-file, "
            "or leave --host out to listen on this machine alone"
        )


def shortfalls(config: Config) -> tuple[tuple[str, str], ...]:
    """What was asked for and cannot be had, as (code, message) for the status."""
    found: list[tuple[str, str]] = []
    if config.attach and config.mode == "server":
        told = "whether a server that runs already parks chats cannot be told: kvalet parks them"
        found.append(("mode_unavailable", told))
    return tuple(found)


def read_keys(config: Config) -> tuple[str, ...]:
    """The API keys: one a line, ``#`` starts a comment. Raises ConfigFault."""
    if config.api_key_file is None:
        return ()
    try:
        lines = config.api_key_file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFault(f"cannot read the key file {config.api_key_file}: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigFault(f"{config.api_key_file} holds no key")
    return keys


@asynccontextmanager
async def open_ledger(config: Config) -> AsyncGenerator[Ledger]:
    """The ledger over the configured journal; what a former process left open is closed."""
    header = Header(
        schema=SCHEMA,
        versions={"kvalet": version("kvalet"), "trio": version("trio")},
        config=unstructure(config),
    )
    journal, house, torn = open_journal(config.journal_path, header)
    ledger = Ledger(journal, house, wall_clock)
    try:
        ledger.decide([OpenHouse(settings=settings_of(config), torn_bytes=torn)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run_sync)
            yield ledger
            nursery.cancel_scope.cancel()
    finally:
        ledger.settle()
        journal.close()


def settings_of(config: Config) -> Settings:
    """What the scheduler is told. Saved chats may take a quarter of the free memory."""
    free = read_memory_available()
    budget = config.park_ram_mib * MIB if config.park_ram_mib is not None else None
    if budget is None and free is not None:
        budget = free // 4
    return Settings(
        policy=config.policy,
        block_min=config.block_min,
        first_block=config.first_block,
        quantum=config.quantum,
        resume_max=config.resume_max,
        queue_max=config.queue_max,
        park_ram_bytes=budget,
        preempt=config.preempt,
        first_token_s=config.first_token_s,
        stall_s=config.stall_s,
    )


async def start_server(
    config: Config, ledger: Ledger, *, task_status: trio.TaskStatus[Server]
) -> None:
    """Launch the child, or attach to a running server; returns when it has ended."""
    if config.attach is not None:
        await attach.run(
            config.attach, config.ctx, config.parallel, ledger.reports(), task_status=task_status
        )
        return
    model = await trio.to_thread.run_sync(lambda: find_model(config.model, demo=config.demo))
    launch = LaunchConfig(
        model=Path(model),
        server_bin=config.server_bin,
        ctx=config.ctx,
        parallel=config.parallel or DEFAULT_PARALLEL,
        mode=cast(Mode, config.mode),
        preempt=config.preempt,
        exact=wish_of({VARIABLE: os.environ.get(VARIABLE, "")}, request=config.exact),
        extra_args=config.server_args,
        state_dir=config.state_dir,
        budget=budget_of(config.vram_fraction),
        parking=ledger.house.settings.park_ram_bytes or 0,
    )
    await launcher.run(launch, ledger.reports(), task_status=task_status)


async def open_pool(
    config: Config, ledger: Ledger, upstream: UpstreamClient, server: Server
) -> None:
    """Settle the park method; the pool opens when the ledger has heard of it."""
    wanted = config.park_method if config.preempt else "recompute"
    if ledger.house.server.parks:
        wanted = HANDED_OVER
    ledger.tell(await probe.choose_method(upstream, server.generation, wanted))
    await ledger.wait_for(lambda house: house.ready or house.server.state == "failed")


def open_front(
    config: Config, keys: tuple[str, ...], ledger: Ledger, gate: Gate, draining: trio.Event
) -> Front:
    """The front as configured."""
    return Front(
        FrontConfig(
            version=version("kvalet"),
            mode=config.mode,
            keys=keys,
            debug=config.debug,
            warnings=shortfalls(config),
            keepalive_s=config.keepalive_s,
            first_token_s=config.first_token_s,
            stall_s=config.stall_s,
        ),
        ledger,
        gate,
        draining,
    )


async def run_door(
    config: Config,
    front: Front,
    ledger: Ledger,
    draining: trio.Event,
    *,
    task_status: trio.TaskStatus[tuple[str, int]],
) -> None:
    """Serve HTTP until drained; running answers get ``drain_s`` to end, then one error each."""
    limits = HttpLimits(body_bytes=config.body_max_mib * MIB)
    serving = partial(serve_http, front, limits=limits, draining=draining)
    async with trio.open_nursery() as waiting:
        async with trio.open_nursery() as answers:
            bound = await answers.start(serving, (config.host, config.port))
            task_status.started(bound[0])
            waiting.start_soon(_hurry, config.drain_s, ledger, draining, answers.cancel_scope)
        waiting.cancel_scope.cancel()


async def _hurry(
    drain_s: float, ledger: Ledger, draining: trio.Event, answers: trio.CancelScope
) -> None:
    """Once a drain has lasted long enough, have every answer end with an error, then cut."""
    await draining.wait()
    await trio.sleep(drain_s)
    ledger.tell(CloseHouse(reason=STOPPING))
    await trio.sleep(LAST_WORDS_S)
    answers.cancel()


async def wait_closed(ledger: Ledger) -> None:
    """Give the slots of the last leases a moment to be seen idle."""
    with trio.move_on_after(LAST_WORDS_S):
        await ledger.wait_for(lambda house: not house.leases)


async def wait_quiet(ledger: Ledger) -> None:
    """Let the ledger decide what is still in its inbox."""
    with trio.move_on_after(LAST_WORDS_S):
        await ledger.wait_idle()
