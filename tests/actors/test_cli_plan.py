"""``kvalet plan``: files, flags and memory in; figures, warnings and a command line out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kvalet.actors.cli import run
from kvalet.actors.decisions.plan.explain import report
from kvalet.actors.planner import Machine, plan_launch
from kvalet.protocol.errors import ConfigFault, EnvironmentFault
from tests.decisions.plan.measured import Record, points

Captured = pytest.CaptureFixture[str]

FILES: Final = Path(__file__).parents[1] / "data"
HEADERS: Final = FILES / "gguf_headers"
LLAMA: Final = str(HEADERS / "llama31-8b.gguf")
EVERY: Final = 7
"""One launch in so many goes the whole way here; the rules themselves see all of them."""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_UBATCH", "512")


def planned(captured: Captured, *argv: str) -> dict[str, Any]:
    assert run(["plan", *argv]) == 0
    document: dict[str, Any] = json.loads(captured.readouterr().out)
    return document


def measured() -> Iterator[Record]:
    """Launches on a CPU whose every allocation was logged."""
    for number, point in enumerate(points()):
        record = point.record
        known = (HEADERS / f"{record['model']}.gguf").exists()
        if number % EVERY == 0 and known and record["device"] == "cpu":
            yield record


def bytes_of(part: Mapping[str, int] | None, key: str) -> int:
    """A figure of a part that not every launch has."""
    return part.get(key, 0) if part else 0


def test_a_plan_from_the_file_and_the_flags_is_what_was_allocated() -> None:
    seen = 0
    for record in measured():
        file = HEADERS / f"{record['model']}.gguf"
        if record["status"] != "ok":
            with pytest.raises(ConfigFault):
                plan_launch(file, record["flags"], {}, Machine(), build="b11434")
            continue
        if "draft_model" in record:
            continue
        figures = report(plan_launch(file, record["flags"], {}, Machine(), build="b11434"))
        target, context = record["target"], figures["context"]
        recurrent = bytes_of(target.get("recurrent"), "bytes")
        draft = bytes_of(record.get("draft"), "kv_bytes")
        assert context == {
            "non_swa": target["kv_non_swa_bytes"],
            "swa": target["kv_swa_bytes"],
            "recurrent": recurrent,
            "draft": draft,
            "total": target["kv_bytes"] + recurrent + draft,
        }, record["id"]
        assert figures["n_ctx"] == target["n_ctx"]
        assert figures["n_ctx_slot"] == record["slots"]["n_ctx_slot"]
        seen += 1
    assert seen > 100


def test_one_json_document_says_every_term(capsys: Captured) -> None:
    document = planned(capsys, LLAMA, "--json", "--build", "b11434", "--", "-c", "8192", "-np", "2")

    assert document["arch"] == "llama"
    assert document["context"]["total"] == 1 << 30
    assert document["compute"].keys() == document["weights"].keys() == {"CPU"}
    assert (document["n_ctx"], document["n_ctx_slot"], document["slots"]) == (8192, 4096, 2)
    assert (document["kv_unified"], document["split"]) == (False, "none")
    assert document["certain"] is True
    assert document["argv"][:3] == ["llama-server", "-m", LLAMA]


def test_variables_of_the_environment_count_as_the_server_reads_them(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "4096")
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "f32")
    document = planned(capsys, LLAMA, "--json", "--build", "b11434", "--", "-np", "1")

    assert document["n_ctx"] == 4096
    assert document["context"]["total"] == 3 << 28


def test_without_arguments_it_is_the_plan_of_what_serve_launches(capsys: Captured) -> None:
    gemma = str(HEADERS / "gemma3-4b.gguf")
    document = planned(capsys, gemma, "--json", "--build", "b11434", "--ctx", "4096")
    given = planned(
        capsys, gemma, "--json", "--build", "b11434", "--ctx", "4096", "--serve", "--", "-ub", "64"
    )

    assert document["kv_unified"] is True
    assert "--swa-full" in document["argv"]
    assert (given["kv_unified"], given["n_ubatch"]) == (True, 64)


def test_named_cards_are_planned_for_without_any_being_here(capsys: Captured) -> None:
    document = planned(
        capsys, LLAMA, "--json", "--build", "b11434", "--gpu", "24000:24576", "--gpu", "16000"
    )

    assert document["devices"]["CUDA0"]["budget"] > document["devices"]["CUDA0"]["needed"] > 0
    assert document["max_context"] == document["n_ctx"] > 4096
    assert "-ngl" in document["argv"]


def test_a_table_for_people_names_devices_terms_and_the_command(capsys: Captured) -> None:
    assert run(["plan", LLAMA, "--build", "b11434", "--ctx", "8192"]) == 0
    said = capsys.readouterr().out

    for words in ("keys and values", "1,024.00", "compute buffer", "command: llama-server"):
        assert words in said


def test_what_does_not_fit_says_so(capsys: Captured) -> None:
    document = planned(
        capsys, LLAMA, "--json", "--build", "b11434", "--ctx", "8192", "--gpu", "4000:8192"
    )

    assert document["fits"] is False
    assert "does-not-fit" in {warning["code"] for warning in document["warnings"]}


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ((LLAMA, "--gpu", "lots"), 2, "--gpu wants FREE:TOTAL"),
        ((LLAMA, "--gpu", "9000:8000"), 2, "more free than there is"),
        ((LLAMA, "--gpu", "9000", "--here"), 2, "use one of them"),
        ((LLAMA, "--ctx", "0"), 2, "--ctx"),
        (("/nowhere/m.gguf",), 3, "/nowhere/m.gguf"),
        ((str(FILES / "vram_vectors.json"),), 3, "vram_vectors.json"),
        ((LLAMA, "--", "-fa", "off", "-ctv", "q8_0"), 2, "flash attention"),
        ((LLAMA, "--serve", "--", "--port", "1"), 2, "--port cannot be passed"),
    ],
)
def test_a_wish_that_cannot_be_planned_is_one_clear_line(
    argv: tuple[str, ...], code: int, words: str, capsys: Captured
) -> None:
    assert run(["plan", *argv[:1], "--build", "b11434", *argv[1:]]) == code
    said = capsys.readouterr()

    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1


def test_a_drafter_that_is_named_is_read_too() -> None:
    small = str(HEADERS / "llama32-1b.gguf")
    flags = ["-c", "4096", "-np", "1", "--spec-type", "draft-simple", "-md", small]
    figures = report(plan_launch(Path(LLAMA), flags, {}, Machine(), build="b11434"))

    assert figures["context"]["draft"] == 16 * 4096 * 2 * 8 * 64 * 2


def test_a_projector_that_is_missing_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=r"mm\.gguf"):
        plan_launch(
            Path(LLAMA), ["-c", "512", "--mmproj", "/nowhere/mm.gguf"], {}, Machine(), build="b1"
        )
