"""What a server inherits, which drafting it gets, and which types a budget is made at."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvalet.actors.decisions.launch import child_environment
from kvalet.actors.decisions.plan.extras import (
    SELECTORS,
    budget_cache_type,
    heavier,
    inherited,
    layer_extras,
    quantised_cache,
    split_mode_of,
    tensor_extras,
    without,
    without_drafting,
)
from kvalet.actors.decisions.plan.flag_values import CACHE_TYPES
from kvalet.actors.decisions.plan.flags import resolve_flags
from kvalet.actors.decisions.plan.scrub import (
    LaunchDecision,
    child_variables,
    overriding_variables,
    removed_variables,
)
from kvalet.actors.decisions.plan.server_flags import Split
from kvalet.actors.decisions.plan.speculation import (
    Drafter,
    SpecMode,
    drafter_of,
    effective_spec_types,
    emits_draft_model,
    emits_mtp,
    spec_flags,
)

STOCK = frozenset({"none", "draft-mtp", "draft-simple", "ngram-mod"})


def variables(**env: str) -> dict[str, str]:
    return {f"LLAMA_ARG_{name}": word for name, word in env.items()}


def test_secrets_and_our_own_settings_stay_here_while_a_hub_token_goes_along() -> None:
    env = {
        **{"KVALET_PORT": "1", "OPENAI_API_KEY": "k", "AWS_SECRET_ACCESS_KEY": "k"},
        **{"DB_PASSWORD": "k", "HF_TOKEN": "t", "PATH": "/bin", "LLAMA_ARG_API_PREFIX": "/x"},
        "KVALET_SIM_BUILD": "G4",
    }

    assert child_variables(env) == {"HF_TOKEN": "t", "PATH": "/bin", "KVALET_SIM_BUILD": "G4"}
    assert overriding_variables(env) == ("LLAMA_ARG_API_PREFIX",)


@pytest.mark.parametrize(
    ("split", "env", "removed"),
    [
        ("layer", {"SPLIT_MODE": "tensor", "TENSOR_SPLIT": "3,1"}, ("SPLIT_MODE", "TENSOR_SPLIT")),
        ("layer", {"SPLIT_MODE": "row"}, ("SPLIT_MODE",)),
        ("layer", {"SPLIT_MODE": "layer", "TENSOR_SPLIT": "3,1"}, ()),
        ("layer", {"TENSOR_SPLIT": "3,1", "CACHE_TYPE_K": "q8_0"}, ()),
        ("tensor", {"SPLIT_MODE": "tensor", "TENSOR_SPLIT": "3,1"}, ("TENSOR_SPLIT",)),
        ("tensor", {"CACHE_TYPE_K": "q8_0", "CACHE_TYPE_V": "f16"}, ("CACHE_TYPE_K",)),
        ("tensor", {"CACHE_TYPE_K": "f32", "CACHE_TYPE_V": "bf16"}, ()),
        (None, {"SPLIT_MODE": "tensor", "TENSOR_SPLIT": "3,1", "CACHE_TYPE_K": "q8_0"}, ()),
    ],
)
def test_a_variable_cannot_undo_the_split_that_was_decided(
    split: Split | None, env: Mapping[str, str], removed: tuple[str, ...]
) -> None:
    names = tuple(f"LLAMA_ARG_{name}" for name in removed)

    assert removed_variables(variables(**env), LaunchDecision(split=split)) == names


@pytest.mark.parametrize("mode", ["default", "ngram", "mtp", "mtp+ngram"])
def test_chosen_drafting_is_the_only_one_that_runs(mode: SpecMode) -> None:
    env = variables(SPEC_TYPE="draft-simple", SPEC_DRAFT_MODEL="old.gguf", CTX_SIZE="7")
    child = child_variables(env, LaunchDecision(spec=mode))
    argv = spec_flags(mode, known_types=STOCK)

    assert child == variables(CTX_SIZE="7")
    assert not emits_draft_model(resolve_flags(argv, child).flags)
    assert emits_mtp(resolve_flags(argv, child).flags) == mode.startswith("mtp")


def test_drafting_left_to_the_server_or_the_user_keeps_its_variables() -> None:
    env = variables(SPEC_TYPE="draft-mtp", SPEC_DRAFT_MODEL="d.gguf")
    own = ("--spec-type", "ngram-mod")

    assert removed_variables(env, LaunchDecision(spec="off")) == ()
    assert removed_variables(env, LaunchDecision(spec="mtp", extra_args=own)) == ()
    assert spec_flags("off", known_types=STOCK) == ()
    assert spec_flags("mtp", own, known_types=STOCK) == ()
    assert spec_flags("mtp", ("--spec-default",), known_types=STOCK) == ()


def test_a_drafter_named_by_a_flag_is_not_looked_for_in_an_inherited_repository() -> None:
    env = variables(SPEC_DRAFT_HF_REPO="a/b", HFD_REPO="a/b", SPEC_TYPE="draft-simple")
    decision = LaunchDecision(extra_args=("-md", "d.gguf"))

    assert child_variables(env, decision) == variables(SPEC_TYPE="draft-simple")


@pytest.mark.parametrize(
    ("mode", "types", "possible", "argv"),
    [
        ("default", STOCK, True, ("--spec-default",)),
        ("ngram", frozenset[str](), False, ("--spec-type", "ngram-mod")),
        ("mtp", STOCK, True, ("--spec-type", "draft-mtp")),
        ("mtp", {"mtp"}, True, ("--spec-type", "mtp")),
        ("mtp", STOCK, False, ("--spec-default",)),
        ("mtp", frozenset[str](), True, ("--spec-default",)),
        ("mtp+ngram", STOCK, True, ("--spec-type", "draft-mtp,ngram-mod")),
        ("mtp+ngram", STOCK, False, ("--spec-type", "ngram-mod")),
    ],
)
def test_every_mode_but_off_is_spelled_out(
    mode: SpecMode, types: frozenset[str], possible: bool, argv: tuple[str, ...]
) -> None:
    assert spec_flags(mode, known_types=types, mtp_possible=possible) == argv


def test_other_rules_have_the_last_word_on_a_variable() -> None:
    forced = {"LLAMA_ARG_PREEMPT_RAM": "0", "LLAMA_EXACT_CONCURRENCY": None}
    env = {"LLAMA_EXACT_CONCURRENCY": "1", "LLAMA_ARG_PREEMPT_RAM": "9", "A": "b"}
    decision = LaunchDecision(forced=forced)

    assert child_variables(env, decision) == {"LLAMA_ARG_PREEMPT_RAM": "0", "A": "b"}
    child = child_environment(
        env, api_key="k", config_home="/none", library_path=(), decision=decision
    )
    assert child["LLAMA_ARG_PREEMPT_RAM"] == "0"
    assert "LLAMA_EXACT_CONCURRENCY" not in child


def test_a_cache_type_of_the_environment_is_left_to_reach_the_server_as_it_is() -> None:
    env = variables(CACHE_TYPE_K="f32", CACHE_TYPE_V="f16")
    child = child_variables(env, LaunchDecision(split="layer", spec="mtp"))

    assert resolve_flags((), child).flags.type_k == "f32"
    assert resolve_flags((), child).flags.type_v == "f16"


def test_types_add_up_unless_the_old_rule_is_asked_for() -> None:
    argv = ("--spec-type", "draft-mtp", "--spec-type", "ngram-mod")
    env = variables(SPEC_TYPE="draft-simple")

    assert effective_spec_types(argv, env) == ("draft-simple", "draft-mtp", "ngram-mod")
    assert effective_spec_types(argv, env, accumulate=False) == ("ngram-mod",)
    assert effective_spec_types(("--spec-default",), env, accumulate=False) == ("ngram-mod",)
    assert effective_spec_types((), env, accumulate=False) == ("draft-simple",)


@given(st.lists(st.sampled_from(["--spec-type", "--spec-default", "draft-mtp", "mtp", "x,y"])))
def test_the_short_answer_about_types_is_the_resolvers(argv: list[str]) -> None:
    env = variables(SPEC_TYPE="ngram-cache")

    assert effective_spec_types(argv, env) == resolve_flags(argv, env).flags.spec_types


@pytest.mark.parametrize(
    ("argv", "env", "ours", "drafter"),
    [
        ((), {}, None, None),
        ((), {}, "o.gguf", Drafter(path="o.gguf")),
        ((), {"SPEC_DRAFT_MODEL": "e.gguf"}, None, Drafter(path="e.gguf")),
        ((), {"SPEC_DRAFT_MODEL": "e.gguf"}, "o.gguf", Drafter(path="o.gguf")),
        (("-md", "u.gguf"), {"SPEC_DRAFT_MODEL": "e.gguf"}, "o.gguf", Drafter(path="u.gguf")),
        (("-md", "u.gguf"), {"SPEC_DRAFT_HF_REPO": "a/b"}, None, Drafter(path="u.gguf")),
        (("-hfrd", "a/b"), {"SPEC_DRAFT_MODEL": "e.gguf"}, "o.gguf", Drafter(hub="a/b")),
        (("-hfd", "a/b", "-md", "f"), {}, None, Drafter(path="f", hub="a/b")),
        (("--spec-type", "draft-mtp"), {}, "o.gguf", None),
        (("-md", "u", "-ngld", "0"), {}, None, Drafter(path="u", on_gpu=False)),
        (("-md", "u", "-ngld", "0", "-ngld", "-1"), {}, None, Drafter(path="u")),
        (("-md", "u", "-devd", "none"), {}, None, Drafter(path="u", on_gpu=False)),
        (("-md", "u", "-devd", "CPU"), {}, None, Drafter(path="u", on_gpu=False)),
        (("-md", "u"), {"N_GPU_LAYERS_DRAFT": "0"}, None, Drafter(path="u", on_gpu=False)),
    ],
)
def test_the_drafter_that_is_sized_is_the_one_that_loads(
    argv: tuple[str, ...], env: Mapping[str, str], ours: str | None, drafter: Drafter | None
) -> None:
    found = drafter_of(resolve_flags(argv, variables(**env)), ours=ours)

    assert found == drafter
    assert found is None or found.sizeable == (found.hub is None)


@pytest.mark.parametrize(
    ("argv", "env", "tensor", "mode"),
    [
        ("", "", False, "layer"),
        ("", "", True, "tensor"),
        ("", "tensor", False, "tensor"),
        ("", "row", False, "layer"),
        ("", "layer", True, "tensor"),
        ("-sm layer", "tensor", True, "layer"),
        ("--split-mode tensor", "layer", False, "tensor"),
        ("-sm row -sm none", "tensor", False, "none"),
    ],
)
def test_one_place_decides_whether_a_model_is_split_by_tensor(
    argv: str, env: str, tensor: bool, mode: Split
) -> None:
    asked = resolve_flags(argv.split(), variables(SPLIT_MODE=env) if env else {})

    assert split_mode_of(asked, tensor=tensor) == mode


@pytest.mark.parametrize(
    ("argv", "env", "setting", "kind"),
    [
        ("", ("f32", "f16"), None, "f32"),
        ("", ("q4_0", "f32"), None, "f32"),
        ("", ("q4_0", "q4_0"), None, "f16"),
        ("", ("bogus", "q8_0"), None, "f16"),
        ("", ("f32", "f32"), "q8_0", "q8_0"),
        ("-ctk f32 -ctv f16", ("f16", "f16"), None, "f32"),
        ("-ctv f16 -ctk f32", ("f16", "f16"), None, "f32"),
        ("-ctk q4_0 -ctv q8_0", ("f32", "f32"), None, "q8_0"),
        ("-ctk q4_0", ("f32", "f32"), "q8_0", "q8_0"),
        ("-ctk q4_0", ("f32", "f32"), None, "f16"),
    ],
)
def test_one_type_for_both_axes_is_never_the_lighter_one(
    argv: str, env: tuple[str, str], setting: str | None, kind: str
) -> None:
    asked = resolve_flags(argv.split(), variables(CACHE_TYPE_K=env[0], CACHE_TYPE_V=env[1]))

    assert budget_cache_type(asked, setting=setting) == kind


@given(st.sampled_from(CACHE_TYPES), st.sampled_from(CACHE_TYPES))
def test_the_heavier_type_does_not_depend_on_the_order(first: str, second: str) -> None:
    same_size = {"f16", "bf16"}, {"q4_0", "iq4_nl"}
    if {first, second} not in same_size:
        assert heavier(first, second) == heavier(second, first)


def test_a_plain_axis_does_not_hide_a_quantised_one() -> None:
    assert quantised_cache(("-ctk", "f16", "-ctv", "q4_0"))
    assert quantised_cache(("-ctk", "f16"), setting="q8_0")
    assert not quantised_cache(("-ctk", "f32", "-ctv", "bf16"), setting="q8_0")


def test_a_tensor_attempt_that_is_given_up_gets_the_users_arguments_back() -> None:
    extras = ("--jinja", "-ctk", "q4_0", "--cache-type-v", "f16", "-sm", "tensor", "-ts", "3,1")

    assert tensor_extras(extras) == ("--jinja",)
    assert layer_extras(extras) == (
        *("--jinja", "-ctk", "q4_0", "--cache-type-v", "f16", "-ts", "3,1"),
    )
    assert tensor_extras(("-ctk", "f32", "-ts", "1,1")) == ("-ctk", "f32")


@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_a_new_choice_of_drafting_drops_every_way_to_name_a_drafter(selector: str) -> None:
    extras = (selector, "old", "--spec-type", "draft-simple", "--draft-p-min", "0.5")
    tuned = ("-ctkd", "q8_0", "-ngld", "0", "--device-draft", "none", "-t", "4")

    assert without_drafting((*tuned[:4], *extras, *tuned[4:])) == tuned


def test_the_next_launch_keeps_what_it_does_not_decide_itself() -> None:
    extras = (
        *("-c", "4096", "--jinja", "-ctk", "q8_0", "-sm", "row", "-ts", "1,1", "-hfd", "a/b"),
        *("-ub", "64", "-ngl", "3", "-ngld", "0", "-x", "word"),
    )

    assert inherited(extras) == ("-ub", "64", "-ngl", "3", "-ngld", "0", "-x", "word")
    assert inherited(extras, strip=("batch", "offload")) == without(extras, ("-ub", "-ngl"))
    assert inherited(extras, strip=()) == extras
