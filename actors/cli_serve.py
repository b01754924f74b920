"""``kvalet serve``: the product between its first line and its last signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import click
import trio
from rich.console import Console

from kvalet import __version__
from kvalet.actors.app import Handle, check, serve
from kvalet.actors.config import Config

STOPS = (signal.SIGINT, signal.SIGTERM)


def run(config: Config) -> int:
    """Serve until told to stop; 0 after a drain. Raises what ``serve`` raises."""
    check(config)
    trio.run(serve_until_stopped, config, _announce)
    return 0


async def serve_until_stopped(config: Config, announce: Callable[[Handle], None]) -> None:
    """Serve until SIGINT or SIGTERM: the first drains, a second one cancels at once.

    Before requests are accepted there is nothing to drain, and the first one cancels.
    ``announce`` is called when requests are accepted.
    """
    with trio.open_signal_receiver(*STOPS) as signals, ExitStack() as loading:
        _show_loading(config, loading)
        async with trio.open_nursery() as outer:
            running: list[Handle] = []
            outer.start_soon(_obey, signals, running, outer.cancel_scope)
            async with trio.open_nursery() as inner:
                handle: Handle = await inner.start(serve, config)
                running.append(handle)
                loading.close()
                announce(handle)
            outer.cancel_scope.cancel()


async def _obey(
    signals: AsyncIterator[int], running: list[Handle], scope: trio.CancelScope
) -> None:
    draining = False
    async for _ in signals:
        if draining or not running:
            scope.cancel()
            return
        draining = True
        running[0].drain()
        click.echo("kvalet: draining; once more to stop at once", err=True)


def _show_loading(config: Config, loading: ExitStack) -> None:
    text = f"attaching to {config.attach}" if config.attach else f"loading {_model_name(config)}"
    console = Console(stderr=True, markup=False, highlight=False)
    if console.is_terminal:
        loading.enter_context(console.status(f"kvalet: {text} …"))
    else:
        console.print(f"kvalet: {text}", soft_wrap=True)


def _model_name(config: Config) -> str:
    if config.model is None:
        return "the demo model"
    return Path(config.model).name


def _announce(handle: Handle) -> None:
    click.echo(ready_line(handle))
    sys.stdout.flush()


def ready_line(handle: Handle) -> str:
    """The one line that says where requests are taken, and by what."""
    house = handle.ledger.house
    method = house.method if house.settings.preempt else "none"
    return (
        f"kvalet {__version__} ready at {handle.url} (model {house.server.model}, "
        f"{house.slots} slots, {house.cells} cells, park method {method})"
    )
