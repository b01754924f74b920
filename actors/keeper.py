"""Keeps a server running: the one that the ledger wants, until it wants another.

Level-triggered: whatever happened in the meantime, what the ledger says at this moment counts.
One task starts and ends every server, so no two are ever there at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast, final

import structlog
import trio

from kvalet.actors import attach, launcher, preemption, probe, slots, watchdog
from kvalet.actors.binaries import find_model
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.child import slot_directory
from kvalet.actors.config import DEFAULT_PARALLEL, Config
from kvalet.actors.decisions.exact import SETTING, VARIABLE, Level, Wish, decide_wish
from kvalet.actors.decisions.parker import Mode
from kvalet.actors.decisions.plan.concede import Concession
from kvalet.actors.decisions.plan.devices import budget_of
from kvalet.actors.decisions.recovery import NANOS
from kvalet.actors.decisions.state import DOWN, HANDED_OVER, House
from kvalet.actors.gate import Gate
from kvalet.actors.ledger import Ledger
from kvalet.actors.server import Server
from kvalet.actors.stored import read_stored
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol.commands import ExitSeen, Load
from kvalet.protocol.errors import KvaletError

# Slots hear every event; a burst this long without reading is a bug.
TAP_MAX = 65_536


async def run(
    config: Config,
    ledger: Ledger,
    gate: Gate,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one server after another until cancelled; started when the first takes work.

    Raises EnvironmentFault or ConfigFault when the very first does not come up.
    """
    with _directory(config) as directory:
        keeper = Keeper(config, ledger, gate, directory)
        generation = 1
        while True:
            await keeper.keep(generation, task_status)
            task_status = trio.TASK_STATUS_IGNORED
            generation = await keeper.next_after(generation)


@contextmanager
def _directory(config: Config) -> Generator[Path | None]:
    """Where parked chats are saved; it outlives the servers that write there."""
    if config.attach is not None:
        yield None
        return
    with slot_directory() as directory:
        yield directory


