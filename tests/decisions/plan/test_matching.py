"""When a load that is asked for again is no work at all."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from attrs.exceptions import FrozenInstanceError
from hypothesis import given
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.extras import layer_extras
from kvalet.actors.decisions.plan.flags import resolve_flags
from kvalet.actors.decisions.plan.matching import Loaded, Request, is_same_load
from kvalet.actors.decisions.plan.scrub import LaunchDecision, child_variables

TENSOR_ENV = {"LLAMA_ARG_SPLIT_MODE": "tensor"}
PLAIN = Request(model="m.gguf", cells=4096, slots=2, extra_args=("-ctk", "q4_0", "--jinja"))


def running(request: Request, *, split: Any = "layer") -> Loaded:
    return Loaded(request=request, split=split, generation=1)


def test_the_same_request_leaves_the_server_alone() -> None:
    assert is_same_load(running(PLAIN), PLAIN)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n.gguf"},
        {"cells": 8192},
        {"slots": None},
        {"spec": "mtp"},
        {"cache_type": "q8_0"},
        {"tensor": True},
        {"extra_args": ("-ctk", "q8_0", "--jinja")},
        {"extra_args": ("-ctk", "q4_0", "--no-jinja")},
        {"extra_args": ("-ctk", "q4_0", "--jinja", "--later-flag")},
        {"variables": {"LLAMA_ARG_UBATCH": "64"}},
    ],
)
def test_another_request_is_another_load(change: dict[str, Any]) -> None:
    assert not is_same_load(running(PLAIN), evolve(PLAIN, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"extra_args": ("--cache_type_k", "q4_0", "--jinja")},
        {"extra_args": ("--jinja", "-ctk", "f16", "--cache-type-k", "q4_0")},
        {"extra_args": ("--jinja",), "variables": {"LLAMA_ARG_CACHE_TYPE_K": "q4_0"}},
        {"variables": {"LLAMA_ARG_CACHE_TYPE_K": "f32", "PATH": "/bin", "SOME_API_KEY": "k"}},
        {"variables": {"LLAMA_ARG_SPLIT_MODE": "row"}},
    ],
)
def test_another_way_to_say_the_same_is_the_same_load(change: dict[str, Any]) -> None:
    assert is_same_load(running(PLAIN), evolve(PLAIN, **change))


def test_a_server_that_was_downgraded_answers_the_same_request_again() -> None:
    wanted = evolve(PLAIN, variables=TENSOR_ENV, spec="mtp")

    assert is_same_load(running(wanted, split="layer"), wanted)
    assert is_same_load(
        running(evolve(PLAIN, tensor=True), split="layer"), evolve(wanted, spec="off")
    )


def test_an_inherited_tensor_split_counts_only_against_a_server_that_runs_one() -> None:
    inherited = evolve(PLAIN, variables={**TENSOR_ENV, "LLAMA_ARG_TENSOR_SPLIT": "3,1"})

    assert is_same_load(running(PLAIN, split="layer"), inherited)
    assert is_same_load(running(inherited, split="layer"), PLAIN)
    assert is_same_load(running(inherited, split="tensor"), inherited)
    assert not is_same_load(running(inherited, split="tensor"), PLAIN)


def test_a_split_that_somebody_named_is_compared_as_it_was_named() -> None:
    by_layer = evolve(PLAIN, extra_args=(*PLAIN.extra_args, "-sm", "layer"))
    inherited = evolve(PLAIN, variables=TENSOR_ENV)

    assert is_same_load(running(inherited, split="layer"), by_layer)
    assert not is_same_load(running(inherited, split="tensor"), by_layer)
    assert is_same_load(running(by_layer), PLAIN)
    assert not is_same_load(running(evolve(PLAIN, tensor=True), split="layer"), PLAIN)


def test_a_tensor_split_that_does_not_fit_is_given_up_once_and_for_all() -> None:
    extras = ("--cache-type-k", "q4_0", "--cache-type-v", "f16")
    env = {**TENSOR_ENV, "LLAMA_ARG_TENSOR_SPLIT": "3,1"}
    wanted = Request(model="m.gguf", extra_args=extras, variables=env)
    assert wanted.split == "tensor"

    child = child_variables(env, LaunchDecision(split="layer", extra_args=extras))
    runs = resolve_flags(layer_extras(extras), child).flags

    assert child == {}
    assert (runs.split_mode, runs.type_k, runs.type_v) == (None, "q4_0", "f16")
    assert is_same_load(running(wanted, split="layer"), wanted)


def test_a_snapshot_is_out_of_its_callers_reach_and_holds_no_secret() -> None:
    words, env = ["-c", "1"], {"LLAMA_ARG_UBATCH": "64", "SOME_API_KEY": "k"}
    request = Request(model="m", extra_args=tuple(words), variables=env)
    words.append("-x")
    env["LLAMA_ARG_UBATCH"] = "1"

    assert request == Request(
        model="m", extra_args=("-c", "1"), variables={"LLAMA_ARG_UBATCH": "64"}
    )
    assert "k" not in str(request.variables)
    with pytest.raises(FrozenInstanceError):
        request.model = "n"  # type: ignore[misc]


WORDS = [
    "-c",
    "4096",
    "-sm",
    "tensor",
    "-ctk",
    "q8_0",
    "-odd",
    "--jinja",
    "--spec-type",
    "draft-mtp",
]


@given(
    st.lists(st.sampled_from(WORDS)),
    st.dictionaries(st.sampled_from(["LLAMA_ARG_SPLIT_MODE", "LLAMA_ARG_CTX_SIZE"]), st.text()),
    st.booleans(),
    st.sampled_from(["layer", "tensor"]),
)
def test_a_request_always_matches_itself(
    words: list[str], env: dict[str, str], tensor: bool, split: str
) -> None:
    request = Request(model="m", extra_args=tuple(words), variables=env, tensor=tensor)

    assert is_same_load(running(request, split=split), evolve(request))
