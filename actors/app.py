"""``serve``: opens every channel and nests the nurseries. The data-flow picture in code.

The ledger and the journal outlive everybody, so that the last word of each guest is heard
and stored. Among the guests the door closes first, then the relays end, then the child.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

import attrs
import trio

from kvalet.actors import keeper
from kvalet.actors.config import Config, unstructure
from kvalet.actors.control import Control
from kvalet.actors.decisions.refusal import STOPPING
from kvalet.actors.facts_host import read_memory_available
from kvalet.actors.front import Front, FrontConfig
from kvalet.actors.gate import Gate
from kvalet.actors.http import serve_http
from kvalet.actors.http_exchange import HttpLimits
from kvalet.actors.journal import open_journal
from kvalet.actors.ledger import Ledger
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
    async with trio.open_nursery() as guests:
        async with trio.open_nursery() as door:
            host, port = await door.start(run_door, config, front, ledger, draining)
            await guests.start(keeper.run, config, ledger, gate)
            task_status.started(Handle(host=host, port=port, ledger=ledger, draining=draining))
        await wait_closed(ledger)
        guests.cancel_scope.cancel()


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
        # A server that is not ours is not ours to start.
        restarts_max=0 if config.attach else config.restarts_max,
        restart_window_s=config.restart_window_s,
        restart_wait_s=config.restart_wait_s,
    )


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
        Control(config, ledger, gate, keyed=bool(keys)),
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
