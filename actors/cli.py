"""The command line: argv in, one command run, an exit code out.

0 fine, 1 the run found what it looks for, 2 wrong usage or configuration, 3 the
environment lacks something, 70 a bug, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from kvalet import __version__
from kvalet.actors.cli_errors import FOUND, LACKING, complain, judge
from kvalet.actors.cli_options import (
    PASSED_ON,
    PATH,
    PassingOn,
    api_key_flag,
    effective,
    first_key,
    is_url,
    journal_file,
    json_flag,
    own_url,
    settings_flags,
)
from kvalet.actors.config import unstructure
from kvalet.actors.logs import LEVELS

POSITIVE = click.IntRange(min=1)


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line; its exit code. Nothing but bugs in here escapes."""
    try:
        with kvalet.make_context("kvalet", list(argv)) as root:
            outcome = kvalet.invoke(root)
        return outcome if isinstance(outcome, int) else 0
    except BaseException as error:
        return judge(error)


@click.group()
@click.option(
    "--config", "file", type=PATH, envvar="KVALET_CONFIG", metavar="FILE", help="A TOML file."
)
@click.version_option(__version__, prog_name="kvalet", message="%(prog)s %(version)s")
@click.pass_context
def kvalet(ctx: click.Context, file: Path | None) -> None:
    """Parallel chats share one llama-server without killing each other."""
    ctx.obj = file


@kvalet.command(cls=PassingOn)
@settings_flags
@click.option("--log-level", type=click.Choice(list(LEVELS)), default="warning", show_default=True)
@click.pass_context
def serve(ctx: click.Context, /, log_level: str, **flags: Any) -> int:
    """Launch one llama-server, or attach to one, and serve its API.

    What stands behind -- is passed on to llama-server. SIGINT or SIGTERM drains and stops.
    """
    from kvalet.actors import cli_serve, logs

    config, _ = effective(ctx.obj, flags, ctx.meta.get(PASSED_ON))
    logs.configure(log_level)
    return cli_serve.run(config)


