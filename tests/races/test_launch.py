"""Races 17 and 18: one owner of pausing, and an exact attempt that leaves nothing to the next."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvalet.actors import launcher
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.decisions.exact import VARIABLE
from kvalet.actors.decisions.parker import BUDGET_FLAG, BUDGET_VARIABLE
from kvalet.actors.decisions.plan.devices import GIB
from kvalet.actors.planner import Machine
from kvalet.protocol.commands import Command, ExactSeen, LaunchPlanned, ReadySeen
from kvalet.protocol.errors import ConfigFault
from tests.actors.standin import MTP, launched, stand_in

WITNESS: Final = """#!/bin/sh
case "$*" in
*--help*|*--version*|*--list-devices*) ;;
*) echo "${{{exact}-unset}} ${{{budget}-unset}} $*" >> {log} ;;
esac
exec {program} "$@"
"""
"""Writes down what a server is started with, and starts it."""


def config(folder: Path, build: str, **settings: Any) -> LaunchConfig:
    """A launch of a stand-in whose starts are written down in ``folder``."""
    witness = folder / "witness" / "llama-server"
    witness.parent.mkdir(exist_ok=True, parents=True)
    witness.write_text(
        WITNESS.format(
            exact=VARIABLE,
            budget=BUDGET_VARIABLE,
            log=folder / "starts",
            program=stand_in(folder, exact=build),
        )
    )
    witness.chmod(0o755)
    chosen: dict[str, Any] = {
        "model": MTP,
        "server_bin": witness,
        "ctx": 256,
        "state_dir": folder / "state",
        "machine": Machine(host=4096 * GIB),
        "ready_timeout_s": 60,
        "stop_grace_s": 0.5,
        **settings,
    }
    return LaunchConfig(**chosen)


def starts(folder: Path) -> list[tuple[str, str, str]]:
    """Of every start in turn: the variable of the mode, that of the budget, and the arguments
    without the port, which differs by chance."""
    log = folder / "starts"
    lines = log.read_text().splitlines() if log.exists() else []
    seen: list[tuple[str, str, str]] = []
    for line in lines:
        exact, budget, argv = line.split(" ", 2)
        seen.append((exact, budget, re.sub(r"--port \d+", "--port N", argv)))
    return seen


def only(said: list[Command], kind: type[ExactSeen] | type[ReadySeen]) -> Any:
    """The one report of its kind."""
    (report,) = [one for one in said if isinstance(one, kind)]
    return report


async def refused(config: LaunchConfig, words: str, env: dict[str, str]) -> list[Command]:
    """What a launch reports that fails with these words."""
    send, receive = trio.open_memory_channel[Command](100)
    with trio.fail_after(60), pytest.raises(ConfigFault, match=words):
        await launcher.run(config, send, env=env)
    return [command async for command in receive]


FORCED: Final[dict[str, Any]] = {"mode": "proxy", "extra_args": (BUDGET_FLAG, "8192")}


async def test_race_17_in_mode_proxy_the_child_sees_no_budget_wherever_one_was_named(
    tmp_path: Path,
) -> None:
    env = {**os.environ, BUDGET_VARIABLE: "4096"}
    (planned,), said = await launched(config(tmp_path, "known", exact="auto", **FORCED), env)
    ((exact, budget, argv),) = starts(tmp_path)

    assert re.findall(rf"{BUDGET_FLAG}\S*( \S+)?", argv) == [" 0"]
    assert (exact, budget) == ("unset", "0")
    overridden = dict(planned.warnings)["budget-overridden"]
    assert BUDGET_FLAG in overridden
    assert BUDGET_VARIABLE in overridden
    assert not only(said, ReadySeen).parks
    record = only(said, ExactSeen)
    assert (record.mode, record.state) == ("proxy", "unavailable")
    assert "kvalet parks chats itself" in record.reason


async def test_race_17_in_mode_proxy_exact_concurrency_that_must_be_fails_before_any_start(
    tmp_path: Path,
) -> None:
    env = {**os.environ, BUDGET_VARIABLE: "4096"}
    must = config(tmp_path, "known", exact="on", **FORCED)

    assert await refused(must, "kvalet parks chats itself", env) == []
    assert starts(tmp_path) == []


async def test_race_18_after_a_refused_exact_start_the_second_is_as_if_it_was_never_wished(
    tmp_path: Path,
) -> None:
    env = {**os.environ}
    never, tried = tmp_path / "never", tmp_path / "tried"
    _, said_never = await launched(config(never, "refused", exact="off"), env)
    _, said = await launched(config(tried, "refused", exact="auto"), env)
    (untouched,) = starts(never)
    first, second = starts(tried)

    assert (first[0], second[0]) == ("1", "unset")
    assert second == tuple(word.replace(str(never), str(tried)) for word in untouched)
    assert only(said_never, ExactSeen).state == "off"
    record = only(said, ExactSeen)
    assert record.state == "unavailable"
    assert "needs a batch of at least 514 tokens" in record.reason


async def test_race_18_where_exact_concurrency_must_be_the_first_refusal_is_the_answer(
    tmp_path: Path,
) -> None:
    must = config(tmp_path, "refused", exact="on")
    said = await refused(must, "needs a batch of at least 514 tokens", {**os.environ})

    assert len([one for one in said if isinstance(one, LaunchPlanned)]) == 1
    assert [exact for exact, _, _ in starts(tmp_path)] == ["1"]
