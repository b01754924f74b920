"""Who pauses chats when the pool is full: kvalet, the server or nobody, and never two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from attrs import evolve, field, frozen

from kvalet.actors.decisions.capabilities import Capabilities
from kvalet.actors.decisions.plan.devices import MIB
from kvalet.actors.decisions.plan.flags import Argument, arguments, canonical, resolve_flags

Mode = Literal["auto", "proxy", "server"]
Parker = Literal["kvalet", "server", "nobody"]

BUDGET_FLAG: Final = "--preempt-ram"
BUDGET_VARIABLE: Final = "LLAMA_ARG_PREEMPT_RAM"
PARK_MARGIN_MIB: Final = 64
"""Held for each parked sequence beside its cells."""
SLOTS_MIN: Final = 2
"""With fewer slots a server has nobody to park for."""


@frozen(kw_only=True)
class NamedBudget:
    """A budget for parked sequences in MiB, -1 without a limit, and where it was named."""

    mib: int
    by: str


@frozen(kw_only=True)
class ParkerWish:
    """What was asked for."""

    mode: Mode = "auto"
    preempt: bool = True
    slots: int
    unified: bool = True
    extra_args: tuple[str, ...] = ()


@frozen(kw_only=True)
class ParkerDecision:
    """Who parks, and what the launch needs for it.

    ``added`` stands before the user's ``extra_args``; ``forced`` are variables to set. A server
    that is to park and was given no budget is ``unbudgeted``: see ``budgeted``.
    """

    parker: Parker
    extra_args: tuple[str, ...]
    added: tuple[str, ...] = ()
    forced: Mapping[str, str | None] = field(factory=dict[str, "str | None"])
    warnings: tuple[tuple[str, str], ...] = ()
    unbudgeted: bool = False


def named_budget(argv: Sequence[str], env: Mapping[str, str]) -> NamedBudget | None:
    """The budget that a server takes from its variables and arguments, in its own order: an
    argument beats the variable, the last one wins. What is no number is passed over."""
    found: NamedBudget | None = None
    inherited = _number(env.get(BUDGET_VARIABLE))
    if inherited is not None:
        found = NamedBudget(mib=inherited, by=BUDGET_VARIABLE)
    for argument in arguments(argv):
        mib = _number(_budget_word(argument))
        if mib is not None:
            found = NamedBudget(mib=mib, by=BUDGET_FLAG)
    return found


def parking_need(target_bytes: int, draft_bytes: int, slots: int) -> int:
    """MiB that hold every park at once: each parked history may be the whole pool."""
    each = target_bytes + draft_bytes + PARK_MARGIN_MIB * MIB
    return -(-each * slots // MIB)


def affordable(need_mib: int, free_bytes: int | None) -> int:
    """The budget of a launch that may compute again what does not fit: at most half of the free
    host memory, and something always, as zero would mean no parking."""
    if free_bytes is None:
        return need_mib
    return max(1, min(need_mib, free_bytes // 2 // MIB))


def decide_parker(wish: ParkerWish, caps: Capabilities, env: Mapping[str, str]) -> ParkerDecision:
    """Decide it before a launch. Only an owner of pausing changes anything about the launch."""
    asis = ParkerDecision(parker="kvalet", extra_args=wish.extra_args)
    if not wish.preempt:
        return _left_alone(wish, caps, env)
    if wish.mode == "proxy":
        return _stood_down(wish, caps, env)
    named = named_budget(wish.extra_args, env)
    reason = _why_not(wish, caps, named)
    if reason is None:
        return ParkerDecision(parker="server", extra_args=wish.extra_args, unbudgeted=named is None)
    if wish.mode == "server":
        told = f"the server cannot park chats, so kvalet does: {reason}"
        return ParkerDecision(
            parker="kvalet", extra_args=wish.extra_args, warnings=(("server-cannot-park", told),)
        )
    return asis


def budgeted(decision: ParkerDecision, mib: int | None) -> ParkerDecision:
    """The decision with a budget of ``mib`` where it lacks one; None: it cannot be sized, and
    neither a guess nor an unlimited budget takes its place."""
    if not decision.unbudgeted:
        return decision
    if mib is not None:
        return evolve(decision, added=(BUDGET_FLAG, str(mib)), unbudgeted=False)
    told = "the pool cannot be sized before launch, so no budget for parked chats is named"
    return evolve(decision, warnings=(*decision.warnings, ("no-park-budget", told)))


def server_parks(argv: Sequence[str], env: Mapping[str, str], caps: Capabilities) -> bool:
    """Whether a server that was started with exactly these parks chats by itself.

    What it could do does not count: without a budget the build's own default decides.
    """
    flags = resolve_flags(argv, env).flags
    if not caps.preempt_ram or not flags.unified or flags.slots < SLOTS_MIN:
        return False
    return budget_in_force(argv, env, caps) != 0


def budget_in_force(argv: Sequence[str], env: Mapping[str, str], caps: Capabilities) -> int:
    """MiB that a server started with exactly these may hold, -1 without a limit."""
    named = named_budget(argv, env)
    return caps.preempt_default if named is None else named.mib


def _why_not(wish: ParkerWish, caps: Capabilities, named: NamedBudget | None) -> str | None:
    if not caps.preempt_ram:
        return f"this build has no {BUDGET_FLAG}"
    if not wish.unified:
        return "its slots do not share one pool"
    if wish.slots < SLOTS_MIN:
        return "it has one slot only"
    if named is not None and named.mib == 0:
        return f"{named.by} is 0"
    return None


def _left_alone(wish: ParkerWish, caps: Capabilities, env: Mapping[str, str]) -> ParkerDecision:
    """Nobody is asked to park; a budget that the user named is theirs, and the server's work."""
    named = named_budget(wish.extra_args, env)
    theirs = named is not None and _why_not(wish, caps, named) is None
    return ParkerDecision(parker="server" if theirs else "nobody", extra_args=wish.extra_args)


def _stood_down(wish: ParkerWish, caps: Capabilities, env: Mapping[str, str]) -> ParkerDecision:
    """kvalet alone parks, whatever budget was named and by whom."""
    if not caps.preempt_ram:
        return ParkerDecision(parker="kvalet", extra_args=wish.extra_args)
    words = map(_budget_word, arguments(wish.extra_args))
    names = [BUDGET_FLAG] if any(word is not None and _number(word) != 0 for word in words) else []
    if _number(env.get(BUDGET_VARIABLE)) not in (None, 0):
        names.append(BUDGET_VARIABLE)
    told = f"mode proxy: kvalet parks chats, and {' and '.join(names)} is set to 0"
    return ParkerDecision(
        parker="kvalet",
        extra_args=tuple(
            word for argument in arguments(wish.extra_args) for word in _without_budget(argument)
        ),
        forced={BUDGET_VARIABLE: "0"},
        warnings=(("budget-overridden", told),) if names else (),
    )


def _without_budget(argument: Argument) -> tuple[str, ...]:
    if _budget_word(argument) is None:
        return argument.words
    return (f"{BUDGET_FLAG}=0",) if "=" in argument.words[0] else (BUDGET_FLAG, "0")


def _budget_word(argument: Argument) -> str | None:
    """The budget as it was written, an empty word where it was left out; None: another option."""
    name, joined, tail = argument.words[0].partition("=")
    if canonical(name) != BUDGET_FLAG:
        return None
    return tail if joined else argument.value or ""


def _number(word: str | None) -> int | None:
    try:
        return None if word is None else int(word)
    except ValueError:
        return None
