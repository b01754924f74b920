"""Which variables a llama-server does not inherit from us, given what was decided for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import field, frozen

from kvalet.actors.decisions.plan.flags import resolve_flags
from kvalet.actors.decisions.plan.quants import quantised
from kvalet.actors.decisions.plan.server_flags import Split
from kvalet.actors.decisions.plan.speculation import (
    DRAFTER_VARIABLES,
    SpecMode,
    owns_speculation,
)

# These reach the server from outside and no flag of ours overrides them.
_ALWAYS: Final = frozenset(
    {
        "LLAMA_ARG_API_KEY_FILE",
        "LLAMA_ARG_API_PREFIX",
        "LLAMA_ARG_SSL_CERT_FILE",
        "LLAMA_ARG_SSL_KEY_FILE",
    }
)
SIMULATION: Final = "KVALET_SIM_"
"""Variables of the simulated llama-server: they are its own, not kvalet's."""
_SECRET_ENDINGS: Final = ("_API_KEY", "_ACCESS_KEY", "_SECRET", "_SECRET_KEY", "_PASSWORD")
_CACHE_VARIABLES: Final = ("LLAMA_ARG_CACHE_TYPE_K", "LLAMA_ARG_CACHE_TYPE_V")
_SPLIT_MODE: Final = "LLAMA_ARG_SPLIT_MODE"
_TENSOR_SPLIT: Final = "LLAMA_ARG_TENSOR_SPLIT"
_SPEC_TYPE: Final = "LLAMA_ARG_SPEC_TYPE"


@frozen(kw_only=True)
class LaunchDecision:
    """What was decided for one launch, as far as the environment could undo it.

    ``split`` None means that nobody planned a split. ``forced`` holds variables that other
    rules set, or remove with None; it is applied last.
    """

    split: Split | None = None
    spec: SpecMode = "off"
    extra_args: tuple[str, ...] = ()
    forced: Mapping[str, str | None] = field(factory=dict[str, "str | None"])


UNDECIDED: Final = LaunchDecision()
"""A launch that inherits everything but secrets and what is kvalet's own."""


def child_variables(env: Mapping[str, str], decision: LaunchDecision = UNDECIDED) -> dict[str, str]:
    """``env`` as the server inherits it."""
    dropped = frozenset(removed_variables(env, decision))
    child = {name: value for name, value in env.items() if name not in dropped}
    child.update({name: value for name, value in decision.forced.items() if value is not None})
    return child


def removed_variables(
    env: Mapping[str, str], decision: LaunchDecision = UNDECIDED
) -> tuple[str, ...]:
    """The names in ``env`` that the server does not inherit, sorted."""
    doomed = {name for name in env if _never_inherited(name)}
    doomed |= _split_variables(env, decision.split)
    doomed |= _drafting_variables(decision.spec, decision.extra_args)
    doomed |= {name for name, value in decision.forced.items() if value is None}
    return tuple(sorted(doomed & env.keys()))


def overriding_variables(
    env: Mapping[str, str], decision: LaunchDecision = UNDECIDED
) -> tuple[str, ...]:
    """The removed names that say something about memory: what a plan reports as removed."""
    return tuple(name for name in removed_variables(env, decision) if name.startswith("LLAMA_ARG_"))


def _never_inherited(name: str) -> bool:
    ours = name.startswith("KVALET_") and not name.startswith(SIMULATION)
    return ours or name in _ALWAYS or name.endswith(_SECRET_ENDINGS)


def _split_variables(env: Mapping[str, str], split: Split | None) -> set[str]:
    if split == "layer" and env.get(_SPLIT_MODE, "layer") != "layer":
        # Its shares were meant for the other split.
        return {_SPLIT_MODE, _TENSOR_SPLIT}
    if split == "tensor":
        packed = {name for name in _CACHE_VARIABLES if quantised(env.get(name, "f16"))}
        return packed | {_TENSOR_SPLIT}
    return set()


def _drafting_variables(spec: SpecMode, extra_args: Sequence[str]) -> set[str]:
    """Variables that would draft next to, or instead of, what was decided.

    A flag does not hide LLAMA_ARG_SPEC_TYPE from the server: both kinds would run. Whoever
    chooses the drafting by arguments of their own keeps their variables.
    """
    doomed: set[str] = set()
    if spec != "off" and not owns_speculation(extra_args):
        doomed |= {_SPEC_TYPE, *DRAFTER_VARIABLES}
    if resolve_flags(extra_args, {}).said("draft_model", "draft_hub"):
        # Or the file named by a flag would be looked for in the repository of a variable.
        doomed |= DRAFTER_VARIABLES
    return doomed
