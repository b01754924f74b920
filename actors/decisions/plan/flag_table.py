"""The flags of llama-server that decide about memory, and which other flags take a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from attrs import frozen

from kvalet.actors.decisions.plan import flag_values as values
from kvalet.actors.decisions.plan.flag_values import Reader, whole


@frozen(kw_only=True)
class Flag:
    """One option: its field of ServerFlags, every spelling, and how it sets the field.

    A flag with ``read`` takes a value. One without sets ``sets``, and its ``off`` spellings
    set ``unsets``. ``merge`` joins an earlier value with a later one where the server keeps
    both; without it the last one stands. ``removed`` is what the server says instead of
    taking the flag.
    """

    field: str
    names: tuple[str, ...]
    env: str = ""
    off: tuple[str, ...] = ()
    read: Reader | None = None
    sets: object = True
    unsets: object = False
    merge: Callable[[Any, Any], object] | None = None
    removed: str = ""

    @property
    def env_off(self) -> str:
        """The variable whose mere presence switches this flag off; empty: there is none."""
        return self.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_") if self.env and self.off else ""


def _joined(earlier: tuple[str, ...], later: tuple[str, ...]) -> tuple[str, ...]:
    return (*earlier, *later)


def _united(earlier: tuple[str, ...], later: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*earlier, *later)))


_SLOTS_MAX: Final = 256
_REPLACED: Final = "was removed from llama-server; say --spec-draft-n-max"


MEMORY_FLAGS: Final = (
    Flag(field="ctx", names=("-c", "--ctx-size"), env="LLAMA_ARG_CTX_SIZE", read=whole(0)),
    Flag(
        field="parallel",
        names=("-np", "--parallel"),
        env="LLAMA_ARG_N_PARALLEL",
        read=whole(1, _SLOTS_MAX, absent=-1),
    ),
    Flag(
        field="kv_unified",
        names=("-kvu", "--kv-unified"),
        off=("-no-kvu", "--no-kv-unified"),
        env="LLAMA_ARG_KV_UNIFIED",
    ),
    Flag(
        field="per_slot",
        names=("--kv-unified-per-slot",),
        env="LLAMA_ARG_KV_UNIFIED_PER_SLOT",
        read=whole(0),
    ),
    Flag(field="batch", names=("-b", "--batch-size"), env="LLAMA_ARG_BATCH", read=whole(1)),
    Flag(field="ubatch", names=("-ub", "--ubatch-size"), env="LLAMA_ARG_UBATCH", read=whole(0)),
    Flag(
        field="type_k",
        names=("-ctk", "--cache-type-k"),
        env="LLAMA_ARG_CACHE_TYPE_K",
        read=values.cache_type,
    ),
    Flag(
        field="type_v",
        names=("-ctv", "--cache-type-v"),
        env="LLAMA_ARG_CACHE_TYPE_V",
        read=values.cache_type,
    ),
    Flag(
        field="flash_attn",
        names=("-fa", "--flash-attn"),
        env="LLAMA_ARG_FLASH_ATTN",
        read=values.flash_attention,
    ),
    Flag(field="swa_full", names=("--swa-full",), env="LLAMA_ARG_SWA_FULL"),
    Flag(
        field="kv_offload",
        names=("-kvo", "--kv-offload"),
        off=("-nkvo", "--no-kv-offload"),
        env="LLAMA_ARG_KV_OFFLOAD",
    ),
    Flag(field="op_offload", names=("--op-offload",), off=("--no-op-offload",)),
    Flag(
        field="checkpoints",
        names=("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
        env="LLAMA_ARG_CTX_CHECKPOINTS",
        read=whole(0),
    ),
    Flag(
        field="cache_ram_mib",
        names=("-cram", "--cache-ram"),
        env="LLAMA_ARG_CACHE_RAM",
        read=whole(-1),
    ),
    Flag(field="embedding", names=("--embedding", "--embeddings"), env="LLAMA_ARG_EMBEDDINGS"),
    Flag(field="reranking", names=("--rerank", "--reranking"), env="LLAMA_ARG_RERANKING"),
    # Where the weights go.
    Flag(
        field="gpu_layers",
        names=("-ngl", "--gpu-layers", "--n-gpu-layers"),
        env="LLAMA_ARG_N_GPU_LAYERS",
        read=values.layers,
    ),
    Flag(field="fit", names=("-fit", "--fit"), env="LLAMA_ARG_FIT", read=values.boolean),
    Flag(field="fit_ctx", names=("-fitc", "--fit-ctx"), env="LLAMA_ARG_FIT_CTX", read=whole(0)),
    Flag(
        field="split_mode",
        names=("-sm", "--split-mode"),
        env="LLAMA_ARG_SPLIT_MODE",
        read=values.one_of("none", "layer", "row", "tensor"),
    ),
    Flag(
        field="tensor_split",
        names=("-ts", "--tensor-split"),
        env="LLAMA_ARG_TENSOR_SPLIT",
        read=values.proportions,
    ),
    Flag(field="main_gpu", names=("-mg", "--main-gpu"), env="LLAMA_ARG_MAIN_GPU", read=whole(0)),
    Flag(field="devices", names=("-dev", "--device"), env="LLAMA_ARG_DEVICE", read=values.devices),
    Flag(
        field="override_tensors",
        names=("-ot", "--override-tensor"),
        env="LLAMA_ARG_OVERRIDE_TENSOR",
        read=values.overrides,
        merge=_joined,
    ),
    Flag(field="cpu_moe", names=("-cmoe", "--cpu-moe"), env="LLAMA_ARG_CPU_MOE"),
    Flag(
        field="n_cpu_moe",
        names=("-ncmoe", "--n-cpu-moe"),
        env="LLAMA_ARG_N_CPU_MOE",
        read=whole(0),
        merge=max,
    ),
    Flag(
        field="n_cpu_ffn",
        names=("-ncffn", "--n-cpu-ffn"),
        env="LLAMA_ARG_N_CPU_FFN",
        read=whole(0),
        merge=max,
    ),
    Flag(
        field="load_mode",
        names=("-lm", "--load-mode"),
        env="LLAMA_ARG_LOAD_MODE",
        read=values.load_mode,
    ),
    Flag(field="load_mode", names=("--mlock",), env="LLAMA_ARG_MLOCK", sets="mlock"),
    Flag(
        field="load_mode",
        names=("--mmap",),
        off=("--no-mmap",),
        env="LLAMA_ARG_MMAP",
        sets="mmap",
        unsets="none",
    ),
    Flag(
        field="load_mode",
        names=("-dio", "--direct-io"),
        off=("-ndio", "--no-direct-io"),
        env="LLAMA_ARG_DIO",
        sets="dio",
        unsets="auto",
    ),
    # The projector of images and sound.
    Flag(field="mmproj", names=("-mm", "--mmproj"), env="LLAMA_ARG_MMPROJ", read=values.text),
    Flag(
        field="mmproj_url",
        names=("-mmu", "--mmproj-url"),
        env="LLAMA_ARG_MMPROJ_URL",
        read=values.text,
    ),
    Flag(
        field="mmproj_offload",
        names=("--mmproj-offload",),
        off=("--no-mmproj-offload",),
        env="LLAMA_ARG_MMPROJ_OFFLOAD",
    ),
    Flag(
        field="mmproj_device",
        names=("-mmdev", "--mmproj-device"),
        env="MTMD_BACKEND_DEVICE",
        read=values.text,
    ),
    # Drafting.
    Flag(
        field="spec_types",
        names=("--spec-type",),
        env="LLAMA_ARG_SPEC_TYPE",
        read=values.spec_types,
        merge=_united,
    ),
    Flag(field="spec_types", names=("--spec-default",), sets=("ngram-mod",), merge=_united),
    # The removed flag comes first, so that the variable of the living one wins.
    Flag(
        field="draft_max",
        names=("--draft", "--draft-n", "--draft-max"),
        env="LLAMA_ARG_DRAFT_MAX",
        read=whole(0),
        removed=_REPLACED,
    ),
    Flag(
        field="draft_max",
        names=("--spec-draft-n-max",),
        env="LLAMA_ARG_SPEC_DRAFT_N_MAX",
        read=whole(0),
    ),
    Flag(
        field="draft_model",
        names=("--spec-draft-model", "-md", "--model-draft"),
        env="LLAMA_ARG_SPEC_DRAFT_MODEL",
        read=values.text,
    ),
    Flag(
        field="draft_hub",
        names=("--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft"),
        env="LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        read=values.text,
    ),
    Flag(
        field="draft_type_k",
        names=("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"),
        env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        read=values.cache_type,
    ),
    Flag(
        field="draft_type_v",
        names=("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"),
        env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        read=values.cache_type,
    ),
    Flag(
        field="draft_gpu_layers",
        names=("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"),
        env="LLAMA_ARG_N_GPU_LAYERS_DRAFT",
        read=values.layers,
    ),
    Flag(
        field="draft_devices",
        names=("--spec-draft-device", "-devd", "--device-draft"),
        read=values.devices,
    ),
    Flag(
        field="draft_cpu_moe",
        names=("--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft"),
        env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
    ),
    Flag(
        field="draft_n_cpu_moe",
        names=("--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft"),
        env="LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
        read=whole(0),
        merge=max,
    ),
    Flag(
        field="draft_override_tensors",
        names=("--spec-draft-override-tensor", "-otd", "--override-tensor-draft"),
        read=values.overrides,
        merge=_joined,
    ),
)
"""Every option that a plan reads. Environment variables are read in this order."""

FLAG_OF: Final = {name: flag for flag in MEMORY_FLAGS for name in (*flag.names, *flag.off)}
"""The option behind each spelling."""

MEMORY_VARIABLES: Final = frozenset(
    name for flag in MEMORY_FLAGS for name in (flag.env, flag.env_off) if name
)
"""Every variable that says something about memory."""
