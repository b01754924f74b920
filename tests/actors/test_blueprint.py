"""One start as the plan has it: what is pinned, what is inherited, what is said when it fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kvalet.actors.binaries import ServerBinary
from kvalet.actors.blueprint import Blueprint, LaunchConfig, draw
from kvalet.actors.decisions.capabilities import Capabilities, parse_help
from kvalet.actors.decisions.plan.concede import Concession
from kvalet.actors.decisions.plan.devices import GIB, MIB, Gpu, budget_of
from kvalet.actors.decisions.plan.fit import HOST_CTX
from kvalet.actors.planner import Machine

FILES: Final = Path(__file__).resolve().parents[1] / "data"
LLAMA: Final = FILES / "gguf_headers" / "llama31-8b.gguf"
MTP: Final = FILES / "gguf_headers" / "qwen36-27b-mtp.gguf"
KNOWN: Final = parse_help((FILES / "help_b11434.txt").read_text(), "version: 11434 (abc)")
SERVER: Final = ServerBinary(path=Path("/bin/false"), source="test")
SLOTS: Final = Path("/dev/shm/slots")
SECRET: Final[dict[str, Any]] = {"api_key": "k", "config_home": "/c", "library_path": ()}
ONE: Final = (Gpu(0, 23000, 24576),)
TWO: Final = (Gpu(0, 23000, 24576), Gpu(1, 22000, 24576))


def drawn(
    *extra_args: str,
    gpus: tuple[Gpu, ...] = (),
    host: int | None = 64 * GIB,
    env: Mapping[str, str] | None = None,
    known: Capabilities = KNOWN,
    given: tuple[Concession, ...] | None = (),
    **settings: Any,
) -> Blueprint:
    chosen: dict[str, Any] = {"model": LLAMA, "state_dir": Path("/s"), **settings}
    config = LaunchConfig(**chosen, extra_args=extra_args, machine=Machine(gpus=gpus, host=host))
    return draw(config, SERVER, known, env or {}, SLOTS, given or ())


def after(argv: tuple[str, ...], flag: str) -> str:
    """The value of ``flag`` that counts: the last."""
    return argv[len(argv) - argv[::-1].index(flag)]


def test_without_cards_the_pool_is_moderate_and_nothing_is_pinned() -> None:
    blueprint = drawn()
    argv = blueprint.argv(7).argv

    assert blueprint.cells == HOST_CTX == int(after(argv, "-c"))
    assert after(argv, "--port") == "7"
    assert {"-dev", "-fit", "-ngl"}.isdisjoint(argv)
    assert blueprint.argv(7).warnings == ()
    assert "CUDA_DEVICE_ORDER" not in blueprint.child_env({}, **SECRET)


def test_a_context_that_is_named_is_the_pool_rounded_up() -> None:
    assert drawn(ctx=500).cells == 512


def test_lch_42_one_card_that_holds_the_launch_is_filled_whole() -> None:
    blueprint = drawn(gpus=ONE)
    argv = blueprint.argv(7).argv

    assert blueprint.cells > HOST_CTX, "a card computes more than a processor: all that fits"
    assert (after(argv, "-ngl"), after(argv, "-fit"), after(argv, "-dev")) == (
        "all",
        "off",
        "CUDA0",
    )
    assert blueprint.child_env({}, **SECRET)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_part_of_a_card_that_may_be_used_decides_the_pool() -> None:
    pools = [drawn(gpus=ONE, budget=budget_of(part)).cells for part in (0.85, 0.9, 0.95)]

    assert pools == sorted(pools)
    assert pools[0] < pools[-1]


def test_memory_for_parked_chats_comes_off_the_pool_in_host_memory() -> None:
    roomy, parked = (drawn(host=18 * GIB, parking=parking).cells for parking in (0, GIB // 4))

    assert parked < roomy


def test_a_build_that_fits_nothing_itself_is_told_a_number_of_layers() -> None:
    old = Capabilities(flags=KNOWN.flags - {"--fit"}, build=KNOWN.build)
    argv = drawn(gpus=ONE, known=old).argv(7).argv

    assert after(argv, "-ngl") == "999"
    assert "-fit" not in argv


def test_lch_37_no_variable_undoes_a_layer_split() -> None:
    env = {"LLAMA_ARG_SPLIT_MODE": "row", "LLAMA_ARG_TENSOR_SPLIT": "1,9"}
    blueprint = drawn(gpus=TWO, env={"LLAMA_ARG_SPLIT_MODE": "tensor"}, given=("layer-split",))
    child = blueprint.child_env({"LLAMA_ARG_SPLIT_MODE": "tensor"}, **SECRET)

    assert "LLAMA_ARG_SPLIT_MODE" not in child
    assert after(blueprint.argv(7).argv, "--split-mode") == "layer"
    assert drawn(env=env).child_env(env, **SECRET).items() >= env.items(), "no plan, no removal"


def test_lch_38_no_variable_undoes_a_tensor_split() -> None:
    env = {"LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_TENSOR_SPLIT": "1,9"}
    blueprint = drawn("--split-mode", "tensor", gpus=TWO, env=env)

    assert after(blueprint.argv(7).argv, "--split-mode") == "tensor"
    assert env.keys().isdisjoint(blueprint.child_env(env, **SECRET))


def test_a_tensor_split_without_a_second_card_is_launched_by_layers() -> None:
    blueprint = drawn("--split-mode", "tensor", gpus=ONE)

    assert after(blueprint.argv(7).argv, "--split-mode") == "layer"
    assert "tensor-downgraded" in dict(blueprint.argv(7).warnings)


def test_lch_50_after_a_failed_tensor_split_the_layers_are_planned_afresh() -> None:
    asked = ("--split-mode", "tensor", "--spec-type", "draft-mtp", "-ctk", "q8_0", "-ctv", "q8_0")
    cards = (Gpu(0, 60000, 65536), Gpu(1, 60000, 65536))
    first = drawn(*asked, gpus=cards, model=MTP)
    given = first.after("memory")
    assert given == ("layer-split",)
    second = drawn(*asked, gpus=cards, model=MTP, given=given)
    argv = second.argv(7).argv

    assert (first.plan and first.plan.split) == "tensor"
    assert (second.plan and second.plan.split) != "tensor"
    assert after(argv, "--split-mode") == "layer"
    assert (after(argv, "--spec-type"), after(argv, "-ctk")) == ("draft-mtp", "q8_0")
    assert "layer-split" in dict(second.argv(7).warnings)


def test_cards_that_had_too_little_memory_are_left_to_the_servers_own_fitting() -> None:
    given = drawn(gpus=ONE).after("memory")
    assert given == ("own-fitting",)
    blueprint = drawn(gpus=ONE, given=given)

    assert {"-dev", "-fit", "-ngl"}.isdisjoint(blueprint.argv(7).argv)
    assert blueprint.cells == drawn(gpus=ONE).cells
    assert blueprint.after("memory") is None


def test_lch_53_the_drafter_goes_and_everything_else_stays() -> None:
    asked = ("--spec-type", "draft-mtp,ngram-mod", "--temp", "0.5")
    given = drawn(*asked, model=MTP).after("model")
    assert given == ("no-drafter",)
    blueprint = drawn(*asked, model=MTP, given=given)
    argv = blueprint.argv(7).argv

    assert (after(argv, "--spec-type"), after(argv, "--temp")) == ("ngram-mod", "0.5")
    assert blueprint.after("model") is None
    assert blueprint.after("flag") is None


def test_lch_44_what_cannot_be_planned_is_launched_all_the_same(tmp_path: Path) -> None:
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    blueprint = drawn("--temp", "0.5", model=broken, gpus=ONE)
    argv = blueprint.argv(7).argv

    assert blueprint.plan is None
    assert blueprint.cells == HOST_CTX
    assert after(argv, "--temp") == "0.5"
    assert {"-dev", "-fit", "-ngl"}.isdisjoint(argv)
    assert "m.gguf" in dict(blueprint.argv(7).warnings)["no-plan"]
    assert blueprint.after("memory") is None


@pytest.mark.parametrize("kind", ["memory", "model", "silent"])
def test_a_launch_with_nothing_to_give_up_ends(kind: str) -> None:
    assert drawn().after(kind) is None


PARKING: Final = Capabilities(flags=KNOWN.flags | {"--preempt-ram"}, build=KNOWN.build)


def test_lch_06_a_build_that_parks_is_given_a_budget_and_none_of_our_own_ways_to_park() -> None:
    blueprint = drawn(known=PARKING)
    argv = blueprint.argv(7).argv
    assert blueprint.plan is not None
    pool = blueprint.plan.price.context.bytes // MIB

    assert blueprint.parks
    assert int(after(argv, "--preempt-ram")) == 4 * (pool + 64)
    assert {"--slot-save-path", "--swa-full", "--cache-ram"}.isdisjoint(argv)
    assert "--kv-unified" in argv


def test_a_budget_never_asks_for_more_than_half_of_what_the_host_has_left() -> None:
    for host in (18 * GIB, 20 * GIB):
        blueprint = drawn(known=PARKING, host=host, ctx=8192)
        assert blueprint.plan is not None
        left = host - blueprint.plan.price.on("CPU")
        assert int(after(blueprint.argv(7).argv, "--preempt-ram")) == left // 2 // MIB


def test_lch_13_in_mode_proxy_a_build_that_parks_is_told_not_to() -> None:
    env = {"LLAMA_ARG_PREEMPT_RAM": "4096"}
    blueprint = drawn("--preempt-ram", "512", known=PARKING, mode="proxy", env=env)
    argv = blueprint.argv(7).argv

    assert not blueprint.parks
    assert after(argv, "--preempt-ram") == "0"
    assert "--slot-save-path" in argv
    assert blueprint.child_env(env, **SECRET)["LLAMA_ARG_PREEMPT_RAM"] == "0"
    assert "budget-overridden" in dict(blueprint.argv(7).warnings)


def test_lch_05_without_preemption_no_launch_says_anything_of_parking() -> None:
    for known in (KNOWN, PARKING):
        blueprint = drawn(known=known, preempt=False)
        assert not blueprint.parks
        assert {"--preempt-ram", "--slot-save-path"}.isdisjoint(blueprint.argv(7).argv)
        assert "LLAMA_ARG_PREEMPT_RAM" not in blueprint.child_env({}, **SECRET)


def test_a_stock_build_that_shall_park_leaves_it_to_kvalet_and_says_so() -> None:
    blueprint = drawn(mode="server")

    assert not blueprint.parks
    assert "--slot-save-path" in blueprint.argv(7).argv
    assert "server-cannot-park" in dict(blueprint.argv(7).warnings)


def test_lch_07_without_a_plan_a_budget_is_half_of_the_free_memory_or_none(tmp_path: Path) -> None:
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    known = drawn(known=PARKING, model=broken, host=8 * GIB)
    unknown = drawn(known=PARKING, model=broken, host=None)

    assert int(after(known.argv(7).argv, "--preempt-ram")) == 4096
    assert "--preempt-ram" not in unknown.argv(7).argv
    assert not unknown.parks
    assert "no-park-budget" in dict(unknown.argv(7).warnings)
