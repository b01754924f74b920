"""What ends a command becomes one clear line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from typing import Final, cast

import click

from kvalet.protocol.errors import KvaletError

FOUND: Final = 1
USAGE: Final = 2
LACKING: Final = 3
BUG: Final = 70
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141


def complain(message: str) -> None:
    """One line on stderr."""
    click.echo(f"kvalet: {' '.join(message.split())}", err=True)


def judge(error: BaseException) -> int:
    """Tell what ended the command, and return its exit code.

    Of an exception group the fault inside is told; a bug among its members outweighs
    everything else and shows its traceback.
    """
    leaves = list(_leaves(error))
    bugs = [leaf for leaf in leaves if not _is_expected(leaf)]
    if bugs:
        traceback.print_exception(error, file=sys.stderr)
        return BUG
    if any(isinstance(leaf, KeyboardInterrupt | click.Abort) for leaf in leaves):
        return INTERRUPTED
    if any(isinstance(leaf, BrokenPipeError) for leaf in leaves):
        _close_stdout()
        return PIPE_CLOSED
    return _tell(leaves[0])


def _tell(leaf: BaseException) -> int:
    if isinstance(leaf, click.exceptions.Exit):
        return leaf.exit_code
    if isinstance(leaf, click.exceptions.NoArgsIsHelpError):
        click.echo(leaf.format_message(), err=True)
        return USAGE
    if isinstance(leaf, click.UsageError):
        command = leaf.ctx.command_path if leaf.ctx else "kvalet"
        complain(f"{leaf.format_message().rstrip('.')}; see {command} --help")
        return USAGE
    if isinstance(leaf, click.ClickException):
        complain(leaf.format_message())
        return leaf.exit_code
    assert isinstance(leaf, KvaletError), "everything else is a bug and was told before"
    complain(str(leaf))
    return leaf.exit_code


def _is_expected(leaf: BaseException) -> bool:
    known = KvaletError | KeyboardInterrupt | BrokenPipeError
    return isinstance(leaf, known | click.ClickException | click.Abort | click.exceptions.Exit)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        group = cast(BaseExceptionGroup[BaseException], error)
        for inner in group.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _close_stdout() -> None:
    # Python flushes stdout once more at its end and would complain on stderr.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
