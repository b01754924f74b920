"""Exact concurrency: whether a launch asks for it, and whether it can be certified.

In this mode of a server that parks, an answer's bytes depend neither on neighbours nor on parks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from attrs import frozen

from kvalet.actors.decisions.parker import SLOTS_MIN, Parker
from kvalet.actors.decisions.plan.flags import arguments, last_word, resolve_flags
from kvalet.actors.decisions.plan.quants import quantised

Wish = Literal["auto", "off", "on"]
State = Literal["on", "off", "unavailable"]

SETTING: Final = "KVALET_EXACT"
VARIABLE: Final = "LLAMA_EXACT_CONCURRENCY"
WISHES: Final[dict[str, Wish]] = {"auto": "auto", "off": "off", "on": "on"}

_UNSET: Final = frozenset({"", "0", "no", "off", "false"})
_REUSE: Final = (("--cache-reuse",), "LLAMA_ARG_CACHE_REUSE")
_SHIFT: Final = {"--context-shift": True, "--no-context-shift": False}
_SHIFT_VARIABLE: Final = "LLAMA_ARG_CONTEXT_SHIFT"
_N_CPU_MOE: Final = (("-ncmoe", "--n-cpu-moe"), "LLAMA_ARG_N_CPU_MOE")
_REFUSALS: Final = ("exact concurrency:", "exact_concurrency", "exact-concurrency")


@frozen(kw_only=True)
class Start:
    """Whether the child is given the mode; ``reason`` says why not, when it was wished for."""

    given: bool
    reason: str = ""


NOT_STARTED: Final = Start(given=False)


@frozen(kw_only=True)
class Evidence:
    """What ran: the launch as it was spawned, and what its server says.

    ``reported`` is ``exact_concurrency`` of ``/props``, None where it has none. ``need_mib`` is
    what all parks may need, None when that is not known; ``free_mib`` the host memory that is
    left for it, once the weights are loaded.
    """

    start: Start
    refusal: str = ""
    reported: bool | None = None
    parks: bool = False
    contradictions: tuple[str, ...] = ()
    need_mib: int | None = None
    budget_mib: int = 0
    free_mib: int | None = None


@frozen(kw_only=True)
class Verdict:
    """The state that may be told, and why it is not ``on``."""

    state: State
    reason: str = ""


Level = Literal["environment", "request", "stored", "inherited", "default"]


def decide_wish(
    env: Mapping[str, str], *, request: str | None = None, stored: str | None = None
) -> tuple[Wish, Level]:
    """What was wished, and at which level: our own variable, else the request, else the stored
    setting, else what the server would inherit, else ``off``. Words that are none of the three
    are passed over."""
    levels: tuple[tuple[Level, str | None], ...] = (
        ("environment", env.get(SETTING)),
        ("request", request),
        ("stored", stored),
    )
    for level, word in levels:
        wish = WISHES.get((word or "").strip().lower())
        if wish is not None:
            return wish, level
    if env.get(VARIABLE, "").strip().lower() not in _UNSET:
        return "on", "inherited"
    return "off", "default"


def contradictions(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Options of the child that the mode excludes, each by the name a person can look for.

    ``env`` is what the child receives. Options that repeat count by their last value, but for
    those that place experts on the CPU: no later one takes that back.
    """
    return tuple(dict.fromkeys(_contradictions(argv, env)))


def _contradictions(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    flags = resolve_flags(argv, env).flags
    if last_word(arguments(argv), env, *_REUSE) not in (None, "0"):
        yield "--cache-reuse"
    if _shifts(argv, env):
        yield "--context-shift"
    if not flags.kv_offload:
        yield "--no-kv-offload"
    if flags.flash_attn == "off":
        yield "--flash-attn off"
    if quantised(flags.type_k):
        yield f"--cache-type-k {flags.type_k}"
    if quantised(flags.type_v):
        yield f"--cache-type-v {flags.type_v}"
    if not flags.unified:
        yield "--no-kv-unified"
    if flags.cpu_moe:
        yield "--cpu-moe"
    names, variable = _N_CPU_MOE
    counts = [env.get(variable), *(one.value for one in arguments(argv) if one.name in names)]
    if any(count not in (None, "", "0") for count in counts):
        yield "--n-cpu-moe"
    for pair in flags.override_tensors:
        if pair.rpartition("=")[2].strip().upper().startswith("CPU"):
            yield f"--override-tensor {pair}"


def preflight(
    wish: Wish, *, parker: Parker, preempt: bool, parks: bool, slots: int, excluded: Sequence[str]
) -> Start:
    """Whether to start in the mode. ``auto`` goes without it, where ``on`` has to fail."""
    if wish == "off":
        return Start(given=False)
    if not preempt:
        # A budget that somebody named does not switch it on again.
        return Start(given=False, reason="preemption is off")
    if parker != "server":
        return Start(given=False, reason="kvalet parks chats itself on this launch")
    if not parks:
        return Start(given=False, reason="this launch parks nothing")
    if slots < SLOTS_MIN:
        return Start(given=False, reason="there is one slot only")
    if excluded:
        return Start(given=False, reason=f"{', '.join(excluded)} excludes it")
    return Start(given=True)


def exact_variable(start: Start) -> dict[str, str | None]:
    """What the child's environment says of the mode: set, or not there at all."""
    return {VARIABLE: "1" if start.given else None}


def refusal_in(lines: Sequence[str]) -> str:
    """The line with which a child that ended refused the mode; empty: it ended for another
    reason."""
    for line in lines:
        if any(words in line.lower() for words in _REFUSALS):
            return line.strip()
    return ""


def judge(wish: Wish, evidence: Evidence) -> Verdict:
    """The certificate: ``on`` only when everything that it rests on was seen."""
    if wish == "off":
        return Verdict(state="off")
    reason = _missing(evidence)
    return Verdict(state="unavailable", reason=reason) if reason else Verdict(state="on")


def _missing(evidence: Evidence) -> str:
    if evidence.refusal:
        return f"the server refused the mode: {evidence.refusal}"
    if not evidence.start.given:
        return f"the load is not running with it: {evidence.start.reason}"
    if evidence.contradictions:
        return f"{', '.join(evidence.contradictions)} excludes it"
    if evidence.reported is not True:
        return "the server came up without the mode"
    if not evidence.parks:
        return "the server does not park on this launch"
    if evidence.need_mib is None:
        return "what its parks may need is not known, so none is certified to be held"
    short = _shortfall(evidence, evidence.need_mib)
    if short:
        return (
            "the mode runs but cannot hold every park, so a chat that is computed again after "
            f"such a park can differ: {short}"
        )
    return ""


def _shortfall(evidence: Evidence, need: int) -> str:
    budget, free = evidence.budget_mib, evidence.free_mib
    if 0 <= budget < need:
        return f"--preempt-ram is {budget} MiB, raise it to {need}"
    if free is not None and free < need:
        return f"its parks may need {need} MiB of host memory, and {free} MiB are free"
    return ""


def _shifts(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    shifts = env.get(_SHIFT_VARIABLE, "").strip().lower() not in {*_UNSET, "disabled"}
    for argument in arguments(argv):
        shifts = _SHIFT.get(argument.name, shifts)
    return shifts
