"""What a launch gives up, one thing after another, when its server does not come up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

from attrs import field, frozen

from kvalet.actors.decisions.plan.extras import layer_extras, without_drafting
from kvalet.actors.decisions.plan.flag_values import MODEL_TYPES, MTP_TYPES
from kvalet.actors.decisions.plan.server_flags import ServerFlags, Split
from kvalet.actors.decisions.plan.speculation import (
    DRAFTER_VARIABLES,
    effective_spec_types,
    emits_draft_model,
    emits_mtp,
)

Concession = Literal["no-exact", "layer-split", "own-fitting", "no-drafter", "smaller-context"]
"""``own-fitting``: nothing is pinned, the server places the layers by itself. ``smaller-context``:
half of it, after a crash. ``no-exact`` goes only when the server names it (``Blueprint.after``)."""

TOLD: Final[dict[Concession, str]] = {
    "no-exact": "the server refused exact concurrency: it runs without",
    "layer-split": "the server failed split by tensor: it is split by layers",
    "own-fitting": "the server had too little memory as planned: it places its layers itself",
    "no-drafter": "the server failed with its drafter: it runs without",
    "smaller-context": "the server had too little memory, or failed: it runs with half the context",
}
"""What a person is told of each."""

CURABLE: Final = frozenset(
    {"memory", "model", "unknown", "silent", "killed", "assertion", "decode"}
)
"""Kinds of a child's end that something given up may cure. A wrong flag stays wrong."""


@frozen(kw_only=True)
class Conceded:
    """The user's arguments after concessions, and variables to set, or to remove with None."""

    extra_args: tuple[str, ...]
    forced: Mapping[str, str | None] = field(factory=dict[str, "str | None"])


def next_concession(
    given: Collection[Concession], *, kind: str, split: Split, pinned: bool, flags: ServerFlags
) -> Concession | None:
    """What to give up next after an end of this ``kind``; None: nothing that would help.

    Each thing is given up once, and the drafter late: with the split gone it may run again.
    One that comes up and fails as it decodes has its drafter to blame.
    """
    if kind not in CURABLE:
        return None
    if kind == "decode":
        return "no-drafter" if "no-drafter" not in given else None
    if split == "tensor" and "layer-split" not in given:
        return "layer-split"
    if pinned and kind == "memory" and "own-fitting" not in given:
        return "own-fitting"
    if "no-drafter" not in given and _loads_drafter(flags):
        return "no-drafter"
    return None


def _loads_drafter(flags: ServerFlags) -> bool:
    """A drafter that is named is loaded, whether the types of drafting use it or not."""
    named = flags.draft_model is not None or flags.draft_hub is not None
    return named or emits_mtp(flags) or emits_draft_model(flags)


def conceded(
    extra_args: Sequence[str],
    env: Mapping[str, str],
    given: Collection[Concession],
    *,
    known: Collection[str],
) -> Conceded:
    """What is passed on once ``given`` is given up; everything else stays as it was asked.

    ``known`` are the long flags of the binary. The types of drafting that need no model stay.
    """
    kept = tuple(extra_args)
    forced: dict[str, str | None] = {}
    if "layer-split" in given:
        kept = (*layer_extras(kept), "--split-mode", "layer")
    if "no-drafter" in given:
        types = [
            name
            for name in effective_spec_types(kept, env)
            if name not in MTP_TYPES and name not in MODEL_TYPES
        ]
        kept = without_drafting(kept)
        if types:
            kept += ("--spec-type", ",".join(types))
        elif "--spec-default" in known:
            kept += ("--spec-default",)
        # A flag does not hide these from the server: both would run.
        forced = dict.fromkeys(("LLAMA_ARG_SPEC_TYPE", *sorted(DRAFTER_VARIABLES)))
    return Conceded(extra_args=kept, forced=forced)
