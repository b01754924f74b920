"""The same chats three times: stock server, kvalet, and a stock server with room for all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import msgspec
import trio
from attrs import evolve, frozen

from kvalet.actors import launcher
from kvalet.actors.app import Handle, serve
from kvalet.actors.bench import BenchReport, OnUpdate, run_bench
from kvalet.actors.binaries import find_model, find_server, probe_capabilities
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.config import Config
from kvalet.actors.decisions.capabilities import Capabilities
from kvalet.actors.decisions.launch import round_cells
from kvalet.actors.journal import read_journal
from kvalet.actors.server import Server
from kvalet.protocol.commands import Command
from kvalet.protocol.errors import ConfigFault
from kvalet.protocol.events import LeaseParked, ServerReady

PROMPT_CELLS_MAX: Final = 64
"""More than any of bench's prompts takes."""
# One launch reports eight times at most: three attempts, its readiness and its end.
_REPORTS_MAX: Final = 16
_STOCK: Final = "stock"
_KVALET: Final = "kvalet"
_ROOMY: Final = "roomy"
PARTS: Final = (_STOCK, _KVALET, _ROOMY)


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The three runs side by side.

    ``speed_ratio`` is kvalet's tokens per second over the roomy server's;
    ``granted_at_first_park`` the part of the pool that was granted when a chat was first
    parked (None: never); ``journal`` kvalet's event log, which is kept.
    """

    stock: BenchReport
    kvalet: BenchReport
    roomy: BenchReport
    speed_ratio: float
    granted_at_first_park: float | None
    journal: str


@frozen(kw_only=True)
class DemoConfig:
    """``chats`` of ``tokens`` tokens each, in a pool of ``ctx`` cells."""

    chats: int = 4
    tokens: int = 900
    ctx: int = 2048
    server_bin: Path | None = None
    model: Path | None = None

    @property
    def roomy_cells(self) -> int:
        """A pool that these chats never fill."""
        return round_cells(self.chats * (self.tokens + PROMPT_CELLS_MAX))


Watch = Callable[[str], AbstractContextManager[OnUpdate | None]]
"""Opens a view on the part of this name."""

OnPart = Callable[[str, BenchReport], None]


async def run_demo(config: DemoConfig, watch: Watch, on_part: OnPart | None = None) -> DemoReport:
    """Run the three parts one after the other; ``on_part`` hears each result.

    Raises ConfigFault when one chat alone would outgrow the pool, EnvironmentFault when the
    machine lacks a server or the model.
    """
    if config.tokens + PROMPT_CELLS_MAX > config.ctx:
        raise ConfigFault(
            f"{config.tokens} tokens and a prompt do not fit into {config.ctx} cells even alone: "
            "lower --tokens or raise --ctx"
        )
    model = await trio.to_thread.run_sync(
        lambda: find_model(config.model, demo=config.model is None)
    )
    config = evolve(config, model=model)
    capabilities = await trio.to_thread.run_sync(_probe, config.server_bin)
    directory = Path(tempfile.mkdtemp(prefix="kvalet-demo-"))
    reports: dict[str, BenchReport] = {}
    for part in PARTS:
        with watch(part) as on_update:
            if part == _KVALET:
                reports[part] = await _through_kvalet(config, directory, on_update)
            else:
                launch = launch_config(config, part, capabilities, directory / part)
                reports[part] = await _straight(config, launch, on_update)
        if on_part is not None:
            on_part(part, reports[part])
    journal = directory / "journal.jsonl"
    roomy_per_s = reports[_ROOMY].tokens_per_s
    ratio = reports[_KVALET].tokens_per_s / roomy_per_s if roomy_per_s else 0.0
    return DemoReport(
        stock=reports[_STOCK],
        kvalet=reports[_KVALET],
        roomy=reports[_ROOMY],
        speed_ratio=round(ratio, 4),
        granted_at_first_park=await trio.to_thread.run_sync(granted_at_first_park, journal),
        journal=str(journal),
    )


def is_success(config: DemoConfig, report: DemoReport) -> bool:
    """Whether kvalet finished every chat with all its tokens."""
    return report.kvalet.failed == 0 and all(
        chat.tokens == config.tokens for chat in report.kvalet.chats
    )


def launch_config(
    config: DemoConfig, part: str, capabilities: Capabilities, state_dir: Path
) -> LaunchConfig:
    """How the server is launched that part ``part`` meets straight.

    The roomy one gets what kvalet gives its own server, so that like is compared with like.
    """
    assert config.model is not None, "the model is found before anything is launched"
    extra: list[str] = []
    if part == _ROOMY and capabilities.swa_full:
        extra.append("--swa-full")
    if part == _ROOMY and capabilities.cache_ram:
        extra += ["--cache-ram", "0"]
    return LaunchConfig(
        model=config.model,
        server_bin=config.server_bin,
        ctx=config.roomy_cells if part == _ROOMY else config.ctx,
        parallel=config.chats,
        preempt=False,
        extra_args=tuple(extra),
        state_dir=state_dir,
    )


def granted_at_first_park(journal: Path) -> float | None:
    """The part of the pool that was granted when a chat was first parked; None if never."""
    cells = 0
    for decision in read_journal(journal):
        for event in decision.events:
            if isinstance(event, ServerReady):
                cells = event.cells
            if isinstance(event, LeaseParked) and cells:
                return round(event.pool_granted / cells, 4)
    return None


async def _straight(
    config: DemoConfig, launch: LaunchConfig, on_update: OnUpdate | None
) -> BenchReport:
    send, receive = trio.open_memory_channel[Command](_REPORTS_MAX)
    async with receive, trio.open_nursery() as nursery:
        server: Server = await nursery.start(launcher.run, launch, send)
        report = await run_bench(server.url, config.chats, config.tokens, on_update, server.api_key)
        nursery.cancel_scope.cancel()
    return report


async def _through_kvalet(
    config: DemoConfig, directory: Path, on_update: OnUpdate | None
) -> BenchReport:
    settings = Config(
        model=config.model,
        server_bin=config.server_bin,
        port=0,
        ctx=config.ctx,
        parallel=config.chats,
        state_dir=directory,
    )
    async with trio.open_nursery() as nursery:
        handle: Handle = await nursery.start(serve, settings)
        report = await run_bench(handle.url, config.chats, config.tokens, on_update)
        handle.drain()
    return report


def _probe(server_bin: Path | None) -> Capabilities:
    return probe_capabilities(find_server(server_bin, os.environ), os.environ)
