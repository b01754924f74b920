"""Tables for people: settings, findings, bench and replay results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvalet.actors.bench import BenchReport, ChatReport, ChatView
from kvalet.actors.doctor import Finding
from kvalet.actors.render import printable

# Piped output has no width of its own, and must not be folded to a terminal's.
_PIPED_WIDTH: Final = 160
_COLOURS: Final = {
    "ok": "green",
    "warn": "yellow",
    "bad": "red",
    "running": "green",
    "done": "green",
    "paused": "yellow",
    "failed": "red",
}


def open_console(*, stderr: bool = False) -> Console:
    """A console that takes text literally."""
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def new_table(*columns: str, numbers: Iterable[str] = ()) -> Table:
    """An empty table; the columns in ``numbers`` are right-aligned."""
    right = frozenset(numbers)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def coloured(word: str) -> Text:
    """A verdict or a state in its colour."""
    return Text(word, style=_COLOURS.get(word, ""))


def settings_table(settings: Mapping[str, Any], levels: Mapping[str, str]) -> Table:
    """Each setting, its effective value and the level that decided it."""
    table = new_table("setting", "value", "decided by")
    for name, value in settings.items():
        table.add_row(name, _shown(value), Text(levels[name], style=_level_style(levels[name])))
    return table


def _level_style(level: str) -> str:
    return "dim" if level == "default" else "bold"


def _shown(value: Any) -> str:
    if value is None or value in ([], ()):
        return "-"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType]
    return str(value).lower() if isinstance(value, bool) else printable(str(value))


def findings_table(findings: Sequence[Finding]) -> Table:
    """What was looked at; what to do stands under what is wrong."""
    table = new_table("", "looked at", "found")
    for finding in findings:
        table.add_row(coloured(finding.verdict), finding.name, printable(finding.message))
        if finding.mend and finding.verdict != "ok":
            table.add_row("", "", Text(f"→ {printable(finding.mend)}", style="italic"))
    return table


def views_table(title: str, views: Sequence[ChatView]) -> Table:
    """Chats while they run."""
    table = new_table("chat", "state", "tokens", "parks", numbers=("tokens", "parks"))
    table.title = title
    table.title_justify = "left"
    for number, view in enumerate(views, start=1):
        table.add_row(str(number), coloured(view.state), str(view.tokens), str(view.parks))
    return table


def bench_table(report: BenchReport) -> Table:
    """One line per chat of a finished run."""
    numbers = ("tokens", "ttft", "longest silence", "parks", "resumes", "recomputes")
    table = new_table("chat", "outcome", *numbers, "", numbers=numbers)
    for number, chat in enumerate(report.chats, start=1):
        table.add_row(
            str(number),
            coloured("done" if chat.finished else "failed"),
            str(chat.tokens),
            "-" if chat.ttft_s is None else f"{chat.ttft_s:.2f} s",
            f"{chat.longest_silence_s:.2f} s",
            str(chat.parks),
            str(chat.resumes),
            str(chat.recomputes),
            why(chat),
        )
    return table


def why(chat: ChatReport) -> str:
    """How a chat ended, in a few words."""
    return printable(chat.error or chat.finish_reason or "")


def bench_line(report: BenchReport) -> str:
    """A finished run in one line."""
    return (
        f"{report.finished} of {len(report.chats)} chats finished, {report.tokens} tokens in "
        f"{report.wall_s:.1f} s, {report.tokens_per_s:.1f} tokens/s"
    )
