"""``kvalet plan``: what a launch would take, before anything is launched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvalet.actors.binaries import find_server, probe_capabilities
from kvalet.actors.cli_tables import new_table
from kvalet.actors.config import DEFAULT_PARALLEL
from kvalet.actors.decisions.capabilities import Capabilities
from kvalet.actors.decisions.launch import LaunchRequest, build_argv
from kvalet.actors.decisions.plan.devices import MIB, Gpu
from kvalet.actors.decisions.plan.explain import TITLES, report, why_of
from kvalet.actors.decisions.plan.plan import Plan
from kvalet.actors.planner import plan_launch, read_machine
from kvalet.protocol.errors import ConfigFault, EnvironmentFault

_ASSUMED: Final = Capabilities(
    flags=frozenset(
        {"--kv-unified", "--swa-full", "--cache-ram", "--slot-save-path", "--slots", "--metrics"}
    )
)
"""What every build can do whose rules are known."""

_CARD: Final = re.compile(r"(?P<free>\d{1,9})(?::(?P<total>\d{1,9}|unknown)?)?")
_PROGRAM: Final = "llama-server"
_SLOT_DIRECTORY: Final = "SLOT-DIRECTORY"


def read_cards(words: Sequence[str]) -> tuple[Gpu, ...]:
    """Cards named as FREE:TOTAL in MiB, or FREE alone where the total is unknown.

    Raises ConfigFault for anything else.
    """
    cards: list[Gpu] = []
    for index, word in enumerate(words):
        match = _CARD.fullmatch(word)
        if match is None:
            raise ConfigFault(f"--gpu wants FREE:TOTAL in MiB, like 24000:24576, not {word!r}")
        total = int(match["total"]) if (match["total"] or "").isdigit() else None
        free = int(match["free"])
        if total is not None and free > total:
            raise ConfigFault(f"--gpu {word}: more free than there is in all")
        cards.append(Gpu(index, free, total or None))
    return tuple(cards)


def installed(env: Mapping[str, str]) -> Capabilities | None:
    """What the llama-server on this machine can do; None without one that runs."""
    try:
        return probe_capabilities(find_server(None, env), env)
    except EnvironmentFault:
        return None


def make(
    model: Path,
    *,
    ctx: int | None,
    parallel: int | None,
    gpus: Sequence[str],
    here: bool,
    build: str | None,
    given: tuple[str, ...],
    as_serve: bool,
) -> tuple[Plan, tuple[str, ...]]:
    """The plan and the command line that it leads to.

    With arguments ``given`` and not ``as_serve`` it is llama-server's, started with exactly
    these; otherwise it is what ``kvalet serve`` launches.
    """
    env = dict(os.environ)
    cards = read_cards(gpus)
    if here and cards:
        raise ConfigFault("--gpu names the cards and --here asks this machine: use one of them")
    machine = read_machine(env, None if here else cards)
    known = None if build is not None else installed(env)
    serve = as_serve or not given
    if serve:
        argv = _served(model, ctx, parallel, given, known or _ASSUMED)
    else:
        argv = (
            *(("-c", str(ctx)) if ctx is not None else ()),
            *(("-np", str(parallel)) if parallel is not None else ()),
            *given,
        )
    plan = plan_launch(
        model,
        argv,
        env,
        machine,
        build=build if build is not None else (known.build if known is not None else ""),
        choose_ctx=serve and ctx is None,
    )
    return plan, (_PROGRAM, "-m", str(model), *argv, *plan.added)


def _served(
    model: Path,
    ctx: int | None,
    parallel: int | None,
    given: tuple[str, ...],
    capabilities: Capabilities,
) -> tuple[str, ...]:
    """llama-server's arguments as ``kvalet serve`` composes them, less where it listens."""
    argv = build_argv(
        LaunchRequest(
            program=_PROGRAM,
            model=str(model),
            port=0,
            cells=ctx,
            slots=parallel or DEFAULT_PARALLEL,
            slot_directory=_SLOT_DIRECTORY,
            extra_args=given,
        ),
        capabilities,
    ).argv
    return argv[argv.index("-c" if ctx is not None else "-np") :]


def show(console: Console, model: Path, plan: Plan, argv: Sequence[str]) -> None:
    """Every term and why, for a person."""
    figures = report(plan, argv)
    slots = "slot" if plan.price.context.sizes.slots == 1 else "slots"
    console.print(
        f"{model.name}: {figures['arch']}, {figures['n_ctx']} cells in all, "
        f"{figures['n_ctx_slot']} for each of {figures['slots']} {slots}"
        f"{', one pool' if figures['kv_unified'] else ''}; at most {plan.max_ctx} would fit",
        soft_wrap=True,
    )
    table = new_table("device", "what", "MiB", "why", numbers=("MiB",))
    for device in dict.fromkeys(term.device for term in plan.price.terms):
        for term in plan.price.terms:
            if term.device == device and term.bytes:
                table.add_row(device, TITLES[term.name], _mib(term.bytes), why_of(plan, term))
        budget = plan.budgets.get(device)
        room = f"of {_mib(budget)} that may be used" if budget is not None else ""
        table.add_row(device, "in all", _mib(plan.price.on(device)), room, end_section=True)
    console.print(table)
    for line in _lines(plan, figures, argv):
        console.print(line, soft_wrap=True)


def _lines(plan: Plan, figures: Mapping[str, Any], argv: Sequence[str]) -> list[str]:
    host = figures["host"]
    lines = [
        "host memory that fills while it serves: "
        f"checkpoints up to {_mib(host['checkpoints'])} MiB, "
        + (
            "a prompt cache without bound"
            if host["prompt_cache"] < 0
            else f"prompt cache up to {_mib(host['prompt_cache'])} MiB"
        ),
        f"rules: {figures['rules']}, {'measured with' if plan.certain else 'not certain for'} "
        f"{plan.build or 'this build'}",
    ]
    if plan.env_removed:
        lines.append(f"variables that the server does not inherit: {', '.join(plan.env_removed)}")
    lines += [f"warning: {message} ({code})" for code, message in plan.warnings]
    lines.append("command: " + " ".join(argv))
    return lines


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f}"
