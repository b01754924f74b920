"""Flags that several commands share, and how they become a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvalet.actors.config import Config, resolve
from kvalet.protocol.errors import ConfigFault

PASSED_ON: Final = "kvalet.server_args"
SEPARATOR: Final = "--"

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

PATH: Final = click.Path(path_type=Path)

_SETTINGS: Final = (
    click.option("-m", "--model", type=PATH, metavar="MODEL.gguf", help="The model to load."),
    click.option("--demo/--no-demo", default=None, help="Use the small demo model."),
    click.option("--attach", metavar="URL", help="Use a llama-server that runs already."),
    click.option("--server-bin", type=PATH, metavar="PATH", help="The llama-server binary."),
    click.option("--host", metavar="ADDRESS", help="Where to listen (127.0.0.1)."),
    click.option("--port", type=int, metavar="N", help="Where to listen (8383; 0: any free one)."),
    click.option("--parallel", type=int, metavar="N", help="Slots that share the pool (4)."),
    click.option(
        "--ctx",
        type=int,
        metavar="N",
        help="Cells of the pool (what fits the cards; 8192 without any).",
    ),
    click.option("--mode", metavar="auto|proxy|server", help="Who parks chats (auto)."),
    click.option("--preempt/--no-preempt", default=None, help="Whether to park chats at all."),
    click.option("--exact", metavar="auto|off|on", help="Exact concurrency (off)."),
    click.option("--api-key-file", type=PATH, metavar="FILE", help="API keys, one a line."),
    click.option("--state-dir", type=PATH, metavar="DIR", help="Where the journal lies."),
)

api_key_flag: Final = click.option(
    "--api-key-file", type=PATH, metavar="FILE", help="The server's API key, its first line."
)
json_flag: Final = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


def settings_flags(command: _Decorated) -> _Decorated:
    """One flag for each setting that is worth a flag; absent ones are None."""
    for option in reversed(_SETTINGS):
        command = option(command)
    return command


class PassingOn(click.Command):
    """A command that keeps what stands behind ``--`` for llama-server, unread."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands in front of ``--``."""
        if SEPARATOR in args:
            cut = args.index(SEPARATOR)
            ctx.meta[PASSED_ON] = tuple(args[cut + 1 :])
            args = args[:cut]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line's parts."""
        return [*super().collect_usage_pieces(ctx), "[-- LLAMA-SERVER-ARGS...]"]


def effective(
    file: Path | None, flags: dict[str, Any], passed_on: tuple[str, ...] | None = None
) -> tuple[Config, dict[str, str]]:
    """The configuration and the level that decided each of its fields. Raises ConfigFault."""
    return resolve({**flags, "server_args": passed_on}, os.environ, file)


def own_url(config: Config) -> str:
    """Where a kvalet of this configuration is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def first_key(file: Path | None) -> str | None:
    """The first key in a key file; None without a file. Raises ConfigFault."""
    if file is None:
        return None
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFault(f"cannot read the key file {file}: {error}") from error
    for line in lines:
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise ConfigFault(f"{file} holds no key")


def is_url(text: str) -> bool:
    """Whether a source named on the command line is a server and not a file."""
    return text.startswith(("http://", "https://"))


def journal_file(path: Path) -> Path:
    """The journal itself, where a state directory was named."""
    return path / "journal.jsonl" if path.is_dir() else path