@kvalet.command(name="config", cls=PassingOn)
@settings_flags
@json_flag
@click.pass_context
def show_config(ctx: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Print every setting, its value, and the level that decided it."""
    from kvalet.actors import cli_tables

    config, levels = effective(ctx.obj, flags, ctx.meta.get(PASSED_ON))
    settings = unstructure(config)
    if as_json:
        _say_json({name: {"value": settings[name], "level": levels[name]} for name in settings})
    else:
        cli_tables.open_console().print(cli_tables.settings_table(settings, levels))


@kvalet.command()
@settings_flags
@json_flag
@click.pass_obj
def doctor(file: Path | None, /, as_json: bool, **flags: Any) -> int:
    """Look at this machine: what is wrong, and how to mend it."""
    import attrs

    from kvalet.actors import cli_tables
    from kvalet.actors.doctor import Checkup, examine

    config, _ = effective(file, flags)
    checkup = Checkup(
        state_dir=config.state_dir,
        model=config.model,
        demo=config.demo,
        server_bin=config.server_bin,
        host=config.host,
        port=config.port,
    )
    findings = examine(checkup, os.environ)
    bad = [finding.name for finding in findings if finding.verdict == "bad"]
    if as_json:
        plain = [attrs.asdict(finding) for finding in findings]
        _say_json({"ok": not bad, "findings": plain})
    else:
        cli_tables.open_console().print(cli_tables.findings_table(findings))
    if bad:
        complain(f"kvalet cannot run here yet, see {', '.join(bad)} above")
    return LACKING if bad else 0


@kvalet.command()
@click.argument("url", required=False)
@api_key_flag
@json_flag
@click.pass_obj
def status(file: Path | None, url: str | None, api_key_file: Path | None, as_json: bool) -> None:
    """Print what a running kvalet is doing."""
    from kvalet.actors import cli_status, cli_tables

    config, _ = effective(file, {"api_key_file": api_key_file})
    url = url or own_url(config)
    url = url if is_url(url) else f"http://{url}"
    body = cli_status.fetch(url, first_key(config.api_key_file))
    document = cli_status.read_status(url, body)
    if as_json:
        click.echo(body.decode())
    else:
        cli_status.show(cli_tables.open_console(), document)


@kvalet.command()
@click.argument("source", required=False, metavar="[JOURNAL|URL]")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("--since", metavar="SEQ|10m", help="From this number, or this age, on.")
@click.option("--kind", "kinds", multiple=True, metavar="K", help="Only this kind; lease.* too.")
@click.option("--request", metavar="ID", help="Only what is about this request.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@api_key_flag
@click.pass_obj
def tail(
    file: Path | None,
    source: str | None,
    follow: bool,
    since: str | None,
    kinds: tuple[str, ...],
    request: str | None,
    as_json: bool,
    api_key_file: Path | None,
) -> None:
    """Print the event log, one line per event."""
    from kvalet.actors import cli_tail

    config, _ = effective(file, {"api_key_file": api_key_file})
    wanted = cli_tail.read_wishes(since, kinds, request, time.time_ns())
    if source is not None and is_url(source):
        key = first_key(config.api_key_file)
        entries = cli_tail.read_url(source, key, max(wanted.seq - 1, 0), follow=follow)
    else:
        path = config.journal_path if source is None else journal_file(Path(source))
        entries = cli_tail.read_file(path, follow=follow)
    cli_tail.show(entries, wanted, click.echo, as_json=as_json)


@kvalet.command()
@click.argument("journal", type=PATH)
@click.option("--verify", is_flag=True, help="Decide every command again; 1 at a difference.")
@json_flag
def replay(journal: Path, verify: bool, as_json: bool) -> int:
    """Fold a recorded journal and print what it comes to."""
    from kvalet.actors import cli_replay
    from kvalet.actors.cli_tables import open_console

    path = journal_file(journal)
    if not verify:
        folded = cli_replay.fold_file(path)
        if as_json:
            _say_json(folded)
        else:
            cli_replay.show_fold(open_console(), path, folded)
        return 0
    report = cli_replay.verify_file(path)
    if as_json:
        _say_json(report)
    else:
        cli_replay.show_audit(open_console(), path, report)
    if report.identical:
        return 0
    seq = (report.first_difference or {}).get("seq")
    complain(f"decision {seq} comes out differently now: compare recorded and decided above")
    return FOUND


@kvalet.command(cls=PassingOn)
@click.argument("model", type=PATH)
@click.option("--ctx", type=POSITIVE, metavar="N", help="Cells of the pool (the most that fits).")
@click.option("--parallel", type=POSITIVE, metavar="N", help="Slots that share the pool (4).")
@click.option(
    "--gpu", "gpus", multiple=True, metavar="FREE:TOTAL", help="A card, in MiB; again for more."
)
@click.option("--here", is_flag=True, help="Plan for the cards of this machine.")
@click.option("--build", metavar="BUILD", help="Whose rules (the installed llama-server's).")
@click.option("--serve", "as_serve", is_flag=True, help="What kvalet serve would add, too.")
@json_flag
@click.pass_context
def plan(
    ctx_: click.Context,
    model: Path,
    ctx: int | None,
    parallel: int | None,
    gpus: tuple[str, ...],
    here: bool,
    build: str | None,
    as_serve: bool,
    as_json: bool,
) -> None:
    """What a launch would take, and whether it fits: every term, before anything is launched.

    Without --gpu it is planned for the CPU. With arguments behind -- it is the plan of
    llama-server started with exactly these, otherwise that of kvalet serve.
    """
    from kvalet.actors import cli_plan
    from kvalet.actors.cli_tables import open_console
    from kvalet.actors.decisions.plan.explain import report

    made, argv = cli_plan.make(
        model,
        ctx=ctx,
        parallel=parallel,
        gpus=gpus,
        here=here,
        build=build,
        given=ctx_.meta.get(PASSED_ON) or (),
        as_serve=as_serve,
    )
    if as_json:
        _say_json(report(made, argv))
    else:
        cli_plan.show(open_console(), model, made, argv)


@kvalet.command()
@click.argument("url")
@click.option("--chats", type=POSITIVE, default=4, show_default=True, help="Chats at once.")
@click.option("--tokens", type=POSITIVE, default=256, show_default=True, help="Tokens of each.")
@api_key_flag
@json_flag
def bench(url: str, chats: int, tokens: int, api_key_file: Path | None, as_json: bool) -> int:
    """Run parallel chats against any OpenAI-compatible server and measure them."""
    import trio

    from kvalet.actors import cli_bench, cli_tables
    from kvalet.actors.bench import run_bench

    key = first_key(api_key_file)
    watcher = cli_tables.open_console(stderr=True)
    with cli_bench.watching(f"{chats} chats at {url}", watcher, plain=False) as on_update:
        report = trio.run(partial(run_bench, url, chats, tokens, on_update, key))
    if as_json:
        _say_json(report)
    else:
        console = cli_tables.open_console()
        console.print(cli_tables.bench_table(report))
        console.print(cli_tables.bench_line(report), soft_wrap=True)
    if report.failed:
        first = next(cli_tables.why(chat) for chat in report.chats if not chat.finished)
        complain(f"{report.failed} of {chats} chats failed: {first}")
    return FOUND if report.failed else 0


@kvalet.command()
@click.option("--chats", type=POSITIVE, default=4, show_default=True, help="Chats at once.")
@click.option("--tokens", type=POSITIVE, default=900, show_default=True, help="Tokens of each.")
@click.option("--ctx", type=POSITIVE, default=2048, show_default=True, help="Cells of the pool.")
@click.option("--server-bin", type=PATH, metavar="PATH", help="The llama-server binary.")
@json_flag
@click.pass_obj
def demo(
    file: Path | None, chats: int, tokens: int, ctx: int, server_bin: Path | None, as_json: bool
) -> int:
    """Chats that outgrow the cache: a stock llama-server, then kvalet."""
    from kvalet.actors import cli_demo, cli_tables, logs
    from kvalet.actors.demo import DemoConfig, is_success

    effective_bin = effective(file, {"server_bin": server_bin})[0].server_bin
    config = DemoConfig(chats=chats, tokens=tokens, ctx=ctx, server_bin=effective_bin)
    logs.configure("warning")
    report = cli_demo.run(config, cli_tables.open_console(stderr=True))
    if as_json:
        _say_json(report)
    else:
        console = cli_tables.open_console()
        console.print(cli_demo.demo_table(config, report))
        console.print(cli_demo.verdict(config, report), soft_wrap=True)
        console.print(f"kvalet's journal: {report.journal}", soft_wrap=True)
    if is_success(config, report):
        return 0
    complain(f"not every chat got all its tokens through kvalet; see {report.journal}")
    return FOUND


def _say_json(document: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
