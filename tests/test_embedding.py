"""The examples, each run as a host would run it: in a process and a directory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

import kvalet.testing
from kvalet.actors import launcher
from kvalet.actors.binaries import find_model
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.server import Server
from kvalet.protocol.commands import Command

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
PATIENCE_S = 60
REAL_PATIENCE_S = 240


def host_environment(**more: str) -> dict[str, str]:
    """This environment less what a checkout or a running kvalet may have put there."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PYTHON", "KVALET", "PYTEST"))
    }
    return kept | more


def run(*argv: str | Path, cwd: Path, **environ: str) -> str:
    """What a host's program prints; it must end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-P", *argv],
        cwd=cwd,
        env=host_environment(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def scripts() -> Iterator[Path]:
    return (path for path in EXAMPLES.rglob("*.py") if path.name != "__init__.py")


def test_every_example_is_run_by_a_test_of_this_module() -> None:
    here = Path(__file__).read_text()
    entries = [path for path in scripts() if path.parent.name != "protocol"]
    assert len(entries) == 4
    assert [path.name for path in entries if path.name not in here] == []


def test_the_hosts_workers_share_a_pool_that_is_too_small(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    said = run(EXAMPLES / "embed_scheduler.py", "--journal", journal, cwd=tmp_path)
    assert "6 of 6 finished" in said
    recording = kvalet.testing.assert_replays(journal)
    assert recording.fold().totals.parks > 0
    assert recording.fold().leases == {}


def test_the_hosts_test_of_an_incident_passes(tmp_path: Path) -> None:
    for name in ("test_incident.py", "incident.jsonl"):
        shutil.copy(EXAMPLES / name, tmp_path)
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_incident.py", cwd=tmp_path)
    assert "5 passed" in said


def test_the_recorded_incident_names_no_place_on_a_disk() -> None:
    header = kvalet.testing.load_journal(EXAMPLES / "incident.jsonl").header
    assert header.config["journal"] == "incident.jsonl"


def test_a_host_with_a_protocol_package_of_its_own(tmp_path: Path) -> None:
    app = EXAMPLES / "host_app"
    said = run(app / "main.py", tmp_path / "journal.jsonl", cwd=tmp_path, PYTHONPATH=str(app))
    assert "a poem: 16 words more" in said
    assert "a letter: 30 words more" in said
    assert "a novel: the prompt needs 4001 cells, but the pool can lend 254" in said


@pytest.mark.real
async def test_a_host_serves_a_llama_server_that_it_is_attached_to(tmp_path: Path) -> None:
    config = LaunchConfig(
        model=find_model(None, demo=True),
        ctx=512,
        parallel=2,
        state_dir=tmp_path / "server",
        ready_timeout_s=120,
    )
    reports, heard = trio.open_memory_channel[Command](100)
    async with heard, trio.open_nursery() as nursery:
        server: Server = await nursery.start(launcher.run, config, reports)
        argv = (EXAMPLES / "embed_serve.py", "--attach", server.url, "--tokens", "8")
        with trio.fail_after(REAL_PATIENCE_S):
            done = await trio.run_process(
                [sys.executable, "-P", *argv, "--state-dir", tmp_path / "host"],
                cwd=tmp_path,
                env=host_environment(KVALET_UPSTREAM_KEY=server.api_key),
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
        nursery.cancel_scope.cancel()
    said = done.stdout.decode()
    assert done.returncode == 0, said + done.stderr.decode()
    questions = ("Name a river. ", "Name a mountain. ", "Name a city by the sea. ")
    assert [line for line in questions if f"\n{line}" not in said] == []
    recording = kvalet.testing.assert_replays(tmp_path / "host" / "journal.jsonl")
    assert recording.fold().totals.finished == 3
