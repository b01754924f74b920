"""The list of scenarios answers for every one of them, once."""

from __future__ import annotations

import re
from typing import Final

from tests.test_docs import ROOT, TEST_ID

PAGE: Final = ROOT / "docs" / "scenarios.md"
EXPECTED: Final = [
    *(f"S{number}" for number in range(1, 179) if number % 4),
    *(f"R{number}" for number in range(1, 84) if number % 4),
    *(f"R83{letter}" for letter in "abcdefghijk"),
    *(f"R{number}" for number in range(84, 100) if number % 4),
    *(f"P{number}" for number in range(1, 13)),
]
"""All scenarios. A number that four divides was never given to one."""
ROW: Final = re.compile(r"^\| ([SRP]\d+[a-k]?) \| (.+) \| (.+) \|$", re.MULTILINE)
REASONS: Final = ("Not here: ", "Waits: ")


def rows() -> list[tuple[str, str, str]]:
    return ROW.findall(PAGE.read_text())


def test_every_scenario_has_exactly_one_row_in_the_order_of_its_number() -> None:
    assert [name for name, _, _ in rows()] == EXPECTED


def test_every_row_names_a_test_or_says_why_there_is_none() -> None:
    found = rows()
    assert found
    assert [
        x for x, _, shown in found if not (TEST_ID.search(shown) or shown.startswith(REASONS))
    ] == []


def test_every_test_of_the_list_exists() -> None:
    missing: list[str] = []
    for path, function in TEST_ID.findall(PAGE.read_text()):
        module = ROOT / path
        text = module.read_text() if module.exists() else ""
        if not re.search(rf"^(async )?def {function}\(", text, re.MULTILINE):
            missing.append(f"{path}::{function}")
    assert missing == []


def test_every_test_of_these_scenarios_is_in_the_list() -> None:
    told = {function for _, function in TEST_ID.findall(PAGE.read_text())}
    here = [
        name
        for path in sorted((ROOT / "tests" / "scenarios").glob("test_*.py"))
        if path.name != "test_list.py"
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    ]
    assert here
    assert [name for name in here if name not in told] == []
