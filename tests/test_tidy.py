"""Rules of taste that a machine can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("actors", "protocol", "sims")

LINES_MAX = 400
LINES_EVER = 600
FUNCTION_LINES_MAX = 70

LONG_MODULES: dict[str, str] = {}
"""Modules between the two limits, each with the reason why it is not split."""

BANNED = {"manager", "handler", "util", "utils", "helper", "helpers"} | {
    *("data", "info", "task", "tasks", "context")
}
# Spelled apart, or this file would break its own rule.
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def shown(path: Path, line: int | None = None) -> str:
    name = path.relative_to(ROOT).as_posix()
    return name if line is None else f"{name}:{line}"


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=shown(path))


def function_lengths(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{shown(path, node.lineno)} {node.name}", node.end_lineno - node.lineno + 1


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


CODE = sources(*ROOMS)
ALL = [ROOT / "conftest.py", *CODE, *sources("tests", "docs")]


def test_no_module_is_longer_than_it_should_be() -> None:
    long = {shown(path): n for path in ALL if (n := line_count(path)) > LINES_MAX}
    assert {name: n for name, n in long.items() if name not in LONG_MODULES} == {}
    assert {name: n for name, n in long.items() if n > LINES_EVER} == {}


def test_every_excused_module_still_needs_its_excuse() -> None:
    assert [name for name in LONG_MODULES if line_count(ROOT / name) <= LINES_MAX] == []
    assert all(LONG_MODULES.values()), "an excuse says why"


def test_no_function_is_longer_than_it_should_be() -> None:
    long = [entry for path in ALL for entry in function_lengths(path)]
    assert [entry for entry in long if entry[1] > FUNCTION_LINES_MAX] == []


def test_only_the_command_line_and_the_sims_print() -> None:
    quiet = [path for path in CODE if not shown(path).startswith(("actors/cli", "sims/"))]
    prints = [
        shown(path, node.lineno)
        for path in quiet
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"print", "pprint", "breakpoint"}
    ]
    assert prints == []


def test_nothing_is_left_for_later_in_a_comment() -> None:
    leftovers = [
        shown(path, number)
        for path in ALL
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if LEFTOVER.search(line)
    ]
    assert leftovers == []


def test_a_decision_names_every_case() -> None:
    """``case _`` would hide from the type checkers that a new event was forgotten."""
    catch_alls = [
        shown(path, node.pattern.lineno)
        for path in sources("actors/decisions")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.match_case)
        and isinstance(node.pattern, ast.MatchAs)
        and node.pattern.pattern is None
    ]
    assert catch_alls == []


def test_no_module_is_named_after_nothing_in_particular() -> None:
    named = [shown(path) for path in ALL if BANNED & set(path.stem.lower().split("_"))]
    assert named == []


@pytest.mark.parametrize("path", CODE, ids=shown)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    if path.name != "__init__.py" or text.strip():
        assert ast.get_docstring(tree(path)), f"{shown(path)} has no docstring"


@pytest.mark.parametrize("name", ["commands", "events"])
def test_every_message_says_what_it_means(name: str) -> None:
    module = tree(ROOT / "protocol" / f"{name}.py")
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 10
    assert [node.name for node in classes if not ast.get_docstring(node)] == []
