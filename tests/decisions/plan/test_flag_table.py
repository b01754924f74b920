"""The table of flags against what two builds say about themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvalet.actors.decisions.plan.extras import GROUPS
from kvalet.actors.decisions.plan.flag_table import FLAG_OF, MEMORY_FLAGS, MEMORY_VARIABLES, Flag
from kvalet.actors.decisions.plan.flag_values import (
    CACHE_TYPES,
    MODEL_TYPES,
    MTP_TYPES,
    NGRAM_TYPES,
)
from kvalet.actors.decisions.plan.flag_words import ONE_VALUE, PRESETS, TWO_VALUES
from kvalet.actors.decisions.plan.quants import BLOCKS

BUILDS = ("b10434", "b11434")
# Of a build that parks by itself; no release has it.
FOREIGN = {"--preempt-ram"}
TEXTS = {
    build: (Path(__file__).parents[2] / "data" / f"help_{build}.txt").read_text()
    for build in BUILDS
}
_HEAD = re.compile(r"^(?P<names>-[\w.-]+(?:,\s+-[\w.-]+)*)(?P<hint>(?: \S+)*)(?:\s{2,}|$)")
_ENV = re.compile(r"^\s+\(env: (\w+)\)")


class Option:
    """One option of a help text."""

    def __init__(self, names: frozenset[str], values: int) -> None:
        self.names = names
        self.values = values
        self.env = ""


def options(text: str) -> list[Option]:
    found: list[Option] = []
    for line in text.splitlines():
        env = _ENV.match(line)
        if env is not None:
            found[-1].env = env[1]
        match = _HEAD.match(line)
        if match is not None and not line.startswith("-----"):
            names = frozenset(re.split(r",\s+", match["names"]))
            hint = match["hint"].split()
            placement = any("<" in word for word in hint)
            found.append(Option(names, 1 if placement else len(hint)))
    return found


OPTIONS = {build: options(text) for build, text in TEXTS.items()}
EVERY = [option for found in OPTIONS.values() for option in found]


@pytest.mark.parametrize("flag", MEMORY_FLAGS, ids=lambda flag: str(flag.names[0]))
def test_a_flag_of_the_table_has_the_spellings_and_the_variable_that_a_build_tells(
    flag: Flag,
) -> None:
    mine = frozenset((*flag.names, *flag.off))
    theirs = [option for option in EVERY if option.names & mine]

    assert theirs, "no build knows it"
    for option in theirs:
        assert option.names == mine
        assert option.env == flag.env
        assert option.values == (1 if flag.read is not None else 0)


def test_every_option_of_both_builds_is_known_to_take_as_many_words_as_it_does() -> None:
    for option in EVERY:
        for name in option.names:
            flag = FLAG_OF.get(name)
            mine = (
                2
                if name in TWO_VALUES
                else int(flag.read is not None if flag else name in ONE_VALUE)
            )
            assert mine == option.values, name


def test_no_word_of_the_lists_is_invented() -> None:
    known = {name for option in EVERY for name in option.names}

    assert (ONE_VALUE | TWO_VALUES | PRESETS) - known == FOREIGN
    assert frozenset[str]().union(*GROUPS.values()) <= known


def test_the_presets_are_all_that_pick_a_model() -> None:
    told = {
        name
        for option in EVERY
        for name in option.names
        if name.endswith(("-default", "-spec")) and name != "--spec-default"
    }

    assert told == PRESETS


def test_cache_types_are_the_ones_that_both_builds_allow() -> None:
    for text in TEXTS.values():
        allowed = re.findall(r"allowed values: (.+)", text)
        assert allowed
        assert all(set(line.split(", ")) == set(CACHE_TYPES) for line in allowed)
    assert set(CACHE_TYPES) == set(BLOCKS)
    sizes = [BLOCKS[kind][1] / BLOCKS[kind][0] for kind in CACHE_TYPES]
    assert sizes == sorted(sizes, reverse=True)


def test_speculative_types_are_the_ones_that_both_builds_allow() -> None:
    ours = (MTP_TYPES | MODEL_TYPES | NGRAM_TYPES | {"none"}) - {"mtp"}
    for text in TEXTS.values():
        told = re.search(r"^--spec-type (\S+)", text, re.MULTILINE)
        assert told is not None
        assert set(told[1].split(",")) == ours


def test_a_flag_with_two_sides_has_a_variable_for_each() -> None:
    assert {"LLAMA_ARG_KV_UNIFIED", "LLAMA_ARG_NO_KV_UNIFIED"} <= MEMORY_VARIABLES
    assert "LLAMA_ARG_NO_SWA_FULL" not in MEMORY_VARIABLES
