"""What the doctor finds on a machine."""

from __future__ import annotations

import socket
from pathlib import Path

from kvalet.actors.doctor import Checkup, Finding, examine, park_room
from kvalet.actors.facts_host import read_memory_available

HELP = "echo '--kv-unified, --no-kv-unified  x'; echo '--slot-save-path PATH  x'"


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def look(checkup: Checkup, path: str = "") -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(checkup, {"PATH": path})}


def test_a_machine_in_order_needs_no_mending(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF" * 4)
    found = look(
        Checkup(
            server_bin=program(tmp_path / "server", HELP + "; echo 'version: 6123 (abc)'"),
            model=model,
            state_dir=tmp_path / "new" / "state",
            port=free_port(),
        )
    )

    assert [*found] == [
        *("binary", "capabilities", "cpu kernels", "model", "port", "state directory"),
        *("room for parked chats", "memory", "gpu"),
    ]
    certain = [name for name in found if name != "room for parked chats"]
    assert {name: found[name].verdict for name in certain} == dict.fromkeys(certain, "ok")
    assert "b6123" in found["capabilities"].message
    assert "none found" in found["gpu"].message
    assert not (tmp_path / "new").exists()


def test_every_fault_comes_with_its_mend(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = look(
            Checkup(
                server_bin=tmp_path / "missing",
                model=tmp_path / "file",
                state_dir=tmp_path / "file" / "state",
                port=taken.getsockname()[1],
            )
        )

    for name in ("binary", "model", "port", "state directory"):
        assert found[name].verdict == "bad"
        assert found[name].mend
    assert "capabilities" not in found


def test_a_server_that_does_not_run_is_found_out(tmp_path: Path) -> None:
    server = program(tmp_path / "server", "echo 'cannot open libx.so'; exit 127")
    found = look(Checkup(server_bin=server, state_dir=tmp_path, port=free_port()))

    assert found["capabilities"].verdict == "bad"
    assert "libx.so" in found["capabilities"].message


def test_a_server_too_old_to_share_its_cells_is_found_out(tmp_path: Path) -> None:
    server = program(tmp_path / "server", "echo '--slots   x'")
    found = look(Checkup(server_bin=server, state_dir=tmp_path, port=free_port()))

    assert found["capabilities"].verdict == "bad"


def test_a_server_that_cannot_save_slots_is_worth_a_warning(tmp_path: Path) -> None:
    server = program(tmp_path / "server", "echo '--kv-unified   x'")
    found = look(Checkup(server_bin=server, state_dir=tmp_path, port=free_port()))

    assert found["capabilities"].verdict == "warn"
    assert found["model"].verdict == "warn"


def test_little_room_for_parked_chats_is_worth_a_warning(tmp_path: Path) -> None:
    assert park_room(tmp_path, bytes_min=0).verdict == "ok"
    assert park_room(tmp_path, bytes_min=2**62).verdict == "warn"


def test_cards_are_listed_with_their_free_memory(tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", "echo 'Some Card, 1000, 2000'")
    found = look(Checkup(state_dir=tmp_path, port=free_port()), path=str(tmp_path))

    assert found["gpu"].message == "Some Card, 1000 of 2000 MiB free"


def test_this_machine_tells_its_memory() -> None:
    available = read_memory_available()

    assert available is None or available > 0
