"""The hub as the last one asked about windows: its order, its answers, and how it can fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from kvalet.actors import hub as hub_module
from kvalet.actors.decisions.plan.layers import Hint
from kvalet.actors.hub import BYTES_MAX
from kvalet.actors.windows import CACHE, find_hint
from tests.actors.local_hub import ODD, PERIOD_3, Hub, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as opened:
        yield opened


@pytest.fixture
def env(tmp_path: Path, hub: Hub) -> dict[str, str]:
    return {"KVALET_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "KVALET_OFFLINE": "0"}


def test_repositories_are_asked_in_order_until_one_answers(env: dict[str, str], hub: Hub) -> None:
    hub.tells("second/model", PERIOD_3)
    assert find_hint(ODD, env) == Hint(3, "hub")
    assert hub.paths == ["/first/model", "/second/model"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, b"{}"),
        (404, PERIOD_3),
        (500, PERIOD_3),
        (204, b""),
        (200, b""),
        (200, b"<html>"),
        (200, b"\xff\x00"),
        (200, b"[" * 100_000),
        (200, b"[]"),
        (200, b'{"sliding_window_pattern": "6"}'),
        (200, b'{"sliding_window_pattern": true}'),
        (200, b'{"layer_types": [1, 2]}'),
        (200, b'{"layer_types": ["sliding_attention", "full_attention", "full_attention"]}'),
        (200, PERIOD_3 + b" " * BYTES_MAX),
    ],
)
def test_an_odd_answer_is_none_and_the_next_repository_is_asked(
    status: int, body: bytes, env: dict[str, str], hub: Hub
) -> None:
    hub.tells("first/model", body, status)
    assert find_hint(ODD, env) is None
    assert hub.paths == ["/first/model", "/second/model"]
    assert not (Path(env["KVALET_HOME"]) / CACHE).exists()
    hub.tells("second/model", PERIOD_3)
    assert find_hint(ODD, env) == Hint(3, "hub")


@pytest.mark.parametrize("where", ["http://127.0.0.1:1/", "nowhere:", "http://[", "/first/model"])
def test_a_redirect_to_nowhere_is_no_answer(where: str, env: dict[str, str], hub: Hub) -> None:
    hub.tells("first/model", b"", 307, {"location": where})
    assert find_hint(ODD, env) is None


def test_a_repository_that_moved_is_followed(env: dict[str, str], hub: Hub) -> None:
    there = "/renamed/model/resolve/main/config.json"
    hub.tells("first/model", b"", 307, {"location": there})
    hub.tells("renamed/model", PERIOD_3)
    assert find_hint(ODD, env) == Hint(3, "hub")


def test_a_circle_of_redirects_ends(env: dict[str, str], hub: Hub) -> None:
    hub.tells("first/model", b"", 307, {"location": "/first/model/resolve/main/config.json"})
    assert find_hint(ODD, env) is None
    assert hub.paths.count("/first/model") < 10


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "ftp://127.0.0.1", "http://[", "\x00"])
def test_a_hub_that_cannot_be_reached_is_no_answer(endpoint: str, env: dict[str, str]) -> None:
    assert find_hint(ODD, {**env, "HF_ENDPOINT": endpoint}) is None


def test_a_token_goes_to_the_hub_and_no_further(env: dict[str, str], hub: Hub) -> None:
    with serving() as other:
        other.answers["/elsewhere"] = (200, PERIOD_3, {})
        hub.tells("first/model", b"", 302, {"location": f"{other.url}/elsewhere"})
        assert find_hint(ODD, {**env, "HF_TOKEN": " secret "}) == Hint(3, "hub")
    assert hub.asked[0][1] == "Bearer secret"
    assert other.asked == [("/elsewhere", "")]


def test_without_time_left_no_repository_is_asked(
    env: dict[str, str], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "ALL_S", 0.0)
    hub.tells("first/model", PERIOD_3)
    assert find_hint(ODD, env) is None
    assert hub.asked == []


@pytest.mark.parametrize("token", ["a\nb", "\udcff", "é"])
def test_a_token_that_cannot_be_sent_breaks_nothing(
    token: str, env: dict[str, str], hub: Hub
) -> None:
    hub.tells("first/model", PERIOD_3)
    assert find_hint(ODD, {**env, "HF_TOKEN": token}) in (None, Hint(3, "hub"))


@pytest.mark.parametrize(
    "name", ["../etc", "a/..", "a/b?c", "a/b#c", "a/b/c", "a@b/c", "a/b\n", "a", "é/b", "a/%2e%2e"]
)
def test_a_header_cannot_make_up_an_address(name: str, env: dict[str, str], hub: Hub) -> None:
    assert find_hint(evolve(ODD, repositories=(name,)), env) is None
    assert hub.asked == []


@pytest.mark.parametrize(
    ("ours", "theirs", "asked"),
    [
        ("0", "", True),
        ("no", "0", True),
        ("", "", False),
        ("1", "", False),
        ("true", "0", False),
        ("0", "1", False),
        ("off", "true", False),
    ],
)
def test_no_network_is_asked_unless_it_is_asked_for(
    ours: str, theirs: str, asked: bool, env: dict[str, str], hub: Hub
) -> None:
    hub.tells("first/model", PERIOD_3)
    hint = find_hint(ODD, {**env, "KVALET_OFFLINE": ours, "HF_HUB_OFFLINE": theirs})
    assert (hint is not None, bool(hub.asked)) == (asked, asked)
