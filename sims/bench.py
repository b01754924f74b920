"""``python -m kvalet.sims.bench``: kvalet's own speed, part by part, beside its targets."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import attrs
import click
import msgspec
import trio

from kvalet.protocol.errors import ConfigFault, KvaletError, first_fault
from kvalet.sims import figures
from kvalet.sims.bench_core import measure_core, measure_journal
from kvalet.sims.bench_relay import measure_relay
from kvalet.sims.bench_solo import measure_solo
from kvalet.sims.figures import Figure

PARTS = ("core", "journal", "relay", "solo")


@attrs.frozen(kw_only=True)
class Sizes:
    """How much is measured. ``commands`` for core and journal, ``burst_events`` over all
    streams of a burst, ``paced_s`` per paced run, ``solo_tokens`` per chat."""

    commands: int = 50_000
    repeats: int = 5
    burst_events: int = 40_000
    paced_s: float = 5.0
    solo_tokens: int = 600


FULL = Sizes()
QUICK = Sizes(commands=5_000, repeats=3, burst_events=4_000, paced_s=0.5, solo_tokens=60)


async def measure(
    parts: Sequence[str],
    sizes: Sizes,
    directory: Path,
    on_part: Callable[[str], None] | None = None,
) -> list[Figure]:
    """The figures of ``parts``, in their order; files are written below ``directory``.

    ``on_part`` hears which part begins. Raises EnvironmentFault when a part cannot run
    here, ServerFault when what it measures goes wrong.
    """
    found: list[Figure] = []
    for part in parts:
        if on_part is not None:
            on_part(part)
        place = directory / part
        place.mkdir()
        found += await _measure_part(part, sizes, place)
    return found


async def _measure_part(part: str, sizes: Sizes, place: Path) -> list[Figure]:
    match part:
        case "core":
            return measure_core(sizes.commands, sizes.repeats)
        case "journal":
            return await measure_journal(sizes.commands, sizes.repeats, place)
        case "relay":
            return await measure_relay(sizes.repeats, sizes.burst_events, sizes.paced_s, place)
        case "solo":
            return await measure_solo(sizes.repeats, sizes.solo_tokens, place)
        case _:
            raise ConfigFault(f"no part is called {part!r}; there are {', '.join(PARTS)}")


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count() or 0,
        "python": platform.python_version(),
        **{name: version(name) for name in ("kvalet", "trio", "httpx", "h11", "msgspec")},
    }


def split_parts(value: str) -> tuple[str, ...]:
    """The parts named in ``value``, in the order they run in. Raises ConfigFault."""
    named = {name.strip() for name in value.split(",")}
    unknown = ", ".join(sorted(named - set(PARTS)))
    if unknown:
        raise ConfigFault(f"no such part: {unknown}; there are {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in named)


@click.command()
@click.option("--only", default=",".join(PARTS), show_default=True, help="Parts, with commas.")
@click.option("--quick", is_flag=True, help="Small sizes: whether it works, not how fast.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where journals are written; a temporary directory otherwise.",
)
def main(only: str, quick: bool, as_json: bool, directory: Path | None) -> None:
    """Measure kvalet's own speed; needs no GPU and no network.

    A target that is missed is shown as missed and does not change the exit code.
    """
    sizes = QUICK if quick else FULL
    found: list[Figure] = []
    fault: KvaletError | None = None
    with tempfile.TemporaryDirectory(dir=directory) as place:
        try:
            found = trio.run(measure, split_parts(only), sizes, Path(place), _announce)
        except* KvaletError as group:
            fault = first_fault(group)
    if fault is not None:
        click.echo(f"bench: {fault}", err=True)
        raise SystemExit(fault.exit_code)
    _show(found, quick, as_json)


def _announce(part: str) -> None:
    click.echo(f"measuring: {part}", err=True)


def _show(found: list[Figure], quick: bool, as_json: bool) -> None:
    if as_json:
        document = {"machine": machine(), "quick": quick, "figures": figures.document(found)}
        click.echo(msgspec.json.encode(document))
        return
    click.echo(", ".join(f"{name} {value}" for name, value in machine().items()))
    for line in figures.lines(found):
        click.echo(line)
    if quick:
        click.echo("--quick: the sizes are too small for figures to keep")


if __name__ == "__main__":
    main()
