"""Cache bytes that another planner computes for the same dimensions: where both see the same
physics the figures are equal, and each difference has a reason."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import evolve

from kvalet.actors.decisions.plan.drafting import draft_context
from kvalet.actors.decisions.plan.host import host_bytes
from kvalet.actors.decisions.plan.kept import context_bytes
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape, Ssm
from kvalet.actors.decisions.plan.sizes import sizes
from kvalet.protocol.errors import ConfigFault

VECTORS_FILE: Final = Path(__file__).parents[2] / "data" / "vram_vectors.json"
VECTORS: Final[Mapping[str, Any]] = json.loads(VECTORS_FILE.read_text())
CASES: Final[Sequence[Mapping[str, Any]]] = VECTORS["kv"]


def shape(dims: Mapping[str, Any], name: str) -> ModelShape:
    layers = dims["n_layers"]
    kinds = {"hybrid": "qwen35", "mla": "deepseek2", "swa": "gemma4"}
    # No table names this one, so that both planners estimate a pattern.
    arch = "unnamed" if "gpt-oss" in name else kinds.get(name.split()[0], "llama")
    per_layer = dims.get("n_kv_heads_by_layer") or [dims["n_kv_heads"]] * layers
    pattern = dims.get("sliding_window_pattern")
    return ModelShape(
        arch=arch,
        layers=layers,
        embd=dims["embedding_length"],
        heads=(dims["n_heads"],) * layers,
        kv_heads=tuple(per_layer),
        key_length=dims.get("kv_key_length"),
        value_length=dims.get("kv_value_length"),
        key_length_swa=dims.get("kv_key_length_swa"),
        value_length_swa=dims.get("kv_value_length_swa"),
        key_length_mla=dims.get("key_length_mla"),
        value_length_mla=128 if "key_length_mla" in dims else None,
        kv_lora_rank=dims.get("kv_lora_rank"),
        window=dims.get("sliding_window"),
        swa_pattern=tuple(pattern) if pattern else None,
        shared_kv_layers=dims.get("shared_kv_layers", 0),
        nextn_layers=dims.get("nextn_predict_layers", 0),
        full_attention_interval=dims.get("full_attention_interval"),
        ssm=Ssm(
            inner_size=dims.get("ssm_inner_size"),
            state_size=dims.get("ssm_state_size"),
            group_count=dims.get("ssm_group_count", 0),
            conv_kernel=dims.get("ssm_conv_kernel"),
        ),
    )


def flags(case: Mapping[str, Any]) -> ServerFlags:
    return ServerFlags(
        ctx=case["ctx"],
        parallel=case["slots"],
        kv_unified=case["unified"],
        type_k=case["type"],
        type_v=case["type"],
        flash_attn="on" if case["fa"] else "off",
        swa_full=case.get("swa_full", False),
    )


@pytest.mark.parametrize("vector", VECTORS["cells"], ids=str)
def test_cells_and_streams_are_those_of_the_other_planner(vector: Mapping[str, Any]) -> None:
    wanted = ServerFlags(
        ctx=vector["ctx"], parallel=vector["slots"], kv_unified=vector["unified"], fit=False
    )
    size = sizes(ModelShape(arch="llama"), wanted)
    assert [size.slots, size.streams, size.ctx_seq] == vector["slots_streams_cells"]


@pytest.mark.parametrize("model", CASES, ids=lambda model: model["name"])
def test_cache_bytes_are_those_of_the_other_planner(model: Mapping[str, Any]) -> None:
    found = shape(model["dims"], model["name"])
    cases = [case for case in model["cases"] if starts(case)]
    planned = [context_bytes(found, flags(case)) for case in cases]
    # The other planner counts no state when the header has no groups: a server still keeps it.
    stateless = found.arch == "qwen35" and not found.ssm.group_count
    kept = [plan.kv_bytes if stateless else plan.bytes for plan in planned]
    assert kept == [case["head"] for case in cases]
    assert all(plan.state.bytes for plan in planned) == (found.arch == "qwen35")


@pytest.mark.parametrize("model", CASES, ids=lambda model: model["name"])
def test_what_the_other_planner_prices_but_no_server_starts_is_refused(
    model: Mapping[str, Any],
) -> None:
    for case in model["cases"]:
        if not starts(case):
            with pytest.raises(ConfigFault, match="flash attention"):
                context_bytes(shape(model["dims"], model["name"]), flags(case))


def test_an_architecture_that_the_table_names_needs_no_estimate() -> None:
    model = next(model for model in CASES if "gpt-oss" in model["name"])
    found = evolve(shape(model["dims"], model["name"]), arch="gpt-oss")
    wanted = ServerFlags(ctx=4096, parallel=1, kv_unified=True)
    assert context_bytes(found, wanted).bytes > model["cases"][0]["head"]
    assert context_bytes(found, wanted).layers.tier == "table"


@pytest.mark.parametrize("vector", VECTORS["kv_gemma3_270m_8192_f16"], ids=str)
def test_a_small_windowed_model_costs_what_the_other_planner_says(
    vector: Mapping[str, Any],
) -> None:
    model = next(model for model in CASES if "gemma3-270m" in model["name"])
    asked = vector["kw"]
    wanted = ServerFlags(
        ctx=8192,
        parallel=asked.get("n_parallel", 1),
        kv_unified=True,
        swa_full=asked.get("swa_full", False),
        checkpoints=asked.get("ctx_checkpoints", 0),
    )
    plan = context_bytes(shape(model["dims"], model["name"]), wanted)
    # The other planner keeps checkpoints on the device; a server keeps them on the host.
    assert plan.bytes + host_bytes(plan, wanted).checkpoints == vector["head"]


@pytest.mark.parametrize("row", VECTORS["mtp_27b"]["rows"], ids=str)
def test_an_embedded_drafter_costs_what_the_other_planner_says(row: Mapping[str, Any]) -> None:
    found = shape(VECTORS["mtp_27b"]["dims"], "hybrid")
    wanted = ServerFlags(
        ctx=row["ctx"],
        parallel=1,
        kv_unified=True,
        spec_types=("draft-mtp",),
        draft_max=row["n_max"],
    )
    target = context_bytes(found, wanted)
    draft = draft_context(found, wanted, target.sizes)
    assert draft is not None
    assert draft.bytes == row["draft_kv"]
    state = target.state.bytes - context_bytes(found, evolve(wanted, spec_types=())).state.bytes
    assert draft.bytes + state == row["head_1slot"]


def starts(case: Mapping[str, Any]) -> bool:
    """Whether a server starts at all: quantised values need flash attention."""
    return bool(case["fa"]) or case["type"] in {"f16", "f32", "bf16"}
