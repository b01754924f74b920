"""What a build can do is read from its help text."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvalet.actors.decisions.capabilities import Capabilities, parse_help, release_of

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(("name", "per_slot"), [("b10434", False), ("b11434", True)])
def test_both_builds_are_read_whole(name: str, per_slot: bool) -> None:
    caps = parse_help((GOLDEN / f"help_{name}.txt").read_text())

    assert caps.kv_unified
    assert caps.swa_full
    assert caps.slot_save_path
    assert caps.cache_ram
    assert caps.metrics
    assert not caps.preempt_ram
    assert caps.kv_unified_per_slot is per_slot
    assert {"--model", "--ctx-size", "--no-kv-unified", "--no-slots"} <= caps.flags
    assert {"none", "draft-mtp", "ngram-mod"} <= caps.spec_types
    assert len(caps.spec_types) == 11


def test_a_flag_in_a_description_is_no_flag_of_the_build() -> None:
    caps = parse_help("--slots N    like --preempt-ram, but\n             --swa-full too\n")

    assert caps.flags == {"--slots"}


def test_a_parking_build_is_recognised() -> None:
    caps = parse_help("-pr,    --preempt-ram N       MiB for parked chats (env: X)")

    assert caps.preempt_ram


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)\nbuilt with GNU", ""),
        ("version: 0.1.0-dev (build 11434, commit 7e4c0a9)", "b11434"),
        ("ggml_vulkan: none\nversion: 6123 (7e4c0a9)\nbuilt with cc", "b6123"),
        ("version: 1 (unknown)", ""),
        ("", ""),
    ],
)
def test_the_release_is_told_only_when_it_is_one(version: str, build: str) -> None:
    assert release_of(version) == build


def test_the_version_line_is_kept() -> None:
    caps = parse_help("--slots", "note\nversion: 6123 (7e4c0a9)\n")

    assert caps.version == "6123 (7e4c0a9)"
    assert caps.build == "b6123"


def test_no_help_knows_nothing() -> None:
    assert parse_help("") == Capabilities()
