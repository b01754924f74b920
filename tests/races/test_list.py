"""The list of races has a row for each, and says truly what shows it or what it waits for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.test_docs import ROOT, TEST_ID

PAGE: Final = ROOT / "docs" / "races.md"
RACES: Final = range(1, 26)
ROW: Final = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
WAITS: Final = "waits for "
OWN: Final = re.compile(r"^(?:async )?def (test_race_(\d\d)_\w+)\(", re.MULTILINE)


def rows() -> dict[int, str]:
    """What the page says of how each race is shown."""
    found = [(int(number), shown) for number, _, shown in ROW.findall(PAGE.read_text())]
    assert [number for number, _ in found] == list(RACES)
    return dict(found)


def own_tests() -> dict[str, int]:
    """The tests of this directory that name a race."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py"))]
    return {name: int(number) for text in texts for name, number in OWN.findall(text)}


def test_every_race_is_told_in_words_of_its_own() -> None:
    told = [words for _, words, _ in ROW.findall(PAGE.read_text())]
    assert len(set(told)) == len(RACES)
    assert all(len(words.split()) >= 10 for words in told)


@pytest.mark.parametrize("race", RACES)
def test_every_race_is_shown_by_tests_that_exist_or_waits_for_something(race: int) -> None:
    shown = rows()[race]
    tests = TEST_ID.findall(shown)
    assert bool(tests) != shown.startswith(WAITS), "one of both"
    for path, name in tests:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name


@pytest.mark.parametrize("race", RACES)
def test_every_test_of_a_race_stands_in_its_row_alone(race: int) -> None:
    mine = {name for name, number in own_tests().items() if number == race}
    named = {name for _, name in TEST_ID.findall(rows()[race])}
    assert {name for name in named if name.startswith("test_race_")} == mine
