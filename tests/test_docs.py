"""The documents say what the code does, and what they tell a reader to type works."""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec
import pytest

import kvalet
from kvalet.actors import cli, front
from kvalet.actors.config import structure
from kvalet.actors.decisions.refusal import refusal
from kvalet.protocol import notices
from kvalet.protocol.events import LeaseRefused
from kvalet.protocol.ids import Cells, RequestId
from kvalet.protocol.openai import fault_body
from kvalet.protocol.sse import SseSplitter

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GROUPS = {
    "docs/requirements.md": {
        "ADM": range(1, 23),
        "PRE": range(1, 24),
        "RLY": range(1, 22),
        "LOG": range(1, 14),
        "NOT": range(1, 18),
        "API": range(1, 13),
        "LCH": range(1, 33),
        "EXA": range(1, 11),
    },
    "docs/requirements-plan.md": {"LCH": range(33, 55), "PLN": range(1, 66)},
}
"""The numbers of each group of requirements, by the page that answers for them."""
SHOWN_BY_TESTS = {
    "docs/requirements.md": ("Met",),
    "docs/requirements-plan.md": (
        "Met",
        "Where the build wins",
        "Rules that are not used everywhere yet",
    ),
}

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
REQUIREMENT = re.compile(r"\b([A-Z]{3})-(\d\d)\b")


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(
            found[2], id=f"{shown(page)}:{page.read_text()[: found.start()].count(chr(10))}"
        )
        for page in PAGES
        for found in BLOCK.finditer(page.read_text())
        if found[1] == language
    ]


def commands() -> list[list[str]]:
    return [
        shlex.split(line.removeprefix("$ "), comments=True)
        for page in PAGES
        for found in BLOCK.finditer(page.read_text())
        if found[1] == "console"
        for line in found[2].replace("\\\n", "").splitlines()
        if line.startswith("$ ")
    ]


def commands_of(program: str) -> list[Any]:
    return [
        pytest.param(words, id=shlex.join(words)) for words in commands() if words[0] == program
    ]


def section(page: str, heading: str) -> str:
    """The text of ``page`` below ``heading``, up to the next heading."""
    _, _, rest = (ROOT / page).read_text().partition(f"\n## {heading}\n")
    assert rest, f"{page} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def string_constants(paths: list[Path], name: str) -> set[str]:
    """The values that the code in ``paths`` passes as keyword ``name``."""
    return {
        keyword.value.value
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == name
        and isinstance(keyword.value, ast.Constant)
        and isinstance(keyword.value.value, str)
    }


def test_the_generated_documents_are_those_that_make_docs_writes() -> None:
    documents: Callable[[], dict[str, str]] = runpy.run_path(str(ROOT / "docs/generate.py"))[
        "documents"
    ]
    stale = [
        line
        for name, text in documents().items()
        for line in difflib.unified_diff(
            (ROOT / name).read_text().splitlines(),
            text.splitlines(),
            name,
            "make docs",
            lineterm="",
        )
    ]
    assert stale == [], "make docs mends this"


def test_the_accuracy_that_is_told_is_the_planners() -> None:
    document: Callable[[], str] = runpy.run_path(str(ROOT / "docs/plan_table.py"))["document"]
    told = (ROOT / "docs/plan-accuracy.md").read_text()
    assert told == document(), "python -m docs.plan_table mends this"


def test_walks_through_the_core_find_the_same_life_again() -> None:
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    walk: Callable[[int], set[tuple[str, str, str]]] = generate["walk"]
    other = set[tuple[str, str, str]]().union(*(walk(seed) for seed in range(1000, 1200)))
    drawn = {f"{old} --> {new}: {kind}" for old, kind, new in other}
    assert drawn == {line.strip() for line in generate["lifecycle"]().splitlines() if "-->" in line}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    lost: list[str] = []
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            lost.append(target)
    assert lost == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        targets = [target.partition("#")[0] for target in LINK.findall(page.read_text())]
        ahead += [(page.parent / name).resolve() for name in targets if name and "://" not in name]
    assert [shown(page) for page in PAGES if page not in seen] == []


def test_only_programs_that_a_test_knows_are_shown() -> None:
    assert {words[0] for words in commands()} <= {"kvalet", "make", "pip", "curl"}


@pytest.mark.parametrize("words", commands_of("kvalet"))
def test_the_command_line_takes_what_is_shown(words: list[str]) -> None:
    command = cli.kvalet.commands[words[1]]
    with click.Context(cli.kvalet) as root, command.make_context(words[1], words[2:], root):
        pass


