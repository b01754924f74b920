"""The command line of a launch, and the meaning of its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from kvalet.actors.decisions.capabilities import Capabilities, parse_help
from kvalet.actors.decisions.launch import (
    LaunchRequest,
    build_argv,
    child_environment,
    classify_exit,
    redacted,
    round_cells,
)
from kvalet.protocol.errors import ConfigFault, EnvironmentFault

GOLDEN = Path(__file__).parents[1] / "golden"
STOCK = parse_help((GOLDEN / "help_b10434.txt").read_text())
PLAN = LaunchRequest(
    program="/bin/llama-server",
    model="m.gguf",
    port=4021,
    cells=2000,
    slots=4,
    slot_directory="/dev/shm/k/slots",
)


def failures() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    case = ""
    for line in (GOLDEN / "startup_failures_b10434.txt").read_text().splitlines():
        if line.startswith("## "):
            case = line[3:].partition(":")[0]
            found[case] = []
        else:
            found[case].append(line)
    return found


def test_a_launch_shares_one_pool_and_keeps_slots_in_its_own_directory() -> None:
    launch = build_argv(PLAN, STOCK)

    assert launch.argv == (
        *("/bin/llama-server", "-m", "m.gguf", "--host", "127.0.0.1", "--port", "4021"),
        *("-c", "2048", "-np", "4", "--kv-unified"),
        *("--cache-ram", "0", "--slot-save-path", "/dev/shm/k/slots", "--swa-full"),
        *("--slots", "--metrics", "-lv", "4"),
    )
    assert launch.warnings == ()


def test_a_launch_without_preemption_is_a_stock_one() -> None:
    launch = build_argv(evolve(PLAN, preempt=False), STOCK)

    assert not {"--cache-ram", "--slot-save-path", "--swa-full"} & {*launch.argv}
    assert "--kv-unified" in launch.argv


def test_a_flag_that_the_build_lacks_is_not_passed_but_named() -> None:
    launch = build_argv(PLAN, Capabilities(flags=frozenset({"--kv-unified", "--slots"})))

    assert [code for code, _ in launch.warnings] == ["no-slot-save", "no-swa-full"]
    assert not {"--cache-ram", "--slot-save-path", "--swa-full", "--metrics"} & {*launch.argv}


def test_a_build_without_a_shared_pool_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match="kv-unified"):
        build_argv(PLAN, Capabilities())


def test_the_users_own_arguments_come_last() -> None:
    launch = build_argv(evolve(PLAN, extra_args=("-lv", "4", "-b", "64")), STOCK)

    assert launch.argv[-4:] == ("-lv", "4", "-b", "64")


@pytest.mark.parametrize(
    "argument",
    [
        *("--host", "--port", "--port=1", "--api-key", "--api_key", "--api-key-file"),
        *("--no-kv-unified", "-no-kvu", "-np", "--parallel", "-c", "--ctx-size", "--ctx_size"),
        *("--no-slots", "--sleep-idle-seconds", "-m", "--slot-save-path", "--api-prefix"),
    ],
)
def test_an_argument_that_would_break_the_launch_is_refused(argument: str) -> None:
    with pytest.raises(ConfigFault, match=argument.partition("=")[0].replace("_", "-")):
        build_argv(evolve(PLAN, extra_args=("-b", "64", argument, "1")), STOCK)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigFault) as caught:
        build_argv(evolve(PLAN, cells=0, slots=0, extra_args=("--port", "1")), STOCK)

    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(("asked", "made"), [(1, 256), (256, 256), (257, 512), (4100, 4352)])
def test_the_pool_is_rounded_up_as_the_server_does(asked: int, made: int) -> None:
    assert round_cells(asked) == made


def test_the_child_gets_our_environment_but_no_key_of_ours() -> None:
    env = {
        "PATH": "/bin",
        "LLAMA_ARG_BATCH": "64",
        "KVALET_PORT": "1",
        "OPENAI_API_KEY": "secret",
        "LLAMA_API_KEY": "theirs",
        "LLAMA_ARG_API_PREFIX": "/x",
        "LD_LIBRARY_PATH": "/lib",
        "XDG_CONFIG_HOME": "/home/me/.config",
    }

    child = child_environment(env, api_key="k", config_home="/empty", library_path=("/a", "/b"))

    assert child == {
        "PATH": "/bin",
        "LLAMA_ARG_BATCH": "64",
        "LLAMA_API_KEY": "k",
        "XDG_CONFIG_HOME": "/empty",
        "LD_LIBRARY_PATH": "/a:/b:/lib",
    }


def test_no_library_path_is_made_up() -> None:
    child = child_environment({}, api_key="k", config_home="/empty", library_path=())

    assert "LD_LIBRARY_PATH" not in child


def test_a_token_in_the_arguments_is_not_written_down() -> None:
    assert redacted(("p", "-hft", "secret", "-b", "64")) == ("p", "-hft", "***", "-b", "64")


@pytest.mark.parametrize(
    ("case", "kind", "reason"),
    [
        ("port in use", "port", "couldn't bind HTTP server socket"),
        ("listen on bad host", "port", "couldn't bind HTTP server socket"),
        ("missing model", "model", "/nonexistent/model.gguf"),
        ("corrupt gguf (bad header)", "model", "/tmp/bad.gguf"),
        ("not gguf", "model", "/tmp/nogguf.gguf"),
        ("truncated gguf", "model", "corrupted or incomplete"),
        ("mmproj missing", "model", "failed to load multimodal model"),
        ("draft missing", "model", "failed to load draft model"),
        ("unknown flag", "flag", "error: invalid argument: --preempt-ram"),
        ("unknown flag2", "flag", "error: invalid argument: --bogus"),
        ("invalid int", "flag", "-c, --ctx-size N"),
        ("missing value", "flag", "-ngl, --gpu-layers, --n-gpu-layers N"),
        ("invalid enum -sm", "flag", "bad arguments"),
        ("bad slot-save-path", "flag", "--slot-save-path PATH"),
        ("bad env bool", "flag", "LLAMA_ARG_KV_UNIFIED"),
        ("bad env int", "flag", "LLAMA_ARG_CTX_SIZE"),
        ("OOM (ulimit -v 1.5GB, -c 4M)", "memory", "failed to allocate buffer"),
    ],
)
def test_a_failed_start_is_told_by_the_servers_own_line(case: str, kind: str, reason: str) -> None:
    end = classify_exit(1, failures()[case])

    assert end.kind == kind
    assert reason in end.reason
    assert "  " not in end.reason
    assert end.hint


def test_every_recorded_failure_is_understood() -> None:
    kinds = {case: classify_exit(1, lines).kind for case, lines in failures().items()}

    assert "unknown" not in kinds.values()


def test_a_binary_for_another_cpu_is_named_as_such() -> None:
    end = classify_exit(-4, ["0.00.001.000 I srv  load_model: loading"])

    assert end.kind == "cpu"
    assert "--server-bin" in str(end)


def test_a_child_that_was_killed_probably_took_too_much_memory() -> None:
    assert classify_exit(-9, []).kind == "killed"


@pytest.mark.parametrize("code", [0, -15, -2])
def test_a_child_that_was_told_to_stop_did_not_fail(code: int) -> None:
    assert classify_exit(code, ["0.00.001.000 E x: failed to load model"]).kind == "stopped"


def test_an_unknown_end_quotes_the_last_error_line() -> None:
    lines = ["0.01.000.000 E srv  x: it broke", "0.01.000.001 E srv  x: exiting due to it", "bye"]
    end = classify_exit(1, lines)

    assert (end.kind, end.reason) == ("unknown", "srv x: it broke")


def test_a_crash_without_a_word_names_its_signal() -> None:
    end = classify_exit(-11, ["bye"])

    assert (end.kind, end.reason) == ("unknown", "killed by signal 11")


def test_an_end_without_a_reason_is_told_from_one_with() -> None:
    assert classify_exit(1, []).kind == "silent"
    assert str(classify_exit(3, [])) == "ended with status 3 and gave no reason"
    assert classify_exit(1, ["0.01.000.000 I cmn  x: verbosity = 3", ""]).reason.endswith(
        "it last said: cmn x: verbosity = 3"
    )
