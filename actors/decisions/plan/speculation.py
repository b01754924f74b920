"""Which drafting a launch gets, what it drafts with, and the flags that say so."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

from attrs import frozen

from kvalet.actors.decisions.plan.flag_values import MODEL_TYPES, MTP_TYPES, spec_names
from kvalet.actors.decisions.plan.flags import Resolved, arguments
from kvalet.actors.decisions.plan.server_flags import DRAFT_MAX, ServerFlags

SpecMode = Literal["off", "default", "ngram", "mtp", "mtp+ngram"]
"""What kvalet is asked to do about drafting; ``off`` leaves it to the server's own settings."""

SPEC_FLAGS: Final = frozenset({"--spec-type", "--spec-default"})

DRAFTER_VARIABLES: Final = frozenset(
    {
        *("LLAMA_ARG_SPEC_DRAFT_MODEL", "LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
        # What builds before the renaming read.
        *("LLAMA_ARG_MODEL_DRAFT", "LLAMA_ARG_HFD_REPO"),
    }
)
"""The variables that name a separate drafter."""

_DEFAULT_TYPE: Final = "ngram-mod"
_NO_DEVICE: Final = frozenset({"none", "cpu"})


@frozen(kw_only=True)
class Drafter:
    """The second model that will load: a local file, or a repository that cannot be sized."""

    path: str | None = None
    hub: str | None = None
    on_gpu: bool = True

    @property
    def sizeable(self) -> bool:
        """Whether a file on this machine tells what it takes."""
        return self.hub is None and self.path is not None


def owns_speculation(extra_args: Sequence[str]) -> bool:
    """Whether the user's own arguments choose the drafting."""
    return any(argument.name in SPEC_FLAGS for argument in arguments(extra_args))


def effective_spec_types(
    argv: Sequence[str], env: Mapping[str, str], *, accumulate: bool = True
) -> tuple[str, ...]:
    """The speculative types of a launch, ``none`` left out.

    llama-server adds every occurrence to the environment's types. With ``accumulate`` False
    only the last occurrence counts, and any occurrence hides the environment: what an old
    server does, and nobody else.
    """
    chosen: tuple[str, ...] = ()
    for word in _spec_words(argv, env):
        types = spec_names(word)
        chosen = tuple(dict.fromkeys((*chosen, *types))) if accumulate else types
    return chosen


def _spec_words(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    inherited = env.get("LLAMA_ARG_SPEC_TYPE")
    words = [] if inherited is None else [inherited]
    for argument in arguments(argv):
        if argument.name == "--spec-default":
            words.append(_DEFAULT_TYPE)
        elif argument.name == "--spec-type" and argument.value is not None:
            words.append(argument.value)
    return words


def emits_mtp(flags: ServerFlags) -> bool:
    """Whether the server will draft with the model's own heads, if the model has any."""
    return not MTP_TYPES.isdisjoint(flags.spec_types)


def emits_draft_model(flags: ServerFlags) -> bool:
    """Whether the server will draft with a second model by a type that needs one."""
    return not MODEL_TYPES.isdisjoint(flags.spec_types)


def draft_max_of(flags: ServerFlags) -> int:
    """Tokens that one draft may have."""
    return DRAFT_MAX if flags.draft_max is None else flags.draft_max


def drafter_of(resolved: Resolved, *, ours: str | None = None) -> Drafter | None:
    """The separate drafter that loads, or None.

    The user's arguments name it first, then ``ours`` (the file that the launcher found for
    drafting that it chose itself), then the environment. Arguments that choose the drafting
    keep ours out. On one level a repository wins, since the server then reads the file's name
    inside it.
    """
    flags = resolved.flags
    on_gpu = _draft_on_gpu(flags)
    if resolved.said("draft_model", "draft_hub"):
        hub = flags.draft_hub if resolved.said("draft_hub") else None
        path = flags.draft_model if resolved.said("draft_model") else None
        return Drafter(path=path, hub=hub, on_gpu=on_gpu)
    if ours is not None and not resolved.said("spec_types"):
        return Drafter(path=ours, on_gpu=on_gpu)
    if flags.draft_model is None and flags.draft_hub is None:
        return None
    return Drafter(path=flags.draft_model, hub=flags.draft_hub, on_gpu=on_gpu)


def _draft_on_gpu(flags: ServerFlags) -> bool:
    """Whether a separate drafter takes device memory; heads inside the model follow the model."""
    if flags.draft_gpu_layers == 0:
        return False
    devices = flags.draft_devices
    return devices is None or any(name.lower() not in _NO_DEVICE for name in devices)


def degraded(mode: SpecMode) -> SpecMode:
    """``mode`` without multi-token prediction: the half that needs no model stays."""
    match mode:
        case "mtp":
            return "default"
        case "mtp+ngram":
            return "ngram"
        case "off" | "default" | "ngram":
            return mode


def spec_flags(
    mode: SpecMode,
    extra_args: Sequence[str] = (),
    *,
    known_types: Collection[str],
    mtp_possible: bool = True,
) -> tuple[str, ...]:
    """The flags that make the server draft as ``mode`` says, whatever the environment says.

    ``known_types`` are the types of this binary. Without one for multi-token prediction, or
    when the model has no heads (``mtp_possible``), the rest of the mode is emitted. Users who
    choose the drafting themselves get nothing from us, as the server would do both.
    """
    if mode == "off" or owns_speculation(extra_args):
        return ()
    mtp = next((name for name in sorted(MTP_TYPES) if name in known_types), None)
    if mtp is None or not mtp_possible:
        mode = degraded(mode)
    if mode == "default":
        return ("--spec-default",)
    types = {"ngram": _DEFAULT_TYPE, "mtp": f"{mtp}", "mtp+ngram": f"{mtp},{_DEFAULT_TYPE}"}
    return ("--spec-type", types[mode])
