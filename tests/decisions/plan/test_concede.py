"""What a launch gives up when its server does not come up, and what stays."""

from __future__ import annotations

import pytest

from kvalet.actors.decisions.plan.concede import (
    CURABLE,
    TOLD,
    Concession,
    conceded,
    next_concession,
)
from kvalet.actors.decisions.plan.flags import resolve_flags
from kvalet.actors.decisions.plan.server_flags import ServerFlags

DRAFTING = ("--spec-type", "draft-mtp")
PLAIN = ServerFlags()


def flags(*argv: str, **env: str) -> ServerFlags:
    return resolve_flags(argv, env).flags


def given_up(*argv: str, kind: str, split: str = "layer", pinned: bool = False) -> list[Concession]:
    """All that is given up, one after another, by a server that never comes up."""
    given: list[Concession] = []
    while True:
        now = flags(*conceded(argv, {}, given, known=()).extra_args)
        tensor = split == "tensor" and "layer-split" not in given
        more = next_concession(
            given,
            kind=kind,
            split="tensor" if tensor else "layer",
            pinned=pinned and "own-fitting" not in given,
            flags=now,
        )
        if more is None:
            return given
        given.append(more)


def test_lch_50_a_tensor_split_goes_first_and_the_drafter_last() -> None:
    argv = ("-sm", "tensor", *DRAFTING)

    order = given_up(*argv, kind="memory", split="tensor", pinned=True)

    assert order == ["layer-split", "own-fitting", "no-drafter"]
    assert {*order, "no-exact", "smaller-context"} == TOLD.keys()


def test_lch_53_a_drafter_is_given_up_once_whatever_the_end_was_but_a_wrong_flag() -> None:
    for kind in sorted(CURABLE):
        assert given_up(*DRAFTING, kind=kind) == ["no-drafter"], kind
        assert given_up("--model-draft", "/d.gguf", kind=kind) == ["no-drafter"], kind
    for kind in ("flag", "port", "clean"):
        assert given_up(*DRAFTING, "-sm", "tensor", kind=kind, split="tensor", pinned=True) == []


def test_pinned_cards_are_given_up_for_want_of_memory_only() -> None:
    assert given_up(kind="memory", pinned=True) == ["own-fitting"]
    assert given_up(kind="model", pinned=True) == []


@pytest.mark.parametrize("types", ["ngram-simple", "none"])
def test_drafting_that_needs_no_model_is_no_drafter(types: str) -> None:
    assert given_up("--spec-type", types, kind="memory") == []
    assert next_concession((), kind="memory", split="layer", pinned=False, flags=PLAIN) is None


def test_without_its_drafter_a_launch_keeps_all_else_that_was_asked() -> None:
    asked = ("--temp", "0", "--spec-type", "draft-mtp,ngram-simple", "-md", "/d.gguf", "-fa", "on")

    wish = conceded(asked, {}, ["no-drafter"], known={"--spec-default"})

    assert wish.extra_args == ("--temp", "0", "-fa", "on", "--spec-type", "ngram-simple")
    assert wish.forced["LLAMA_ARG_SPEC_TYPE"] is None
    assert all(value is None for value in wish.forced.values())


def test_a_build_that_drafts_by_default_is_told_so_only_where_it_knows_the_flag() -> None:
    env = {"LLAMA_ARG_SPEC_TYPE": "draft-mtp", "LLAMA_ARG_SPEC_DRAFT_MODEL": "/d.gguf"}

    knows = conceded((), env, ["no-drafter"], known={"--spec-default"})
    older = conceded((), env, ["no-drafter"], known=())

    assert (knows.extra_args, older.extra_args) == (("--spec-default",), ())
    assert env.keys() <= knows.forced.keys()


def test_nothing_given_up_changes_nothing() -> None:
    asked = ("-sm", "tensor", *DRAFTING, "-c", "9")

    wish = conceded(asked, {"LLAMA_ARG_SPEC_TYPE": "draft-mtp"}, (), known=())

    assert (wish.extra_args, dict(wish.forced)) == (asked, {})


def test_a_split_that_is_given_up_is_named_so_that_no_variable_brings_it_back() -> None:
    env = {"LLAMA_ARG_SPLIT_MODE": "tensor"}

    wish = conceded(("--split-mode", "tensor", "-ngl", "99"), env, ["layer-split"], known=())

    assert flags(*wish.extra_args, **env).split_mode == "layer"
    assert "-ngl" in wish.extra_args
