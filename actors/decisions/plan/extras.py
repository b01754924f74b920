"""What the user's own llama-server arguments ask for, and how a new launch takes from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from kvalet.actors.decisions.plan.flag_table import MEMORY_FLAGS
from kvalet.actors.decisions.plan.flag_values import CACHE_TYPES
from kvalet.actors.decisions.plan.flags import Resolved, arguments, resolve_flags
from kvalet.actors.decisions.plan.quants import quantised
from kvalet.actors.decisions.plan.server_flags import Split

Group = Literal[
    "context",
    "cache",
    "speculation",
    "template",
    "split",
    "offload",
    "device",
    "batch",
    "memory",
]
"""Arguments that belong together when a new launch takes over an old one's."""

STRIPPED: Final[tuple[Group, ...]] = ("context", "cache", "speculation", "template", "split")
"""What a new launch decides afresh unless it is told otherwise."""

_SPEC_KNOBS: Final = """
--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match
--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits
--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits
--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits
--draft-min --draft-n-min --spec-draft-n-min --spec-draft-p-split --draft-p-split
--spec-draft-p-min --draft-p-min
"""
_TEMPLATE: Final = """
--jinja --no-jinja --chat-template --chat-template-file --chat-template-kwargs
"""


def _spellings(*names: str) -> frozenset[str]:
    """Every spelling of the options that set these fields."""
    found = (flag for flag in MEMORY_FLAGS if flag.field in names)
    return frozenset(name for flag in found for name in (*flag.names, *flag.off))


SELECTORS: Final = _spellings("draft_model", "draft_hub")
"""What names a drafter; how it is run (its types, layers, device) is not among them."""

GROUPS: Final[dict[Group, frozenset[str]]] = {
    "context": _spellings("ctx", "per_slot", "fit_ctx"),
    "cache": _spellings("type_k", "type_v"),
    "speculation": SELECTORS
    | _spellings("spec_types", "draft_max")
    | frozenset(_SPEC_KNOBS.split()),
    "template": frozenset(_TEMPLATE.split()),
    "split": _spellings("split_mode", "tensor_split"),
    "offload": _spellings(
        *("gpu_layers", "fit", "cpu_moe", "n_cpu_moe", "n_cpu_ffn", "override_tensors"),
        *("kv_offload", "op_offload", "mmproj_offload"),
    ),
    "device": _spellings("devices", "main_gpu", "mmproj_device"),
    "batch": _spellings("batch", "ubatch"),
    "memory": _spellings("load_mode", "cache_ram_mib", "checkpoints", "swa_full"),
}


def without(extra_args: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """``extra_args`` less these options and their values, every other word as it stood."""
    unwanted = frozenset(names)
    kept = (argument for argument in arguments(extra_args) if argument.name not in unwanted)
    return tuple(word for argument in kept for word in argument.words)


def without_drafting(extra_args: Sequence[str]) -> tuple[str, ...]:
    """``extra_args`` before another choice of drafting is put on top.

    Every way to select a drafter or a type goes; how a drafter is run stays, so that one kept
    on the CPU does not come back to the GPU.
    """
    return without(extra_args, GROUPS["speculation"])


def inherited(extra_args: Sequence[str], *, strip: Iterable[Group] = STRIPPED) -> tuple[str, ...]:
    """What the next launch keeps of an earlier one's arguments."""
    return without(extra_args, (name for group in strip for name in GROUPS[group]))


def split_mode_of(asked: Resolved, *, tensor: bool = False) -> Split:
    """How the model is to be split; the only place that decides "tensor or not".

    The user's arguments come first, then kvalet's own switch ``tensor``. An inherited variable
    can only add "tensor": any other word of it is taken out of the child's environment.
    """
    mode = asked.flags.split_mode
    if mode is not None and (asked.said("split_mode") or mode == "tensor"):
        return mode
    return "tensor" if tensor else "layer"


def heavier(first: str, second: str) -> str:
    """The one of two cache types with the larger element; an unknown type counts as f16."""
    return min(first, second, key=_weight)


def _weight(kind: str) -> int:
    place = CACHE_TYPES.index(kind if kind in CACHE_TYPES else "f16")
    # bf16 is as large as f16: neither is heavier.
    return CACHE_TYPES.index("f16") if kind == "bf16" else place


def budget_cache_type(asked: Resolved, *, setting: str | None = None) -> str:
    """One type to price both axes at, for a build whose axes cannot be priced apart.

    The user's arguments come first, at the heavier axis (an axis they leave out has
    ``setting``, or f16); then ``setting``; then the variables, if one is heavier than f16.
    """
    flags = asked.flags
    rest = setting or "f16"
    if asked.said("type_k", "type_v"):
        return heavier(
            flags.type_k if asked.said("type_k") else rest,
            flags.type_v if asked.said("type_v") else rest,
        )
    if setting is not None:
        return setting
    inherited_type = heavier(flags.type_k, flags.type_v)
    return inherited_type if _weight(inherited_type) < _weight("f16") else "f16"


def quantised_cache(extra_args: Sequence[str], *, setting: str | None = None) -> bool:
    """Whether any axis of the cache would be quantised by the setting or the arguments.

    Each axis is judged alone: a plain K must not hide a quantised V.
    """
    asked = resolve_flags(extra_args, {})
    axes = (("type_k", asked.flags.type_k), ("type_v", asked.flags.type_v))
    return any(quantised(kind if asked.said(axis) else setting or kind) for axis, kind in axes)


def tensor_extras(extra_args: Sequence[str]) -> tuple[str, ...]:
    """``extra_args`` for a tensor split that kvalet plans: no split of their own, and no cache
    types at all if one of them is quantised, as such a launch would abort."""
    kept = without(extra_args, GROUPS["split"])
    return without(kept, GROUPS["cache"]) if quantised_cache(kept) else kept


def layer_extras(extra_args: Sequence[str]) -> tuple[str, ...]:
    """The user's original ``extra_args`` after a tensor split was given up: all but the mode."""
    return without(extra_args, _spellings("split_mode"))
