"""Who parks: decided from the build, the mode and every way to name a budget."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from kvalet.actors.decisions.capabilities import Capabilities, parse_help
from kvalet.actors.decisions.parker import (
    BUDGET_FLAG,
    BUDGET_VARIABLE,
    ParkerDecision,
    ParkerWish,
    affordable,
    budgeted,
    decide_parker,
    named_budget,
    parking_need,
    server_parks,
)
from kvalet.actors.decisions.plan.devices import GIB, MIB

STOCK: Final = parse_help(
    (Path(__file__).resolve().parents[1] / "data" / "help_b11434.txt").read_text()
)
ROW: Final = """
--preempt-ram N                         with a unified KV cache, park a slot in host RAM instead
                                        of failing every slot (default: {default})
                                        (env: LLAMA_ARG_PREEMPT_RAM)
--other N                               something else (default: 77)
"""
FIRST: Final = parse_help("--kv-unified  one pool\n" + ROW.format(default="8192, -1 - no limit"))
LAST: Final = parse_help("--kv-unified  one pool\n" + ROW.format(default="0 - disabled"))
BASE: Final = ("-np", "4", "--kv-unified")


def decided(
    *extra_args: str,
    caps: Capabilities = LAST,
    env: dict[str, str] | None = None,
    budget_mib: int | None = 4352,
    **wish: Any,
) -> ParkerDecision:
    chosen: dict[str, Any] = {"slots": 4, **wish}
    decision = decide_parker(ParkerWish(extra_args=extra_args, **chosen), caps, env or {})
    return budgeted(decision, budget_mib)


def spawned(decision: ParkerDecision, env: dict[str, str], caps: Capabilities) -> bool:
    """Whether the server parks once it runs with what was decided."""
    child = {**env, **{name: value for name, value in decision.forced.items() if value}}
    return server_parks((*BASE, *decision.added, *decision.extra_args), child, caps)


def test_the_default_budget_of_a_build_is_read_from_its_own_help() -> None:
    defaults = [caps.preempt_default for caps in (STOCK, FIRST, LAST)]

    assert defaults == [0, 8192, 0]
    assert [caps.preempt_ram for caps in (STOCK, FIRST, LAST)] == [False, True, True]
    assert parse_help("--preempt-ram N  no default\n--x N  (default: 3)\n").preempt_default == 0


def test_lch_11_the_budget_is_read_in_the_servers_own_order() -> None:
    def budget(*argv: str, env: str | None = None) -> int | None:
        found = named_budget(argv, {} if env is None else {BUDGET_VARIABLE: env})
        return None if found is None else found.mib

    assert budget() is None
    assert budget(env="0") == 0
    assert budget("--preempt-ram", "512", env="0") == 512
    assert budget("--preempt-ram", "0", env="512") == 0
    assert budget("--preempt-ram", "1", "--preempt-ram", "2") == 2
    assert budget("--preempt_ram", "7") == 7
    assert budget("--preempt-ram=9") == 9
    assert budget("--preempt-ram", "-1") == -1
    assert budget("--preempt-ram", "much", env="many") is None
    assert budget("--preempt-ram", "5", "--preempt-ram", "much") == 5
    assert budget("--preempt-ram") is None


def test_lch_21_the_budget_holds_a_whole_pool_its_draft_and_a_margin_for_every_slot() -> None:
    assert parking_need(1024 * MIB, 0, 4) == 4 * (1024 + 64)
    assert parking_need(1024 * MIB, 1024 * MIB, 4) == 4 * (2048 + 64)
    assert parking_need(1, 0, 1) == 65


def test_a_budget_that_may_be_short_takes_half_of_the_free_memory_and_never_nothing() -> None:
    assert affordable(4352, 64 * GIB) == 4352
    assert affordable(4352, 4 * GIB) == 2048
    assert affordable(4352, 0) == 1
    assert affordable(4352, None) == 4352


def test_lch_06_a_capable_build_is_handed_the_pausing_with_a_budget() -> None:
    for mode in ("auto", "server"):
        decision = decided("--temp", "0", mode=mode)
        assert decision.parker == "server"
        assert decision.added == (BUDGET_FLAG, "4352")
        assert (decision.extra_args, dict(decision.forced)) == (("--temp", "0"), {})
        assert spawned(decision, {}, LAST)


def test_lch_07_a_pool_that_cannot_be_sized_gets_no_budget_and_never_an_unlimited_one() -> None:
    decision = decided(budget_mib=None)

    assert decision.added == ()
    assert [code for code, _ in decision.warnings] == ["no-park-budget"]
    assert not spawned(decision, {}, LAST), "the build's default is no parking"
    assert spawned(decision, {}, FIRST)


def test_lch_10_a_named_budget_wins_and_a_named_zero_stands_the_server_down() -> None:
    for extra_args, env in (
        (("--preempt-ram", "512"), {}),
        ((), {BUDGET_VARIABLE: "512"}),
        (("--preempt-ram", "512"), {BUDGET_VARIABLE: "0"}),
    ):
        decision = decided(*extra_args, env=env)
        assert (decision.parker, decision.added, decision.extra_args) == ("server", (), extra_args)
    for extra_args, env in (
        (("--preempt-ram", "0"), {}),
        ((), {BUDGET_VARIABLE: "0"}),
        (("--preempt-ram", "0"), {BUDGET_VARIABLE: "512"}),
    ):
        decision = decided(*extra_args, env=env)
        assert (decision.parker, decision.warnings) == ("kvalet", ())
        assert not spawned(decision, env, FIRST)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"caps": STOCK}, "has no --preempt-ram"),
        ({"unified": False}, "do not share one pool"),
        ({"slots": 1}, "one slot"),
        ({"env": {BUDGET_VARIABLE: "0"}}, "LLAMA_ARG_PREEMPT_RAM is 0"),
    ],
)
def test_lch_03_a_server_that_cannot_park_leaves_it_to_kvalet_and_a_forced_mode_says_why(
    wish: dict[str, Any], reason: str
) -> None:
    quiet, forced = decided(**wish), decided(mode="server", **wish)

    assert quiet == ParkerDecision(parker="kvalet", extra_args=())
    assert forced.parker == "kvalet"
    assert [code for code, _ in forced.warnings] == ["server-cannot-park"]
    assert reason in forced.warnings[0][1]


def test_lch_13_a_forced_proxy_zeroes_every_budget_in_place_and_names_what_it_overrode() -> None:
    asked = ("--preempt-ram", "8192", "--temp", "0", "--preempt-ram=4096")
    env = {BUDGET_VARIABLE: "4096"}
    decision = decided(*asked, env=env, mode="proxy", caps=FIRST)

    assert decision.parker == "kvalet"
    assert decision.extra_args == ("--preempt-ram", "0", "--temp", "0", "--preempt-ram=0")
    assert decision.forced == {BUDGET_VARIABLE: "0"}
    assert "--preempt-ram and LLAMA_ARG_PREEMPT_RAM is set to 0" in decision.warnings[0][1]
    assert not spawned(decision, env, FIRST)
    quiet = decided(mode="proxy", caps=FIRST)
    assert (quiet.forced, quiet.warnings) == ({BUDGET_VARIABLE: "0"}, ())
    assert not spawned(quiet, {}, FIRST), "its own default would park"


def test_a_stock_build_is_launched_as_ever_in_every_mode() -> None:
    for mode, preempt in product(("auto", "proxy", "server"), (True, False)):
        decision = decided("--temp", "0", caps=STOCK, mode=mode, preempt=preempt)
        assert (decision.added, decision.extra_args) == ((), ("--temp", "0"))
        assert not decision.forced


def test_lch_05_without_preemption_nothing_is_written_and_a_named_budget_is_the_users() -> None:
    off = decided(preempt=False)
    named = decided("--preempt-ram", "512", preempt=False)
    useless = decided("--preempt-ram", "512", preempt=False, slots=1)

    assert off == ParkerDecision(parker="nobody", extra_args=())
    assert (named.parker, named.extra_args) == ("server", ("--preempt-ram", "512"))
    assert useless.parker == "nobody"


def test_lch_08_a_server_parks_by_what_was_spawned_never_by_what_it_could() -> None:
    budget = (BUDGET_FLAG, "512")
    assert server_parks((*BASE, *budget), {}, LAST)
    assert server_parks(BASE, {BUDGET_VARIABLE: "512"}, LAST)
    assert not server_parks(BASE, {}, LAST)
    assert server_parks(BASE, {}, FIRST)
    assert not server_parks((*BASE, BUDGET_FLAG, "0"), {}, FIRST)
    assert not server_parks((*BASE, *budget, "--no-kv-unified"), {}, LAST)
    assert not server_parks((*BASE, *budget, "-np", "1"), {}, LAST)
    assert not server_parks((*BASE, *budget), {}, STOCK)


def test_pre_01_exactly_one_party_parks_whatever_is_said_and_whoever_says_it() -> None:
    words = ((), ("--preempt-ram", "0"), ("--preempt-ram", "512"), ("--preempt-ram", "-1"))
    variables: tuple[dict[str, str], ...] = ({}, {BUDGET_VARIABLE: "0"}, {BUDGET_VARIABLE: "64"})
    builds = (STOCK, FIRST, LAST)
    for extra, env, caps, mode in product(words, variables, builds, ("auto", "proxy", "server")):
        decision = decided(*extra, env=env, caps=caps, mode=mode)
        assert decision.parker in ("kvalet", "server")
        assert spawned(decision, env, caps) == (decision.parker == "server")
