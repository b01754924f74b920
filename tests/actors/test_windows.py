"""Who is asked about a model's windows, in which order, and what may go wrong at it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from attrs import evolve
from gguf import GGUFWriter

from kvalet.actors import windows as windows_module
from kvalet.actors.decisions.plan.explain import report
from kvalet.actors.decisions.plan.layers import Hint
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.windows import with_answer
from kvalet.actors.planner import Machine, plan_launch
from kvalet.actors.windows import CACHE, find_hint
from tests.actors.local_hub import ODD, PERIOD_3, Hub, serving

Site = Callable[..., Path]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as opened:
        yield opened


@pytest.fixture
def env(tmp_path: Path, hub: Hub) -> dict[str, str]:
    return {
        "KVALET_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": hub.url,
        "KVALET_OFFLINE": "0",
    }


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Installs packages, one module each, that only this test can import."""
    packages = tmp_path / "site"

    def install(**modules: str) -> Path:
        for name, source in modules.items():
            (packages / name).mkdir(parents=True, exist_ok=True)
            (packages / name / "__init__.py").write_text(source)
        monkeypatch.setattr(sys, "path", [str(packages), *sys.path])
        invalidate_caches()
        return packages

    return install


def cached(env: Mapping[str, str]) -> Path:
    return Path(env["KVALET_HOME"]) / CACHE


WORKING: Final = """
class Text:
    layer_types = ["sliding_attention", "full_attention"] * 4
class Config:
    text_config = Text()
CONFIG_MAPPING = {"new_comer": Config}
"""
RAISING: Final = """
class Config:
    def __init__(self, size, sliding_window_pattern: int = 3):
        raise RuntimeError
CONFIG_MAPPING = {"new-comer": Config}
"""
RAISING_TEXT: Final = """
class Text:
    def __init__(self, **kwargs):
        self._sliding_window_pattern = kwargs.get("sliding_window_pattern", 3)
class Config:
    sub_configs = {"text_config": Text}
    def __init__(self):
        raise RuntimeError
CONFIG_MAPPING = {"new-comer": Config}
"""
RAISING_NAMED_TEXT: Final = """
class Text:
    sliding_window_pattern: int | None = 3
class Config:
    def __init__(self):
        raise RuntimeError
CONFIG_MAPPING = {"new_comer": Config, "new_comer_text": Text}
"""


@pytest.mark.parametrize(
    ("source", "pattern"),
    [(WORKING, 2), (RAISING, 3), (RAISING_TEXT, 3), (RAISING_NAMED_TEXT, 3)],
)
def test_an_installed_library_is_asked_and_its_source_read_where_it_fails(
    source: str, pattern: int, site: Site, env: dict[str, str], hub: Hub
) -> None:
    site(transformers=source)
    assert find_hint(ODD, env) == Hint(pattern, "transformers")
    assert hub.asked == []


@pytest.mark.parametrize(
    "source",
    [
        "",
        "raise ImportError('half of it is missing')",
        "raise SystemExit(0)",
        "import os; os._exit(3)",
        "CONFIG_MAPPING = None",
        "CONFIG_MAPPING = {'someone': object}",
        "CONFIG_MAPPING = {'new-comer': None}",
        "CONFIG_MAPPING = {'new-comer': object}",
        "CONFIG_MAPPING = {'new-comer': lambda: {'sliding_window_pattern': 'LLLG'}}",
        "def __getattr__(name): raise KeyError(name)",
        "syntax error",
    ],
)
def test_a_library_that_cannot_answer_fails_nothing_and_the_hub_is_next(
    source: str, site: Site, env: dict[str, str], hub: Hub
) -> None:
    site(transformers=source)
    hub.tells("first/model", PERIOD_3)
    assert find_hint(ODD, env) == Hint(3, "hub")


