"""Exact concurrency: who decides, what excludes it, and what a certificate rests on."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import pytest
from attrs import evolve

from kvalet.actors.decisions.exact import (
    SETTING,
    VARIABLE,
    Evidence,
    Start,
    Verdict,
    contradictions,
    decide_wish,
    exact_variable,
    judge,
    preflight,
    refusal_in,
)
from kvalet.actors.decisions.plan.scrub import LaunchDecision, child_variables

LAUNCH: Final = ("-np", "4", "--kv-unified")
WHOLE: Final = Evidence(
    start=Start(given=True), reported=True, parks=True, need_mib=4352, budget_mib=4352
)


def excluded(*argv: str, **env: str) -> tuple[str, ...]:
    return contradictions((*LAUNCH, *argv), env)


def started(wish: Any = "auto", **change: Any) -> Start:
    chosen: dict[str, Any] = {"parker": "server", "preempt": True, "parks": True, "slots": 4}
    chosen |= {"excluded": (), **change}
    return preflight(wish, **chosen)


def test_lch_14_each_of_the_levels_alone_decides_and_a_higher_one_wins() -> None:
    assert decide_wish({})[0] == "off"
    assert decide_wish({VARIABLE: "1"})[0] == "on"
    assert decide_wish({}, stored="auto")[0] == "auto"
    assert decide_wish({}, request="on")[0] == "on"
    assert decide_wish({SETTING: "auto"})[0] == "auto"
    everything = {SETTING: "off", VARIABLE: "1"}
    assert decide_wish(everything, request="on", stored="on")[0] == "off"
    assert decide_wish({VARIABLE: "1"}, request="off", stored="on")[0] == "off"
    assert decide_wish({VARIABLE: "1"}, stored="off")[0] == "off"


def test_words_are_trimmed_and_what_is_none_of_the_three_is_passed_over() -> None:
    assert decide_wish({SETTING: "  ON "})[0] == "on"
    assert decide_wish({SETTING: "always"}, request="maybe", stored="auto")[0] == "auto"
    for word in ("0", "", " no", "OFF", "false"):
        assert decide_wish({VARIABLE: word})[0] == "off", word
    for word in ("1", "yes", "on", "2"):
        assert decide_wish({VARIABLE: word})[0] == "on", word


def test_lch_15_lch_16_the_variable_reaches_the_child_only_and_off_removes_it() -> None:
    ours = {VARIABLE: "1", "HOME": "/h"}
    given = LaunchDecision(forced=exact_variable(Start(given=True)))
    withheld = LaunchDecision(forced=exact_variable(Start(given=False)))

    assert child_variables({"HOME": "/h"}, given) == {"HOME": "/h", VARIABLE: "1"}
    assert child_variables(ours, given) == ours
    assert child_variables(ours, withheld) == {"HOME": "/h"}
    assert ours == {VARIABLE: "1", "HOME": "/h"}


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("--cache-reuse", "256"), "--cache-reuse"),
        (("--context-shift",), "--context-shift"),
        (("--no-kv-offload",), "--no-kv-offload"),
        (("--flash-attn", "off"), "--flash-attn off"),
        (("-ctk", "q8_0"), "--cache-type-k q8_0"),
        (("--cache-type-v", "q4_0"), "--cache-type-v q4_0"),
        (("--no-kv-unified",), "--no-kv-unified"),
        (("--cpu-moe",), "--cpu-moe"),
        (("-ncmoe", "3"), "--n-cpu-moe"),
        (("-ot", "exps=CPU"), "--override-tensor exps=CPU"),
    ],
)
def test_lch_17_lch_18_lch_20_each_contradiction_is_named(argv: tuple[str, ...], name: str) -> None:
    assert excluded(*argv) == (name,)


def test_lch_19_other_options_count_by_their_last_value() -> None:
    assert excluded() == ()
    assert excluded("--flash-attn", "off", "--flash-attn", "on") == ()
    assert excluded("--flash-attn", "on", "--flash-attn", "off") == ("--flash-attn off",)
    assert excluded("--cache-reuse", "256", "--cache-reuse", "0") == ()
    assert excluded("--context-shift", "--no-context-shift") == ()
    assert excluded("-ctk", "q8_0", "-ctk", "f16") == ()
    assert excluded("--no-kv-unified", "--kv-unified") == ()


def test_lch_18_experts_on_the_cpu_are_not_taken_back_and_zero_of_them_is_nothing() -> None:
    assert excluded("--n-cpu-moe", "4", "--n-cpu-moe", "0") == ("--n-cpu-moe",)
    assert excluded("--n-cpu-moe", "0") == ()
    assert excluded("-ot", "exps=CPU", "-ot", "exps=CUDA0") == ("--override-tensor exps=CPU",)
    assert excluded("-ot", "exps=CUDA0") == ()


def test_lch_24_variables_count_as_the_child_receives_them() -> None:
    env = {"LLAMA_ARG_N_CPU_MOE": "4", "LLAMA_ARG_CACHE_TYPE_K": "q8_0"}
    assert excluded(**env) == ("--cache-type-k q8_0", "--n-cpu-moe")
    scrubbed = child_variables(env, LaunchDecision(forced=dict.fromkeys(env)))
    assert excluded(**scrubbed) == ()
    assert excluded(LLAMA_ARG_CACHE_REUSE="64", LLAMA_ARG_CONTEXT_SHIFT="1") == (
        "--cache-reuse",
        "--context-shift",
    )
    assert excluded("--cache-reuse", "0", LLAMA_ARG_CACHE_REUSE="64") == ()
    assert excluded(LLAMA_ARG_OVERRIDE_TENSOR="x=CPU") == ("--override-tensor x=CPU",)


def test_lch_25_the_mode_is_started_only_where_the_server_parks_and_nothing_excludes_it() -> None:
    assert started() == started("on") == Start(given=True)
    assert started("off") == Start(given=False)
    for change, reason in (
        ({"preempt": False}, "preemption is off"),
        ({"parker": "kvalet"}, "kvalet parks chats itself"),
        ({"parks": False}, "parks nothing"),
        ({"slots": 1}, "one slot"),
        ({"excluded": ("--cpu-moe", "--context-shift")}, "--cpu-moe, --context-shift excludes it"),
    ):
        for wish in ("auto", "on"):
            start = started(wish, **change)
            assert not start.given
            assert reason in start.reason


def test_lch_26_only_a_line_that_names_the_mode_is_a_refusal() -> None:
    line = "E srv  load: exact concurrency: needs a batch of at least 514 tokens"
    assert refusal_in(("llama_model_load: ok", f"  {line}\n")) == line
    assert refusal_in(("LLAMA_EXACT_CONCURRENCY is set, but the backend cannot",))
    assert refusal_in(("error: exact-concurrency is not supported",))
    assert refusal_in(("llama_model_load: error loading model", "it is exact")) == ""
    assert refusal_in(()) == ""


def test_exa_06_the_certificate_needs_everything_and_each_missing_part_is_told() -> None:
    assert judge("auto", WHOLE) == judge("on", WHOLE) == Verdict(state="on")
    assert judge("off", WHOLE) == Verdict(state="off")
    for change, reason in (
        ({"start": started(parks=False)}, "the load is not running with it: this launch parks"),
        ({"refusal": "exact concurrency: no"}, "the server refused the mode: exact concurrency"),
        ({"contradictions": ("--cpu-moe",)}, "--cpu-moe excludes it"),
        ({"reported": None}, "came up without the mode"),
        ({"reported": False}, "came up without the mode"),
        ({"parks": False}, "does not park"),
        ({"need_mib": None}, "is not known"),
        ({"budget_mib": 4351}, "raise it to 4352"),
        ({"free_mib": 4351}, "4351 MiB are free"),
    ):
        verdict = judge("auto", evolve(WHOLE, **change))
        assert verdict.state == "unavailable", change
        assert reason in verdict.reason


def test_lch_22_a_budget_is_enough_from_the_need_on_or_without_a_limit() -> None:
    for budget in (4352, 8192, -1):
        assert judge("on", evolve(WHOLE, budget_mib=budget, free_mib=4352)).state == "on"


def test_lch_27_a_parking_build_is_no_evidence_for_the_mode() -> None:
    for parks, reported in product((True, False), (True, False, None)):
        verdict = judge("on", evolve(WHOLE, parks=parks, reported=reported))
        assert (verdict.state == "on") == (parks and reported is True)


def test_lch_29_a_mode_that_runs_short_is_told_apart_from_one_that_is_not_there() -> None:
    short = judge("auto", evolve(WHOLE, budget_mib=512)).reason
    absent = judge("auto", evolve(WHOLE, reported=False)).reason
    withheld = judge("auto", evolve(WHOLE, start=started(preempt=False))).reason

    assert short.startswith("the mode runs but cannot hold every park")
    assert absent == "the server came up without the mode"
    assert withheld == "the load is not running with it: preemption is off"
    assert "refused" not in short + absent + withheld