@pytest.mark.parametrize("words", commands_of("make"))
def test_make_knows_the_targets_that_are_shown(words: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [word for word in words[1:] if "=" not in word and word not in targets] == []


@pytest.mark.parametrize("words", commands_of("pip"))
def test_the_extras_that_are_shown_exist(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert words[1] == "install"
    assert re.findall(r"\[(\w+)\]", words[2])[0] in extras


@pytest.mark.parametrize("words", commands_of("curl"))
def test_the_paths_that_are_shown_are_served(words: list[str]) -> None:
    paths = [urlsplit(word).path for word in words if word.startswith("http://")]
    assert len(paths) == 1
    own = {"/health", "/kvalet/status", "/kvalet/events", "/kvalet/load"}
    assert paths[0] in {*front.SURFACES, *own}
    for body in (words[place + 1] for place, word in enumerate(words) if word == "-d"):
        msgspec.json.decode(body)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_that_is_shown_compiles_and_uses_what_there_is(text: str) -> None:
    tree = ast.parse(text)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "kvalet"
    }
    assert used <= {*kvalet.__all__, "testing"}


@pytest.mark.parametrize("text", blocks("json"))
def test_json_that_is_shown_is_json(text: str) -> None:
    msgspec.json.decode(text)


@pytest.mark.parametrize("text", blocks("toml"))
def test_a_configuration_that_is_shown_is_one(text: str) -> None:
    structure(tomllib.loads(text))


def test_every_comment_that_is_sent_is_described() -> None:
    used = {
        node.attr
        for path in (ROOT / "actors").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and last_name(node.value) == "notices"
    }
    sent = {name: getattr(notices, name) for name in used if name.isupper()}
    assert sent
    told = section("docs/sse-comments.md", "What kvalet sends")
    assert [name for name, raw in sent.items() if f"`{raw.decode().strip()}`" not in told] == []


def test_every_notice_of_the_servers_is_described() -> None:
    told = section("docs/sse-comments.md", "What llama-server sends")
    assert [notice for notice in notices.Notice if f"`: {notice.value}`" not in told] == []


def test_the_stream_that_is_shown_is_one() -> None:
    shown_stream = section("docs/sse-comments.md", "A stream with a park in it")
    found = BLOCK.search(shown_stream)
    assert found is not None
    splitter = SseSplitter()
    events = splitter.feed(found[2].encode())
    assert splitter.at_boundary
    payloads = [event.data for event in events if event.data is not None]
    assert payloads[-1] == b"[DONE]"
    assert [msgspec.json.decode(payload)["id"] for payload in payloads[:-1]] == ["chatcmpl-1"] * 3


def test_every_route_is_described() -> None:
    told = section("docs/http.md", "Endpoints")
    routes = {*front.SURFACES, *front.READ_ONLY_POSTS, *front.PUBLIC}
    assert [route for route in sorted(routes) if route not in told] == []


def test_the_error_that_is_shown_is_what_a_client_gets() -> None:
    found = BLOCK.search(section("docs/http.md", "Errors"))
    assert found is not None
    event = LeaseRefused(
        request=RequestId("r1"), code="prompt_too_large", needed=Cells(9000), limit=Cells(8188)
    )
    assert msgspec.json.decode(found[2]) == msgspec.json.decode(fault_body(refusal(event)))


def test_every_error_code_is_described() -> None:
    modules = [path for room in ("actors", "protocol") for path in (ROOT / room).rglob("*.py")]
    # Those of the embedded scheduler never meet HTTP.
    spoken = [path for path in modules if path.stem not in ("leases", "scheduler")]
    codes = string_constants(spoken, "code") - {""}
    told = section("docs/http.md", "Errors")
    assert [code for code in sorted(codes) if f"`{code}`" not in told] == []


def named_tests() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        yield from TEST_ID.findall(page.read_text())


def test_every_test_that_is_named_exists() -> None:
    missing: list[str] = []
    for name, function in named_tests():
        path = ROOT / name
        if not path.exists() or not re.search(rf"\bdef {function}\(", path.read_text()):
            missing.append(f"{name}::{function}")
    assert missing == []


@pytest.mark.parametrize("page", GROUPS)
def test_every_requirement_is_met_or_comes_later_and_never_both(page: str) -> None:
    rows = re.findall(r"^\| ([A-Z]{3}-\d\d) \|", (ROOT / page).read_text(), re.MULTILINE)
    expected = [f"{group}-{n:02}" for group, numbers in GROUPS[page].items() for n in numbers]
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize(
    ("page", "heading"), [(page, name) for page, names in SHOWN_BY_TESTS.items() for name in names]
)
def test_every_requirement_that_is_met_names_its_test(page: str, heading: str) -> None:
    met = section(page, heading)
    rows = [line for line in met.splitlines() if REQUIREMENT.match(line.removeprefix("| "))]
    assert rows
    assert [line for line in rows if not TEST_ID.search(line)] == []
