"""A launch as the simulated server reads it: its generation, its flags and its faults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from kvalet.actors.decisions.capabilities import parse_help
from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver.build import BUILDS
from kvalet.sims.fakeserver.faults import Crash, Fault, Hang, read_faults
from kvalet.sims.fakeserver.options import Options, StartRefused, read_options
from kvalet.sims.fakeserver.slot import Parking

VARIABLE = re.compile(r"\(env: (\w+)\)")
STOCK_HELP = Path(__file__).parents[2] / "data" / "help_b11434.txt"


def options(*argv: str, build: str = "G4", **env: str) -> Options:
    return read_options(argv, {"KVALET_SIM_BUILD": build, **env})


def refusal(*argv: str, build: str = "G4", **env: str) -> str:
    with pytest.raises(StartRefused) as caught:
        options(*argv, build=build, **env)
    assert caught.value.code == 1
    return caught.value.lines[-1]


def parking(*argv: str, build: str = "G4", **env: str) -> Parking:
    found = options("-np", "2", "-kvu", *argv, build=build, **env).pool.parking
    assert found is not None
    return found


def test_the_stock_generation_knows_the_options_and_variables_of_the_stock_release() -> None:
    def known(text: str) -> tuple[set[str], frozenset[str], frozenset[str]]:
        found = parse_help(text)
        return set(VARIABLE.findall(text)), found.flags, found.spec_types

    assert known(BUILDS["G0"].help_text) == known(STOCK_HELP.read_text())


@pytest.mark.parametrize("name", BUILDS)
def test_help_and_version_are_read_like_a_real_builds(name: str) -> None:
    build = BUILDS[name]
    found = parse_help(build.help_text, build.version_text)
    assert found.build == "b11434"
    assert ("--preempt-ram" in found.flags) is (name != "G0")
    assert ("--preempt-async" in found.flags) is (name not in ("G0", "G1"))


def test_the_default_budget_changed_with_the_last_generation() -> None:
    assert "default: 8192, -1 - no limit" in BUILDS["G3"].help_text
    assert "default: 0 - disabled, -1 - no limit" in BUILDS["G4"].help_text
    assert parking(build="G1").budget_mib == 8192
    assert options("-np", "2", "-kvu").pool.parking is None


def test_a_stock_server_knows_no_parking() -> None:
    assert refusal("--preempt-ram", "64", build="G0") == "error: invalid argument: --preempt-ram"
    assert options("-kvu", "-np", "2", build="G0", LLAMA_ARG_PREEMPT_RAM="64").pool.parking is None


def test_an_unknown_argument_is_refused_in_the_servers_words() -> None:
    assert refusal("--bogus") == "error: invalid argument: --bogus"
    assert refusal("--preempt-ram=64") == "error: invalid argument: --preempt-ram=64"
    assert refusal("--mlock") == "error: invalid argument: --mlock"
    assert refusal("-np", "0").startswith('error while handling argument "-np": ')
    assert refusal("--host").startswith('error while handling argument "--host": ')
    assert refusal("--port", "x") == 'error while handling argument "--port": stoi'
    said = refusal(LLAMA_ARG_CTX_SIZE="x")
    assert said.startswith('error while handling environment variable "LLAMA_ARG_CTX_SIZE": ')


def test_flags_beat_variables_and_the_last_of_them_wins() -> None:
    env = {"LLAMA_ARG_PREEMPT_RAM": "0", "LLAMA_ARG_PREEMPT_ASYNC": "0"}
    found = parking("--preempt-ram", "1", "--preempt-ram", "64", "--preempt-async", **env)
    assert (found.budget_mib, found.asynchronous) == (64, True)
    assert not parking("--preempt-ram", "-1", **{**env, "LLAMA_ARG_PREEMPT_RAM": "5"}).asynchronous
    assert options("--no-slots", "--slots").slots
    assert not options("--slots", "--no-slots").slots


def test_keys_of_the_flags_and_of_the_variable_add_up() -> None:
    found = options("--api-key", "a,b", "--api-key", "c", LLAMA_API_KEY="d")
    assert set(found.api_keys) == {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ((), (4, True, 32768, 32768)),
        (("-np", "4"), (4, False, 131072, 32768)),
        (("-c", "4096", "-np", "4"), (4, False, 4096, 1024)),
        (("-c", "4096", "-np", "4", "-kvu"), (4, True, 4096, 4096)),
        (("-c", "4100", "-np", "4"), (4, False, 5120, 1280)),
        (("-c", "1000", "-np", "3"), (3, False, 1536, 512)),
        (("-c", "4100", "-np", "4", "-kvu"), (4, True, 4352, 4352)),
        (("-c", "65536", "-np", "4", "-kvu"), (4, True, 65536, 32768)),
        (("--kv-unified-per-slot", "2048"), (4, True, 8192, 2048)),
        (
            ("--kv-unified-per-slot", "2048", "-c", "4096", "-np", "4", "-kvu"),
            (4, True, 4096, 2048),
        ),
        (("--kv-unified-per-slot", "2048", "-np", "4"), (4, False, 8192, 2048)),
    ],
)
def test_the_pool_has_the_size_that_was_measured(
    argv: tuple[str, ...], sizes: tuple[int, bool, int, int]
) -> None:
    pool = options(*argv).pool
    assert (pool.slots, pool.unified, pool.cells, pool.slot_ctx) == sizes


def test_the_test_knobs_are_read_and_echoed() -> None:
    found = options(
        *("-np", "2", "-kvu", "--preempt-ram", "64"),
        LLAMA_SERVER_PREEMPT_EVERY="8",
        LLAMA_SERVER_PREEMPT_POLICY="largest",
        LLAMA_SERVER_PREEMPT_RESUME="pass",
        LLAMA_SERVER_PREEMPT_PLANNER="off",
        LLAMA_SERVER_PREEMPT_FAIL_SAVE="1",
        LLAMA_SERVER_PREEMPT_GRANULARITY="64",
    )
    knobs = found.pool.parking
    assert knobs is not None
    assert (knobs.every, knobs.policy, knobs.resume) == (8, "largest", "pass")
    assert (knobs.planner, knobs.fail_save, found.pool.page) == (False, True, 64)
    notes = "\n".join(found.notes)
    for said in ("LLAMA_SERVER_PREEMPT_EVERY = 8", "the kv pool allocates 64 cells at a time"):
        assert said in notes
    assert "parking and resuming asynchronously" in notes


def test_an_unknown_order_of_resuming_keeps_the_model_from_loading() -> None:
    said = refusal(
        *("-np", "2", "-kvu", "--preempt-ram", "9"), LLAMA_SERVER_PREEMPT_RESUME="random"
    )
    assert "LLAMA_SERVER_PREEMPT_RESUME" in said


def test_a_server_that_was_not_asked_to_park_says_nothing_of_it() -> None:
    assert options("-np", "2", "-kvu", LLAMA_SERVER_PREEMPT_EVERY="8").notes == ()
    assert options("-np", "2", "--preempt-ram", "64").pool.parking is None
    assert options("-np", "1", "-kvu", "--preempt-ram", "64").pool.parking is None


def test_a_recurrent_model_says_that_it_never_parks() -> None:
    found = options(
        *("-np", "2", "-kvu", "--preempt-ram", "64"),
        KVALET_SIM_MODEL_KIND="recurrent",
        LLAMA_SERVER_PREEMPT_EVERY="8",
    )
    assert found.pool.parking is None
    assert found.notes == ("preemption: off, the recurrent cache holds one state per sequence",)


def test_a_hybrid_model_parks_at_once_and_says_why() -> None:
    found = options(
        *("-np", "2", "-kvu", "--preempt-ram", "64", "--preempt-async"),
        KVALET_SIM_MODEL_KIND="hybrid",
    )
    assert found.pool.parking is not None
    assert not found.pool.parking.asynchronous
    assert any("a recurrent state does not stay in one row" in note for note in found.notes)


def test_a_batch_too_small_for_exact_mode_is_refused_with_the_size_it_needs() -> None:
    said = refusal("-np", "2", "-kvu", "-b", "512", LLAMA_EXACT_CONCURRENCY="1")
    assert "needs a batch of at least 514 tokens for a 512-token ubatch" in said
    assert "Raise -b to 514" in said
    assert options("-np", "2", "-kvu", "-b", "514", LLAMA_EXACT_CONCURRENCY="1").exact


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("-np", "2"), "unified"),
        (("-fa", "off"), "flash attention"),
        (("-ctk", "q8_0"), "unquantized"),
        (("-nkvo",), "offloaded"),
        (("--cache-reuse", "8"), "--cache-reuse"),
        (("--context-shift",), "--context-shift"),
        (("-cmoe",), "experts"),
    ],
)
def test_what_exact_mode_cannot_have_is_refused_by_name(argv: tuple[str, ...], reason: str) -> None:
    assert reason in refusal(*argv, LLAMA_EXACT_CONCURRENCY="1")


def test_positions_in_several_directions_beside_a_projector_cannot_be_exact() -> None:
    env = {"LLAMA_EXACT_CONCURRENCY": "1", "KVALET_SIM_MODEL_KIND": "mrope"}
    assert "does not support M-RoPE together with a projector" in refusal("--mmproj", "p", **env)
    assert options(**env).exact


def test_exact_mode_is_the_last_generations_only_and_may_be_ignored_or_refused() -> None:
    assert options(LLAMA_EXACT_CONCURRENCY="1").exact
    assert not options(LLAMA_EXACT_CONCURRENCY="0").exact
    assert not options(build="G3", LLAMA_EXACT_CONCURRENCY="1").exact
    ignoring = {"KVALET_SIM_FAULTS": '[{"kind":"ignore_exact"}]'}
    assert not options(LLAMA_EXACT_CONCURRENCY="1", **ignoring).exact
    refusing = {"KVALET_SIM_FAULTS": '[{"kind":"refuse_exact","line":"no"}]'}
    assert refusal(LLAMA_EXACT_CONCURRENCY="1", **refusing) == "no"
    assert not options(**refusing).exact


def test_a_fault_may_end_the_start_with_a_code_of_its_own() -> None:
    with pytest.raises(StartRefused) as caught:
        options(KVALET_SIM_FAULTS='[{"kind":"exit","code":3,"line":"out of luck"}]')
    assert (caught.value.code, caught.value.lines) == (3, ("out of luck",))


def test_faults_are_read_with_their_own_fields() -> None:
    text = '[{"kind":"crash","at_token":5},{"kind":"hang"}]'
    assert read_faults(text) == (Crash(at_token=5), Hang())
    assert read_faults("") == ()


def test_every_fault_that_is_described_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sim-server.md").read_text()
    text = page.partition("```json\n")[2].partition("```")[0]
    assert {type(fault) for fault in read_faults(text)} == set(get_args(Fault))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[",
        '[{"kind":"quake"}]',
        '[{"kind":"hang","at":1}]',
        '[{"kind":"hang","at_token":"x"}]',
    ],
)
def test_a_fault_that_is_none_is_refused_with_its_place(text: str) -> None:
    assert "KVALET_SIM_FAULTS: " in refusal(KVALET_SIM_FAULTS=text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVALET_SIM_BUILD", "G9"),
        ("KVALET_SIM_TOKENS_PER_S", "0"),
        ("KVALET_SIM_PREFILL_PER_S", "fast"),
        ("KVALET_SIM_TOKENS_PER_S", "nan"),
        ("KVALET_SIM_MODEL_KIND", "odd"),
    ],
)
def test_a_wish_that_cannot_be_met_is_named(name: str, value: str) -> None:
    with pytest.raises(StartRefused) as caught:
        read_options((), {name: value})
    assert name in caught.value.lines[-1]


def test_notices_name_their_answer_as_each_generation_does() -> None:
    def said(build: str, index: int, answers: int) -> bytes:
        return BUILDS[build].notice(Notice.PREEMPTED, index, answers)

    assert said("G0", 0, 2) == said("G1", 0, 1) == said("G2", 0, 1) == b""
    assert said("G3", 0, 1) == said("G4", 0, 1) == b": preempted\n\n"
    assert [said("G3", index, 2) for index in (0, 1)] == [b": preempted\n\n", b": preempted 1\n\n"]
    assert [said("G4", index, 2) for index in (0, 1)] == [
        b": preempted 0\n\n",
        b": preempted 1\n\n",
    ]


def test_only_the_last_generation_says_that_it_recomputed() -> None:
    assert BUILDS["G4"].notice(Notice.RECOMPUTED, 0, 1) == b": recomputed\n\n"
    assert BUILDS["G3"].notice(Notice.RECOMPUTED, 0, 1) == b""
    assert BUILDS["G4-counts"].notice(Notice.RECOMPUTED, 0, 1) == b""
