"""Chats that can be watched while they run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import trio
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvalet.actors.bench import ChatView, OnUpdate
from kvalet.actors.cli_tables import views_table

REFRESH_PER_S: Final = 8
PLAIN_INTERVAL_S: Final = 5.0


class _Board:
    """A table that always shows the latest views."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.views: tuple[ChatView, ...] = ()

    def __rich__(self) -> Table:
        return views_table(self.title, self.views)

    def update(self, views: tuple[ChatView, ...]) -> None:
        """Show these from now on."""
        self.views = views


class _Lines:
    """A line every few seconds, where there is no terminal."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._next_s = 0.0

    def update(self, views: tuple[ChatView, ...]) -> None:
        """Say how the chats are, unless it was said a moment ago."""
        now_s = trio.current_time()
        if now_s >= self._next_s:
            self._next_s = now_s + PLAIN_INTERVAL_S
            self._console.print(f"{self._title}: {in_words(views)}", soft_wrap=True)


def in_words(views: tuple[ChatView, ...]) -> str:
    """How many chats are in which state, and their tokens so far."""
    states = [view.state for view in views]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{counts}, {sum(view.tokens for view in views)} tokens so far"


@contextmanager
def watching(title: str, console: Console, *, plain: bool) -> Generator[OnUpdate | None]:
    """Where to send updates to: a live table on a terminal, else lines if ``plain``."""
    if console.is_terminal:
        board = _Board(title)
        with Live(board, console=console, refresh_per_second=REFRESH_PER_S, transient=True):
            yield board.update
    else:
        yield _Lines(title, console).update if plain else None
