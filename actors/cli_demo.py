"""``kvalet demo`` for a person: what is about to happen, live chats, a table, a verdict."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import trio
from rich.console import Console
from rich.table import Table

from kvalet.actors.bench import BenchReport, OnUpdate
from kvalet.actors.cli_bench import watching
from kvalet.actors.cli_tables import bench_line, new_table, why
from kvalet.actors.decisions.launch import round_cells
from kvalet.actors.demo import DemoConfig, DemoReport, run_demo

# Four chats together on one small CPU core, and on two busy ones; only for the first estimate.
_TOKENS_PER_S_SLOW: Final = 25
_TOKENS_PER_S_QUICK: Final = 100


def run(config: DemoConfig, console: Console) -> DemoReport:
    """Run the demo and tell ``console`` how it goes."""
    _say(console, opening(config))
    watch = partial(_watching, config, console)
    return trio.run(run_demo, config, watch, partial(_tell, config, console))


def _watching(
    config: DemoConfig, console: Console, part: str
) -> AbstractContextManager[OnUpdate | None]:
    return watching(title_of(part, config), console, plain=True)


def opening(config: DemoConfig) -> str:
    """What is going to happen, and how long it may take."""
    whole = config.chats * config.tokens
    total = 2 * whole + min(whole, config.ctx)
    return (
        f"{config.chats} chats of {config.tokens} tokens in a pool of {config.ctx} cells, three "
        f"times: some {total} tokens, {_minutes(total / _TOKENS_PER_S_QUICK)} to "
        f"{_minutes(total / _TOKENS_PER_S_SLOW)} minutes on a small CPU"
    )


def title_of(part: str, config: DemoConfig) -> str:
    """What a part of the demo is, in a few words."""
    return {
        "stock": f"stock llama-server, {config.ctx} cells",
        "kvalet": f"through kvalet, {config.ctx} cells",
        "roomy": f"stock llama-server, {config.roomy_cells} cells",
    }[part]


def demo_table(config: DemoConfig, report: DemoReport) -> Table:
    """The three parts side by side."""
    numbers = ("finished", "tokens", "tokens/s", "parks", "recomputes", "longest silence")
    table = new_table("", *numbers, "", numbers=numbers)
    parts = {"stock": report.stock, "kvalet": report.kvalet, "roomy": report.roomy}
    for part, bench in parts.items():
        table.add_row(
            title_of(part, config),
            f"{bench.finished} of {len(bench.chats)}",
            str(bench.tokens),
            f"{bench.tokens_per_s:.1f}",
            str(sum(chat.parks for chat in bench.chats)),
            str(sum(chat.recomputes for chat in bench.chats)),
            f"{max((chat.longest_silence_s for chat in bench.chats), default=0):.1f} s",
            ", ".join(dict.fromkeys(why(chat) for chat in bench.chats)),
        )
    return table


def verdict(config: DemoConfig, report: DemoReport) -> str:
    """The whole demo in one line."""
    chats, cells = len(report.kvalet.chats), round_cells(config.ctx)
    told = (
        f"stock finished {report.stock.finished} of {chats}, kvalet {report.kvalet.finished} of "
        f"{chats} in the same {cells} cells, at {report.speed_ratio:.0%} of the speed of a pool "
        "that never fills"
    )
    if report.stock.failed == 0:
        told += "; these chats fit the pool, so nothing was proved: raise --tokens"
    return told


def _tell(config: DemoConfig, console: Console, part: str, report: BenchReport) -> None:
    _say(console, f"{title_of(part, config)}: {bench_line(report)}")


def _minutes(seconds: float) -> int:
    return max(1, round(seconds / 60))


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)