@final
class Keeper:
    """Starts one server at a time, and whoever works with it."""

    def __init__(self, config: Config, ledger: Ledger, gate: Gate, directory: Path | None) -> None:
        self._config = config
        self._ledger = ledger
        self._gate = gate
        self._directory = directory

    async def keep(self, generation: int, task_status: trio.TaskStatus[None]) -> None:
        """One server from its start to its end, whoever ends it."""
        try:
            async with trio.open_nursery() as life:
                life.start_soon(self._end_when_unwanted, generation, life.cancel_scope)
                ended = trio.Event()
                server = await life.start(self._start, generation, ended)
                await self._serve(server, ended, task_status)
                life.cancel_scope.cancel()
        except* KvaletError as group:
            if generation == 1:
                raise
            # The launcher has told why, unless it never came to that.
            text = "; ".join(map(str, group.exceptions))
            structlog.get_logger(__name__).error("llama-server did not start", why=text)
            self._ledger.tell(ExitSeen(generation=generation, code=0, planned=False, reason=text))
        finally:
            self._gate.close()

    async def next_after(self, generation: int) -> int:
        """The next server that is wanted, when its time has come."""
        ledger = self._ledger
        while True:
            await self._heard(partial(_is_due, generation))
            wanted = ledger.house.server.wanted
            wait_s = (ledger.house.server.due_ns - ledger.now_ns()) / NANOS
            if wait_s <= 0:
                return wanted
            with trio.move_on_after(wait_s):
                await self._heard(partial(_is_superseded, wanted))

    async def _heard(self, condition: Callable[[House], bool]) -> None:
        await self._ledger.wait_for(condition)
        if self._ledger.failure is not None:
            # Nothing is decided any more: whoever runs may go on until kvalet stops.
            await trio.sleep_forever()

    async def _end_when_unwanted(self, generation: int, life: trio.CancelScope) -> None:
        await self._heard(partial(_is_unwanted, generation))
        server = self._ledger.house.server
        if server.state == "hung" and server.pid is not None:
            # It would not hear that it is to stop.
            with suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
            await self._heard(partial(_is_superseded, server.wanted))
        life.cancel()

    async def _start(
        self, generation: int, ended: trio.Event, *, task_status: trio.TaskStatus[Server]
    ) -> None:
        """Launch the child, or attach to a running server; ``ended`` is set when it is gone."""
        config, ledger = self._config, self._ledger
        try:
            if config.attach is not None:
                await attach.run(
                    config.attach,
                    config.ctx,
                    config.parallel,
                    ledger.reports(),
                    task_status=task_status,
                )
            else:
                await launcher.run(
                    await self._launch(),
                    ledger.reports(),
                    generation=generation,
                    given=cast("tuple[Concession, ...]", ledger.house.server.given),
                    directory=self._directory,
                    task_status=task_status,
                )
        finally:
            ended.set()

    async def _launch(self) -> LaunchConfig:
        config, load = self._config, self._ledger.house.server.load
        wished = config.model if load.model is None else Path(load.model)
        demo = config.demo and load.model is None
        model = await trio.to_thread.run_sync(lambda: find_model(wished, demo=demo))
        self._gate.wish, _ = wish_of(config, load)
        return LaunchConfig(
            model=Path(model),
            server_bin=config.server_bin,
            ctx=load.ctx or config.ctx,
            parallel=load.parallel or config.parallel or DEFAULT_PARALLEL,
            mode=cast(Mode, load.mode or config.mode),
            preempt=config.preempt,
            exact=self._gate.wish,
            extra_args=config.server_args if load.server_args is None else load.server_args,
            state_dir=config.state_dir,
            budget=budget_of(config.vram_fraction),
            parking=self._ledger.house.settings.park_ram_bytes or 0,
        )

    async def _serve(
        self, server: Server, ended: trio.Event, task_status: trio.TaskStatus[None]
    ) -> None:
        """Work with ``server`` until it is gone."""
        ledger, gate = self._ledger, self._gate
        async with UpstreamClient(server) as upstream, trio.open_nursery() as crew:
            crew.start_soon(slots.run, upstream, ledger.tap(TAP_MAX), ledger.tell)
            crew.start_soon(preemption.run, upstream, ledger.tell, self._is_busy)
            crew.start_soon(
                partial(
                    watchdog.run,
                    server,
                    ledger.reports(),
                    self._config.health_s,
                    heard_at=lambda: gate.heard_at,
                )
            )
            gate.open(upstream)
            await self._open_pool(upstream, server)
            task_status.started()
            await ended.wait()
            crew.cancel_scope.cancel()

    def _is_busy(self) -> bool:
        """Whether anybody holds or waits for cells."""
        return bool(self._ledger.house.leases)

    async def _open_pool(self, upstream: UpstreamClient, server: Server) -> None:
        """Settle the park method; the pool opens when the ledger has heard of it."""
        config, ledger = self._config, self._ledger
        wanted = config.park_method if config.preempt else "recompute"
        if ledger.house.server.parks:
            wanted = HANDED_OVER
        ledger.tell(await probe.choose_method(upstream, server.generation, wanted))
        await ledger.wait_for(
            lambda house: house.ready or house.server.state in (*DOWN, "restarting", "hung")
        )


def wish_of(config: Config, load: Load) -> tuple[Wish, Level]:
    """Whether the next launch is to be exact, and who decided so. What the command line or our
    own variable says comes first."""
    said = {VARIABLE: os.environ.get(VARIABLE, "")}
    if config.exact is not None:
        said[SETTING] = config.exact
    stored = read_stored(config.state_dir).exact_concurrency
    return decide_wish(said, request=load.exact, stored=stored)


def _is_unwanted(generation: int, house: House) -> bool:
    server = house.server
    hung = server.state == "hung" and server.generation == generation
    return hung or server.wanted > generation


def _is_due(generation: int, house: House) -> bool:
    return house.server.wanted > generation and house.server.state != "unloaded"


def _is_superseded(generation: int, house: House) -> bool:
    return house.server.wanted != generation
