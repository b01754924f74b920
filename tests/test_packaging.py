"""What an installed kvalet brings along, and what it leaves to its host."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("actors", "protocol", "sims")

HOST_PROGRAM = """
import protocol
import kvalet
import kvalet.actors.decisions
import kvalet.protocol.events

assert protocol.OWNER == "host", protocol
assert "site-packages" in kvalet.__file__, kvalet.__file__
assert "site-packages" in kvalet.protocol.events.__file__, kvalet.protocol.events.__file__
"""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kvalet's wheel, built from a copy: setuptools leaves its scraps beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"),
        *("--no-build-isolation", "--wheel-dir", target, source),
        cwd=target,
    )
    (built,) = target.glob("kvalet-*.whl")
    return built


def run(*argv: str | Path, cwd: Path) -> None:
    """Runs ``argv`` as a host would: in a directory and an environment of its own."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def packages_on_disk() -> set[str]:
    """The tree's packages under the names that Python shall see."""
    found = {"kvalet"}
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            if init.parent != ROOT / "actors" / "public":
                found.add(".".join(("kvalet", *init.parent.relative_to(ROOT).parts)))
    return found


def test_the_list_of_packages_is_the_tree() -> None:
    assert set(project()["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_no_module_lies_in_a_directory_that_is_no_package() -> None:
    modules = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert [path for path in modules if not (path.parent / "__init__.py").exists()] == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_rooms_cannot_be_imported_under_their_bare_names(room: str) -> None:
    assert importlib.util.find_spec(room) is None


def test_the_wheel_puts_one_name_into_site_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = project()["project"]["version"]
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kvalet", f"kvalet-{version}.dist-info"}
    assert "kvalet/py.typed" in names
    assert f"kvalet-{version}.dist-info/licenses/LICENSE" in names


def test_the_wheel_holds_every_module_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".py"))
    sources = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    expected = [f"kvalet/{path}".replace("kvalet/actors/public/", "kvalet/") for path in sources]
    assert names == sorted(expected)


def test_a_host_keeps_its_own_package_called_protocol(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", wheel),
        cwd=tmp_path,
    )
    # The dependencies are borrowed from this environment; a .pth file named in another one is
    # not read, so the editable kvalet stays behind.
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    host = tmp_path / "host"
    (host / "protocol").mkdir(parents=True)
    (host / "protocol" / "__init__.py").write_text('OWNER = "host"\n')
    (host / "main.py").write_text(HOST_PROGRAM)
    run(python, "main.py", cwd=host)
