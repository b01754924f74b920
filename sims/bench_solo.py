"""A chat alone: a real llama-server with a small model, straight and through kvalet."""

from __future__ import annotations

from pathlib import Path

import trio

from kvalet.actors import launcher
from kvalet.actors.bench import BenchReport, run_bench
from kvalet.actors.binaries import find_model
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.journal import read_journal
from kvalet.protocol import events as e
from kvalet.protocol.commands import Command
from kvalet.protocol.errors import ServerFault
from kvalet.sims.figures import Figure, middle
from kvalet.sims.programs import running

RATIO_MIN = 0.99
CTX = 8192
PARALLEL = 4
# A launch sends five reports; nobody reads them here.
REPORTS_MAX = 64


async def measure_solo(repeats: int, tokens: int, directory: Path) -> list[Figure]:
    """Tokens per second of one chat of ``tokens`` tokens through kvalet over the straight ones.

    Both go to one and the same llama-server, in turns. Raises EnvironmentFault without a
    server or a model.
    """
    model = await trio.to_thread.run_sync(lambda: find_model(None, demo=True))
    config = LaunchConfig(model=model, ctx=CTX, parallel=PARALLEL, state_dir=directory)
    send, _unread = trio.open_memory_channel[Command](REPORTS_MAX)
    async with trio.open_nursery() as nursery:
        server = await nursery.start(launcher.run, config, send)
        state_dir = directory / "kvalet"
        key = {"KVALET_UPSTREAM_KEY": server.api_key}
        front = running("kvalet.sims.programs", server.url, str(state_dir), more_env=key)
        async with front as kvalet:
            straight, through = (server.url, server.api_key), (kvalet.url, None)
            # Each way once unmeasured: the first answer pays for cold caches.
            for url, api_key in (straight, through):
                await one_chat(url, api_key, tokens)
            runs = [await one_pair(straight, through, tokens, n) for n in range(repeats)]
        nursery.cancel_scope.cancel()
    return compare(runs, tokens, count_legs(state_dir / "journal.jsonl"))


Way = tuple[str, str | None]


async def one_pair(
    straight: Way, through: Way, tokens: int, number: int
) -> tuple[BenchReport, BenchReport]:
    """One chat each way; who is first changes with ``number``."""
    if number % 2:
        second = await one_chat(*through, tokens)
        return await one_chat(*straight, tokens), second
    first = await one_chat(*straight, tokens)
    return first, await one_chat(*through, tokens)


async def one_chat(url: str, api_key: str | None, tokens: int) -> BenchReport:
    """One chat alone at ``url``. Raises ServerFault when it fails."""
    report = await run_bench(url, 1, tokens, api_key=api_key)
    if report.failed:
        raise ServerFault(f"the chat at {url} failed: {report.chats[0].error}")
    return report


def compare(
    runs: list[tuple[BenchReport, BenchReport]], tokens: int, legs: list[int]
) -> list[Figure]:
    """Speed each way, their ratio, and the legs of kvalet's answers."""
    made_of = f"{tokens} tokens, {len(runs)} pairs"
    ratios = [through.tokens_per_s / straight.tokens_per_s for straight, through in runs]

    def speed(name: str, values: list[float]) -> Figure:
        return Figure(part="solo", name=name, value=middle(values), unit="tokens/s", note=made_of)

    return [
        speed("alone, straight", [straight.tokens_per_s for straight, _ in runs]),
        speed("alone, through kvalet", [through.tokens_per_s for _, through in runs]),
        Figure(
            part="solo",
            name="alone, through/straight",
            value=middle(ratios),
            unit="ratio",
            target=RATIO_MIN,
            note=f"{made_of}, from {min(ratios):.3f} to {max(ratios):.3f}",
        ),
        Figure(
            part="solo",
            name="legs of an answer",
            value=middle([float(count) for count in legs]),
            unit="legs",
            note=f"{len(legs)} answers",
        ),
    ]


def count_legs(journal: Path) -> list[int]:
    """Legs of each answer that has ended, from kvalet's own event log."""
    running_legs: dict[str, int] = {}
    ended: list[int] = []
    for decision in read_journal(journal):
        for event in decision.events:
            match event:
                case e.LeaseGranted() | e.LeaseExtended() | e.LeaseResumed():
                    running_legs[event.request] = running_legs.get(event.request, 0) + 1
                case e.LeaseEnded():
                    ended.append(running_legs.pop(event.request, 0))
                case _:
                    pass
    return ended
