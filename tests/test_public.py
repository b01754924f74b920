"""What ``import kvalet`` and ``kvalet.testing`` show, and what they cost."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import trio

import kvalet
import kvalet.testing
from kvalet.protocol.ids import RequestId

PUBLIC = [
    "ClientFault",
    "Config",
    "ConfigFault",
    "Ended",
    "EnvironmentFault",
    "Extended",
    "Handle",
    "JournalFault",
    "KvaletError",
    "Lease",
    "Parking",
    "Resumed",
    "SchedulerConfig",
    "SchedulerHandle",
    "ServerFault",
    "__version__",
    "load_config",
    "run_scheduler",
    "serve",
]

IMPORT_S = 0.3

LOADED = """
import json, logging, sys, time
began = time.perf_counter()
import kvalet
spent = time.perf_counter() - began
first = sorted(sys.modules)
from kvalet import *
import kvalet.testing
import structlog
print(json.dumps({
    "spent_s": spent,
    "at_first": first,
    "configured": structlog.is_configured() or bool(logging.getLogger().handlers),
}))
"""


def test_the_public_names_are_these() -> None:
    assert kvalet.__all__ == PUBLIC
    assert kvalet.testing.__all__ == [
        *("AuditReport", "House", "Recording", "assert_replays", "load_journal")
    ]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    shown = getattr(kvalet, name)
    assert name in dir(kvalet)
    assert name == "__version__" or (shown.__doc__ and shown.__name__ == name)


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match="srve"):
        getattr(kvalet, "srve")  # noqa: B009


def test_the_version_is_the_distributions() -> None:
    assert kvalet.__version__ == version("kvalet")


def test_an_import_is_cheap_and_configures_nothing() -> None:
    out = subprocess.run(
        [sys.executable, "-P", "-c", LOADED], capture_output=True, check=True, text=True
    )
    seen = json.loads(out.stdout)
    assert seen["spent_s"] < IMPORT_S
    assert not {"gguf", "httpx", "numpy", "rich", "structlog", "trio"} & set(seen["at_first"])
    assert not seen["configured"]


def test_load_config_ranks_its_sources_like_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "kvalet.toml"
    file.write_text("port = 1\nctx = 2\nparallel = 3\n")
    environ = {"KVALET_CTX": "20", "KVALET_PARALLEL": "30"}
    config = kvalet.load_config(file, environ, parallel=300)
    assert (config.port, config.ctx, config.parallel) == (1, 20, 300)
    assert kvalet.load_config(environ={"KVALET_CONFIG": str(file)}).ctx == 2
    assert kvalet.load_config(environ={}) == kvalet.Config()


def test_load_config_names_every_problem() -> None:
    with pytest.raises(kvalet.ConfigFault) as caught:
        kvalet.load_config(environ={}, port="many", ctx="few")
    assert len(caught.value.problems) == 2
    with pytest.raises(kvalet.ConfigFault, match="prot"):
        kvalet.load_config(environ={}, prot=1)


@pytest.fixture
async def journal(tmp_path: Path, nursery: trio.Nursery) -> Path:
    """A recording of two leases; r2 can never fit."""
    path = tmp_path / "journal.jsonl"
    config = kvalet.SchedulerConfig(cells=64, slots=2, journal=path)
    handle: kvalet.SchedulerHandle = await nursery.start(kvalet.run_scheduler, config)
    async with handle.lease(prompt=10, cap=5) as lease:
        with pytest.raises(kvalet.ClientFault):
            async with handle.lease(prompt=100):
                pass
        lease.finish(5)
    return path


async def test_a_recording_shows_its_events_by_kind_and_by_request(journal: Path) -> None:
    recording = kvalet.testing.load_journal(journal)
    assert recording.header.config["cells"] == 64
    assert recording.fold().totals.finished == 1
    (refused,) = recording.events("lease.refused")
    assert refused == recording.events(request="r2")[-1]
    assert recording.events("lease.granted", RequestId("r2")) == []
    assert len(recording.events("lease.granted", "r1")) == 1
    with pytest.raises(ValueError, match=r"lease\.grantd"):
        recording.events("lease.grantd")


async def test_a_recording_can_be_stopped_at_any_decision(journal: Path) -> None:
    recording = kvalet.testing.load_journal(journal)
    houses = [house for _, house in recording.steps()]
    for decision, house in zip(recording.decisions, houses, strict=True):
        assert recording.house_at(decision.seq) == house
    assert recording.house_at(0) == kvalet.testing.House()
    assert recording.fold() == houses[-1]
    with pytest.raises(IndexError, match="decisions 1 to"):
        recording.house_at(len(houses) + 1)


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


async def test_a_recording_that_is_decided_differently_shows_both_sides(journal: Path) -> None:
    assert kvalet.testing.assert_replays(journal).audit().identical
    rewrite(journal, '"code":"prompt_too_large"', '"code":"queue_full"')
    with pytest.raises(AssertionError, match=r"recorded: .*queue_full[^$]*decided: .*too_large"):
        kvalet.testing.assert_replays(journal)


def test_a_missing_recording_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(kvalet.JournalFault, match="nowhere"):
        kvalet.testing.load_journal(tmp_path / "nowhere.jsonl")