def test_what_a_library_imports_and_prints_stays_outside_of_this_process(
    site: Site, env: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    site(transformers="print('null'); import chatty\n" + WORKING, chatty="print('{')")
    assert find_hint(ODD, env) == Hint(2, "transformers")
    assert "chatty" not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_a_stub_that_somebody_imported_before_does_not_silence_the_library(
    site: Site, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site(transformers="from wire import Client\n" + WORKING, wire="class Client: ...")
    monkeypatch.setitem(sys.modules, "wire", ModuleType("wire"))
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    assert find_hint(ODD, env) == Hint(2, "transformers")


@pytest.mark.parametrize("program", ["", "/opt/host-application"])
def test_a_host_that_is_no_interpreter_is_not_started_again(
    program: str, site: Site, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site(transformers=WORKING)
    monkeypatch.setattr(sys, "executable", program)
    assert find_hint(ODD, env) is None


def test_offline_an_installed_library_still_answers(site: Site, env: dict[str, str]) -> None:
    site(transformers=WORKING)
    assert find_hint(ODD, {**env, "KVALET_OFFLINE": "1"}) == Hint(2, "transformers")


@pytest.mark.parametrize("tier", ["transformers", "hub"])
def test_the_next_load_is_served_from_disk_without_import_or_network(
    tier: str, site: Site, env: dict[str, str], hub: Hub, tmp_path: Path
) -> None:
    mark = tmp_path / "imported"
    poison = f"open({str(mark)!r}, 'w').close()\n"
    if tier == "transformers":
        site(transformers=WORKING)
    else:
        hub.tells("first/model", PERIOD_3)
    first = find_hint(ODD, env)
    site(transformers=poison + WORKING)
    hub.asked.clear()
    again = find_hint(ODD, env)
    assert first is not None
    assert (first.tier, again) == (tier, Hint(first.pattern, "cache"))
    assert not mark.exists()
    assert hub.asked == []


def test_a_mask_is_served_from_disk_as_it_was(env: dict[str, str], hub: Hub) -> None:
    s, f = '"sliding_attention"', '"full_attention"'
    hub.tells("first/model", f'{{"layer_types": [{s}, {f}, {f}, {s}, {s}, {s}]}}'.encode())
    mask = (True, False, False, True, True, True)
    assert find_hint(ODD, env) == Hint(mask, "hub")
    assert find_hint(ODD, env) == Hint(mask, "cache")


def test_a_model_of_another_depth_or_origin_is_asked_about_anew(
    env: dict[str, str], hub: Hub
) -> None:
    hub.tells("first/model", PERIOD_3)
    hub.tells("other/model", b'{"sliding_window_pattern": 2}')
    assert find_hint(ODD, env) == Hint(3, "hub")
    assert find_hint(evolve(ODD, repositories=("other/model",)), env) == Hint(2, "hub")
    assert find_hint(evolve(ODD, layers=12), env) == Hint(3, "hub")
    assert find_hint(ODD, env) == Hint(3, "cache"), "one answer does not drive out another"


def test_the_file_is_replaced_whole_and_is_its_owners_alone(env: dict[str, str], hub: Hub) -> None:
    hub.tells("first/model", PERIOD_3)
    find_hint(ODD, env)
    found = cached(env)
    assert stat.S_IMODE(found.stat().st_mode) == 0o600
    assert [path.name for path in found.parent.iterdir()] == [CACHE]


@pytest.mark.parametrize("content", [b"", b"garbage", b'{"new-comer 6": "x"}', b"\xff" * 64])
def test_an_unreadable_file_counts_as_empty_and_is_mended(
    content: bytes, env: dict[str, str], hub: Hub
) -> None:
    cached(env).parent.mkdir()
    cached(env).write_bytes(content)
    hub.tells("first/model", PERIOD_3)
    assert find_hint(ODD, env) == Hint(3, "hub")
    assert find_hint(ODD, env) == Hint(3, "cache")


def test_a_pipe_in_the_place_of_the_file_holds_nothing_up(env: dict[str, str], hub: Hub) -> None:
    cached(env).parent.mkdir()
    os.mkfifo(cached(env))
    hub.tells("first/model", PERIOD_3)
    assert find_hint(ODD, env) == Hint(3, "hub")


def test_an_answer_that_cannot_be_kept_is_given_all_the_same(
    env: dict[str, str], hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    hub.tells("first/model", PERIOD_3)
    lost = {**env, "KVALET_HOME": str(tmp_path / "file" / "home")}
    assert find_hint(ODD, lost) == Hint(3, "hub")
    assert find_hint(ODD, lost) == Hint(3, "hub")
    cached(env).mkdir(parents=True)
    assert find_hint(ODD, env) == Hint(3, "hub")
    assert [path.name for path in cached(env).parent.iterdir()] == [CACHE], "nothing is left over"


@pytest.mark.parametrize(
    "known",
    [
        evolve(ODD, arch="gemma3"),
        evolve(ODD, arch="llama"),
        evolve(ODD, swa_pattern=3),
        evolve(ODD, window=None),
        evolve(ODD, layers=0),
    ],
    ids=["table", "ignored", "header", "no-window", "no-layers"],
)
def test_nobody_is_asked_about_a_model_that_explains_itself(
    known: ModelShape, site: Site, env: dict[str, str], hub: Hub, tmp_path: Path
) -> None:
    mark = tmp_path / "imported"
    site(transformers=f"open({str(mark)!r}, 'w').close()\n")
    assert find_hint(known, env) is None
    assert not mark.exists()
    assert hub.asked == []
    assert not cached(env).exists()


def model_file(path: Path) -> Path:
    writer = GGUFWriter(path, "new-comer")
    writer.add_block_count(6)
    writer.add_context_length(32768)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_vocab_size(1000)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_sliding_window(512)
    writer.add_source_url("https://host.example/first/model")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_plan_follows_the_answer_and_says_whose_it_is(
    env: dict[str, str], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    file = model_file(tmp_path / "model.gguf")

    def planned() -> dict[str, Any]:
        return report(plan_launch(file, ["-c", "8192", "-np", "1"], {}, Machine(), build="b11434"))

    guessed = planned()
    hub.tells("first/model", b'{"sliding_window_pattern": 3}')
    told, recalled = planned(), planned()
    tiers = [figures["swa_tier"] for figures in (guessed, told, recalled)]
    assert tiers == ["estimate", "hub", "cache"]
    cell = 2 * 64 * 2
    assert guessed["context"]["non_swa"] == 1 * 8192 * cell
    assert told["context"]["non_swa"] == 2 * 8192 * cell
    assert told["context"] == recalled["context"]
    cached(env).write_bytes(with_answer({}, "new-comer 6 first/model", 2))
    assert planned()["context"]["non_swa"] == 3 * 8192 * cell


def test_without_a_home_directory_nothing_is_kept_and_nothing_fails(
    env: dict[str, str], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(windows_module, "default_state_dir", homeless)
    hub.tells("first/model", PERIOD_3)
    del env["KVALET_HOME"]

    assert find_hint(ODD, env) == Hint(3, "hub")
    assert find_hint(ODD, env) == Hint(3, "hub")
    assert len(hub.asked) == 2
