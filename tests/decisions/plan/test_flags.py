"""What the server makes of its arguments and its environment."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.flag_table import FLAG_OF, MEMORY_FLAGS
from kvalet.actors.decisions.plan.flag_words import ONE_VALUE, PRESETS, TWO_VALUES
from kvalet.actors.decisions.plan.flags import Resolved, arguments, resolve_flags, ubatch_of
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.speculation import draft_max_of, emits_mtp

POINTS = Path(__file__).parents[2] / "data" / "kv_ground_truth.jsonl.xz"


def resolve(line: str = "", **env: str) -> Resolved:
    return resolve_flags(line.split(), {f"LLAMA_ARG_{name}": word for name, word in env.items()})


def flags(line: str = "", **env: str) -> ServerFlags:
    """The flags of a launch that has nothing wrong with it."""
    resolved = resolve(line, **env)
    assert resolved.problems == ()
    return resolved.flags


def measured() -> Iterator[dict[str, Any]]:
    with lzma.open(POINTS, "rt") as lines:
        for line in lines:
            point = json.loads(line)
            if point["status"] == "ok" and point.get("target"):
                yield point


def test_a_launch_that_says_nothing_gets_the_servers_defaults() -> None:
    resolved = resolve()

    assert resolved.flags == ServerFlags()
    assert set(resolved.sources.values()) == {"default"}
    assert resolved.sources.keys() == {entry.name for entry in fields(ServerFlags)}


def test_every_measured_launch_got_the_slots_batches_and_types_that_are_read_here() -> None:
    checked = 0
    for point in measured():
        got = resolve_flags(point["flags"], {})
        target = point["target"]
        read = got.flags
        case = f"point {point['id']}: {point['flags']}"
        assert got.problems == (), case
        assert target["n_seq_max"] == read.slots, case
        if target["n_batch"] <= read.batch and not read.embedding:
            assert target["n_ubatch"] == ubatch_of(read, ctx=target["n_batch"]), case
        for cache in target["kv"]:
            assert cache["type_k"] == read.type_k, case
            assert cache["n_stream"] == (1 if read.unified else read.slots), case
        if target["n_rs_seq"]:
            assert emits_mtp(read), case
            assert target["n_rs_seq"] == draft_max_of(read), case
        checked += 1
    assert checked > 1900


@pytest.mark.parametrize(
    ("line", "env", "expected"),
    [
        ("-c 1024 -c 2048", {}, {"ctx": 2048}),
        ("--ctx_size 1024", {}, {"ctx": 1024}),
        ("-c 1024", {"CTX_SIZE": "2048"}, {"ctx": 1024}),
        ("", {"CTX_SIZE": "2048"}, {"ctx": 2048}),
        ("-kvu -no-kvu", {}, {"kv_unified": False}),
        ("-no-kvu --kv-unified", {}, {"kv_unified": True}),
        ("-np -1", {"N_PARALLEL": "4"}, {"parallel": None}),
        ("--no-kv-offload", {}, {"kv_offload": False}),
        ("-nkvo -kvo", {}, {"kv_offload": True}),
        ("", {"NO_KV_OFFLOAD": "0"}, {"kv_offload": False}),
        ("", {"NO_KV_OFFLOAD": "", "KV_OFFLOAD": "on"}, {"kv_offload": False}),
        ("-kvo", {"NO_KV_OFFLOAD": "1"}, {"kv_offload": True}),
        ("", {"KV_UNIFIED": "disabled"}, {"kv_unified": False}),
        ("", {"SWA_FULL": "enabled"}, {"swa_full": True}),
        ("", {"SWA_FULL": "0"}, {"swa_full": False}),
        ("", {"SWA_FULL": "perhaps"}, {"swa_full": False}),
        ("-ngl all", {}, {"gpu_layers": -1}),
        ("-ngl all -ngl auto", {}, {"gpu_layers": None}),
        ("-ngl -1", {}, {"gpu_layers": None}),
        ("--n-gpu-layers 12", {"N_GPU_LAYERS": "all"}, {"gpu_layers": 12}),
        ("-fa 1", {}, {"flash_attn": "on"}),
        ("-fa off", {"FLASH_ATTN": "on"}, {"flash_attn": "off"}),
        ("-fa -1", {}, {"flash_attn": "auto"}),
        ("-fit off", {}, {"fit": False}),
        ("-ts 3,1", {}, {"tensor_split": (3.0, 1.0)}),
        ("-ts 0.5/0.5", {}, {"tensor_split": (0.5, 0.5)}),
        ("-dev none", {}, {"devices": ()}),
        ("-dev CUDA0,CUDA1", {}, {"devices": ("CUDA0", "CUDA1")}),
        ("-ot a=CPU -ot b=CPU,c=CUDA0", {}, {"override_tensors": ("a=CPU", "b=CPU", "c=CUDA0")}),
        ("-ncmoe 4 -ncmoe 0", {}, {"n_cpu_moe": 4}),
        ("--no-mmap", {}, {"load_mode": "none"}),
        ("--spec-draft-n-max 6", {"SPEC_DRAFT_N_MAX": "2"}, {"draft_max": 6}),
        ("-ctkd q8_0", {"SPEC_DRAFT_CACHE_TYPE_V": "f32"}, {"draft_type_k": "q8_0"}),
        ("--spec-type draft-mtp", {"SPEC_TYPE": "none"}, {"spec_types": ("draft-mtp",)}),
    ],
)
def test_flags_and_variables_resolve_as_the_server_resolves_them(
    line: str, env: Mapping[str, str], expected: Mapping[str, Any]
) -> None:
    read = flags(line, **env)

    assert {name: getattr(read, name) for name in expected} == expected


def test_speculative_types_add_up_over_the_environment_and_every_flag() -> None:
    line = "--spec-type ngram-simple,draft-mtp --spec-default --spec-type none"

    assert flags(line, SPEC_TYPE="draft-simple").spec_types == (
        *("draft-simple", "ngram-simple", "draft-mtp", "ngram-mod"),
    )


@pytest.mark.parametrize(
    ("line", "env", "problem"),
    [
        ("-np 0", {}, "-np 0 must lie between 1 and 256"),
        ("-c lots", {}, "-c lots is not a whole number"),
        ("-c 8k", {}, "-c 8k is read as 8"),
        ("-c -5", {}, "-c -5 must lie"),
        ("-c 99999999999", {}, "must lie between"),
        ("-ctk q3_x", {}, "-ctk q3_x is no cache type"),
        ("", {"CACHE_TYPE_V": "q9"}, "LLAMA_ARG_CACHE_TYPE_V=q9 is no cache type"),
        ("", {"KV_UNIFIED": "maybe"}, "LLAMA_ARG_KV_UNIFIED=maybe is no boolean"),
        ("", {"CTX_SIZE": ""}, "LLAMA_ARG_CTX_SIZE='' is not a whole number"),
        ("-fa maybe", {}, "must be on, off or auto"),
        ("-sm diagonal", {}, "must be one of none, layer, row, tensor"),
        ("--spec-type draft-magic", {}, "names no speculative type: draft-magic"),
        ("-c", {}, "-c lacks its value"),
        ("-np8", {}, "-np8 must be written as two words"),
        ("--ctx-size=4096", {}, "--ctx-size=4096 must be written as two words"),
        ("--draft-max 4", {}, "--draft-max was removed from llama-server"),
        ("", {"DRAFT_MAX": "4"}, "LLAMA_ARG_DRAFT_MAX was removed"),
        ("--gpt-oss-20b-default", {}, "picks a model and sizes"),
        ("-ot cpu", {}, "PATTERN=BUFFER"),
        ("-ts 3;1", {}, "list of shares"),
    ],
)
def test_what_the_server_would_refuse_or_misread_is_named(
    line: str, env: Mapping[str, str], problem: str
) -> None:
    problems = resolve(line, **env).problems

    assert len(problems) == 1
    assert problem in problems[0]


def test_a_refused_value_leaves_the_earlier_one_and_a_joined_one_still_counts() -> None:
    assert resolve("-c 2048 -c lots").flags.ctx == 2048
    assert resolve("-np8 --ctx-size=4096 --draft-max 5").flags == evolve(
        ServerFlags(), parallel=8, ctx=4096, draft_max=5
    )


def test_the_value_of_another_flag_is_never_taken_for_a_flag() -> None:
    line = ["--alias", "-c", "--host", "--swa-full", "--control-vector-layer-range", "-np", "-ub"]

    assert flags() == resolve_flags(line, {}).flags
    assert resolve_flags(["-md", "-c", "-c", "7"], {}).flags == evolve(
        ServerFlags(), draft_model="-c", ctx=7
    )


def test_unknown_flags_are_not_ours_to_judge() -> None:
    assert resolve("--from-a-later-build 7 -x stray -c 512") == evolve(
        resolve("-c 512"), problems=()
    )


def test_the_source_of_each_field_is_told() -> None:
    resolved = resolve("-c 512 --no-kv-offload", CTX_SIZE="9", UBATCH="64")

    said = {name: source for name, source in resolved.sources.items() if source != "default"}
    assert said == {"ctx": "flag", "kv_offload": "flag", "ubatch": "env"}


@pytest.mark.parametrize(
    ("line", "ctx", "expected"),
    [
        ("", None, 512),
        ("-b 8192", None, 512),
        ("-b 128", None, 128),
        ("-ub 4096", None, 2048),
        ("-ub 0", None, 2048),
        ("-ub 0 -b 300", None, 300),
        ("", 256, 256),
        # No flag of that name exists: it must not be taken for the micro-batch.
        ("--ubatch 4096", None, 512),
    ],
)
def test_a_pass_is_never_larger_than_its_batch(line: str, ctx: int | None, expected: int) -> None:
    assert ubatch_of(resolve(line).flags, ctx=ctx) == expected


def test_a_pool_without_a_slot_count_is_shared_whatever_is_said() -> None:
    assert flags("--no-kv-unified").unified
    assert flags("").slots == 4
    assert not flags("-np 2").unified
    assert flags("-np 2 -kvu").unified


WORDS = sorted({*FLAG_OF, *ONE_VALUE, *TWO_VALUES, *PRESETS, "--odd", "-", "--", "="})
VALUES = ["0", "-1", "4096", "f16", "q4_0", "auto", "all", "none", "on", "3,1", "a=CPU", "x" * 999]
TOKENS = st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from(VALUES), st.text()))
VARIABLES = st.dictionaries(
    st.sampled_from(sorted({name for flag in MEMORY_FLAGS for name in (flag.env, flag.env_off)})),
    st.one_of(st.sampled_from(VALUES), st.text()),
)


@given(TOKENS, VARIABLES)
def test_no_line_and_no_environment_can_break_the_reader(
    line: list[str], env: dict[str, str]
) -> None:
    resolved = resolve_flags(line, env)

    assert [word for argument in arguments(line) for word in argument.words] == line
    assert resolve_flags(line, env) == resolved
    assert ubatch_of(resolved.flags) >= 1
    assert resolved.flags.slots >= 1
    json.dumps(resolved.problems)


SETTINGS = [
    *(("-c", "4096"), ("-np", "2"), ("-ub", "128"), ("-b", "1024"), ("-ctk", "q8_0")),
    *(("-ctv", "f32"), ("-fa", "on"), ("--swa-full",), ("-nkvo",), ("-no-kvu",), ("-ngl", "7")),
    *(("-sm", "row"), ("-ts", "2,1"), ("-md", "d.gguf"), ("-ctkd", "q8_0"), ("-ngld", "0")),
    *(("-cram", "0"), ("-ctxcp", "3"), ("-ncmoe", "2"), ("--spec-draft-n-max", "5")),
]


def spelled(setting: Sequence[str], choice: int) -> tuple[str, ...]:
    flag = FLAG_OF[setting[0]]
    names = flag.off if setting[0] in flag.off else flag.names
    return (names[choice % len(names)], *setting[1:])


@given(st.permutations(SETTINGS), st.lists(st.integers(0, 3), min_size=20, max_size=20))
def test_neither_the_order_of_flags_nor_their_spelling_matters(
    settings: list[tuple[str, ...]], choices: list[int]
) -> None:
    usual = [word for setting in SETTINGS for word in setting]
    other = [
        word
        for setting, choice in zip(settings, choices, strict=True)
        for word in spelled(setting, choice)
    ]

    assert resolve_flags(other, {}) == resolve_flags(usual, {})


@given(st.permutations(SETTINGS), VARIABLES)
def test_a_flag_beats_any_variable(settings: list[tuple[str, ...]], env: dict[str, str]) -> None:
    joined = {"spec_types", "n_cpu_moe"}
    line = [word for setting in settings for word in setting]
    told = {FLAG_OF[setting[0]].field for setting in SETTINGS} - joined
    bare, full = resolve_flags(line, {}).flags, resolve_flags(line, env).flags

    assert {name: getattr(full, name) for name in told} == {
        name: getattr(bare, name) for name in told
    }
