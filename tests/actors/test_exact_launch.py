"""Exact concurrency at a launch: given, refused, ignored, certified or withheld."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio

from kvalet.actors import launcher
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.decisions.exact import VARIABLE
from kvalet.actors.decisions.plan.devices import GIB
from kvalet.actors.planner import Machine
from kvalet.protocol.commands import Command, ExactSeen, LaunchPlanned, ReadySeen
from kvalet.protocol.errors import ConfigFault
from tests.actors.standin import MTP, launched, stand_in


def config(folder: Path, build: str, **settings: Any) -> LaunchConfig:
    chosen: dict[str, Any] = {
        "model": MTP,
        "server_bin": stand_in(folder, exact=build),
        "ctx": 256,
        "state_dir": folder / "state",
        "machine": Machine(host=4096 * GIB),
        "ready_timeout_s": 60,
        "stop_grace_s": 0.5,
        "exact": "auto",
        **settings,
    }
    return LaunchConfig(**chosen)


def armed(said: list[Command]) -> ExactSeen:
    """The one record of how the launch came up."""
    (record,) = [one for one in said if isinstance(one, ExactSeen)]
    return record


async def failed(config: LaunchConfig, words: str) -> list[Command]:
    send, receive = trio.open_memory_channel[Command](100)
    with trio.fail_after(60), pytest.raises(ConfigFault, match=words):
        await launcher.run(config, send)
    return [command async for command in receive]


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with more free memory than any park needs."""
    monkeypatch.setattr(launcher, "read_memory_available", lambda: 4096 * GIB)


async def test_lch_27_a_server_that_says_so_is_certified(tmp_path: Path, roomy: None) -> None:
    for wish in ("auto", "on"):
        tried, said = await launched(config(tmp_path, "known", exact=wish))
        record = armed(said)
        assert (record.mode, record.state, record.reason) == ("server", "on", "")
        assert "--preempt-ram" in tried[0].argv
        (ready,) = [one for one in said if isinstance(one, ReadySeen)]
        assert (ready.parks, ready.notices, ready.headroom) == (True, True, 0)


async def test_lch_27_a_build_that_ignores_the_variable_is_not(tmp_path: Path) -> None:
    _, said = await launched(config(tmp_path, "ignored"))
    record = armed(said)
    assert (record.mode, record.state) == ("server", "unavailable")
    assert record.reason == "the server came up without the mode"

    said = await failed(config(tmp_path, "ignored", exact="on"), "came up without the mode")
    assert armed(said).state == "unavailable"


async def test_lch_26_a_refusal_is_relaunched_once_without_and_under_on_it_is_the_answer(
    tmp_path: Path,
) -> None:
    tried, said = await launched(config(tmp_path, "refused"))
    assert len(tried) == 2
    assert "no-exact" in dict(tried[1].warnings)
    record = armed(said)
    assert record.state == "unavailable"
    assert "needs a batch of at least 514 tokens" in record.reason

    said = await failed(config(tmp_path, "refused", exact="on"), "at least 514 tokens")
    assert len([one for one in said if isinstance(one, LaunchPlanned)]) == 1


async def test_lch_25_what_is_withheld_says_why_and_fails_only_where_it_must_be(
    tmp_path: Path,
) -> None:
    for settings, reason in (
        ({"mode": "proxy"}, "kvalet parks chats itself"),
        ({"preempt": False}, "preemption is off"),
        ({"extra_args": ("--context-shift",)}, "--context-shift excludes it"),
        ({"extra_args": ("--preempt-ram", "0")}, "kvalet parks chats itself"),
    ):
        _, said = await launched(config(tmp_path, "known", **settings))
        record = armed(said)
        assert record.state == "unavailable"
        assert record.reason.startswith("the load is not running with it: ")
        assert reason in record.reason
        assert await failed(config(tmp_path, "known", exact="on", **settings), reason) == []


async def test_lch_22_a_budget_that_is_short_is_told_with_the_figure_to_raise_it_to(
    tmp_path: Path, roomy: None
) -> None:
    short: dict[str, Any] = {"extra_args": ("--preempt-ram", "64")}
    _, said = await launched(config(tmp_path, "known", **short))
    record = armed(said)
    assert record.state == "unavailable"
    assert record.reason.startswith("the mode runs but cannot hold every park")
    assert "--preempt-ram is 64 MiB, raise it to" in record.reason

    await failed(config(tmp_path, "known", exact="on", **short), "raise it to")


async def test_lch_15_an_explicit_off_removes_an_inherited_variable(tmp_path: Path) -> None:
    env = {**os.environ, VARIABLE: "1"}
    _, said = await launched(config(tmp_path, "refused", exact="off"), env)
    assert armed(said).state == "off"


async def test_lch_04_every_launch_leaves_one_record_of_who_parks(tmp_path: Path) -> None:
    for settings, mode in (
        ({}, "server"),
        ({"mode": "proxy"}, "proxy"),
        ({"preempt": False}, "off"),
    ):
        _, said = await launched(config(tmp_path, "known", exact="off", **settings))
        assert (armed(said).mode, armed(said).state) == (mode, "off")
