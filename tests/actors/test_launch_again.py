"""A server that does not come up as it was planned is started again with less."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvalet.actors import launcher
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.decisions.plan.devices import GIB, Gpu
from kvalet.actors.planner import Machine
from kvalet.protocol.commands import Command, ExitSeen, LaunchPlanned, ReadySeen
from kvalet.protocol.errors import EnvironmentFault
from tests.actors.standin import MTP, launched, stand_in

CARDS: Final = (Gpu(0, 60000, 65536), Gpu(1, 60000, 65536))


def config(folder: Path, program: Path, *extra_args: str, **settings: Any) -> LaunchConfig:
    chosen: dict[str, Any] = {
        "model": MTP,
        "server_bin": program,
        "ctx": 8192,
        "state_dir": folder / "state",
        "machine": Machine(gpus=CARDS, host=256 * GIB),
        "ready_timeout_s": 60,
        "stop_grace_s": 0.5,
        **settings,
    }
    return LaunchConfig(extra_args=extra_args, **chosen)


async def test_lch_50_a_tensor_launch_that_fails_is_tried_once_more_by_layers(
    tmp_path: Path,
) -> None:
    program = stand_in(tmp_path, "tensor")
    asked = ("--split-mode", "tensor", "--spec-type", "draft-mtp")

    tried, said = await launched(config(tmp_path, program, *asked))

    assert len(tried) == 2
    first, second = tried
    assert first.argv[first.argv.index("--split-mode") + 1] == "tensor"
    assert "tensor" not in second.argv
    assert second.argv[-2:] == ("--split-mode", "layer")
    assert "draft-mtp" in second.argv, "drafting that was asked for comes back"
    assert [code for code, _ in second.warnings if code == "layer-split"] == ["layer-split"]
    ready = [one for one in said if isinstance(one, ReadySeen)]
    assert len(ready) == 1
    assert (ready[0].cells, ready[0].generation) == (8192, 1)


async def test_lch_53_a_child_that_fails_with_its_drafter_starts_without_it(
    tmp_path: Path,
) -> None:
    program = stand_in(tmp_path, "draft-mtp", "draft-mtp,ngram-mod")
    asked = ("--spec-type", "draft-mtp,ngram-mod", "--temp", "0.5")

    tried, _ = await launched(config(tmp_path, program, *asked, machine=Machine(host=256 * GIB)))

    assert len(tried) == 2
    assert tried[1].argv[-2:] == ("--spec-type", "ngram-mod")
    assert "0.5" in tried[1].argv
    assert "no-drafter" in dict(tried[1].warnings)


async def test_lch_44_a_model_that_cannot_be_planned_is_launched(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)

    tried, said = await launched(config(tmp_path, stand_in(tmp_path), model=broken, ctx=None))

    assert len(tried) == 1
    assert "no-plan" in dict(tried[0].warnings)
    assert [one.cells for one in said if isinstance(one, ReadySeen)] == [8192]


async def test_what_cannot_be_cured_ends_after_the_last_thing_was_given_up(tmp_path: Path) -> None:
    program = stand_in(tmp_path, "-m")
    send, receive = trio.open_memory_channel[Command](100)

    with pytest.raises(EnvironmentFault, match="unable to allocate"):
        await launcher.run(config(tmp_path, program, "--spec-type", "draft-mtp"), send)

    said = [command async for command in receive]
    tried = [dict(one.warnings) for one in said if isinstance(one, LaunchPlanned)]
    assert len(tried) == 3
    assert tried[2].keys() >= {"own-fitting", "no-drafter"}
    assert [one for one in said if isinstance(one, ExitSeen)] == [said[-1]]
    assert not any(isinstance(one, ReadySeen) for one in said)
