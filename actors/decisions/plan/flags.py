"""The one reader of llama-server's arguments and environment; everybody who asks asks here.

Flags beat variables and a later flag beats an earlier one, except where the server keeps
both. Nothing here fails: what the server would refuse becomes a problem, and the value that
stood before it stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from attrs import evolve, field, fields, frozen

from kvalet.actors.decisions.plan.flag_table import FLAG_OF, MEMORY_FLAGS, Flag
from kvalet.actors.decisions.plan.flag_values import FALSE_WORDS, TRUE_WORDS, Reading, refused
from kvalet.actors.decisions.plan.flag_words import ONE_VALUE, PRESETS, TWO_VALUES
from kvalet.actors.decisions.plan.server_flags import ServerFlags

Source = Literal["flag", "env", "default"]

_FIELDS: Final = tuple(entry.name for entry in fields(ServerFlags))
_ATTACHED: Final = re.compile(r"(-[a-z]+)(-?[0-9].*)")
_SHOWN_MAX: Final = 60


@frozen(kw_only=True)
class Argument:
    """One option on a command line: ``words`` as they were written, ``name`` as the server
    looks it up, ``value`` None when the option takes none or the line ends before it.

    ``joined`` marks a value written in the same word, which the server does not accept.
    """

    words: tuple[str, ...]
    name: str
    value: str | None = None
    joined: bool = False

    @property
    def flag(self) -> Flag | None:
        """The option of the memory table, if it is one."""
        return FLAG_OF.get(self.name)


@frozen(kw_only=True)
class Resolved:
    """One launch's memory flags, where each field came from, and what is wrong with the words."""

    flags: ServerFlags
    problems: tuple[str, ...] = ()
    sources: Mapping[str, Source] = field(factory=dict[str, Source])

    def said(self, *names: str, by: Source = "flag") -> bool:
        """Whether any of these fields was set on the command line, or ``by`` another source."""
        return any(self.sources.get(name, "default") == by for name in names)


def resolve_flags(argv: Sequence[str], env: Mapping[str, str]) -> Resolved:
    """What llama-server makes of ``argv`` (the program left out) and ``env``."""
    state = _State()
    for flag in MEMORY_FLAGS:
        _apply_variable(state, flag, env)
    for argument in arguments(argv):
        _apply_argument(state, argument)
    return Resolved(
        flags=evolve(ServerFlags(), **state.chosen),
        problems=tuple(dict.fromkeys(state.problems)),
        sources={name: state.sources.get(name, "default") for name in _FIELDS},
    )


def arguments(argv: Sequence[str]) -> Iterator[Argument]:
    """Cut a command line into options, each with the words that belong to it.

    A word that no option owns is an argument of its own.
    """
    at = 0
    while at < len(argv):
        argument = _argument(argv, at)
        yield argument
        at += len(argument.words)


def last_word(
    given: Iterable[Argument], env: Mapping[str, str], names: Collection[str], variable: str
) -> str | None:
    """The value that counts of an option outside the memory table: the last one on the command
    line, whatever its spelling, and else the variable's."""
    words = [argument.value for argument in given if argument.name in names]
    return words[-1] if words else env.get(variable)


def canonical(word: str) -> str:
    """``word`` as the server looks it up: a long flag may be written with underscores."""
    return word.replace("_", "-") if word.startswith("--") else word


def ubatch_of(flags: ServerFlags, *, ctx: int | None = None) -> int:
    """Tokens that one pass evaluates at most: never more than a batch, nor than ``ctx``."""
    batch = flags.batch if ctx is None else min(flags.batch, ctx)
    return min(batch, flags.ubatch) if flags.ubatch else batch


def _argument(argv: Sequence[str], at: int) -> Argument:
    word = argv[at]
    name = canonical(word)
    count = _values_of(name)
    if count:
        words = tuple(argv[at : at + 1 + count])
        return Argument(words=words, name=name, value=words[1] if len(words) > 1 else None)
    if name in FLAG_OF:
        return Argument(words=(word,), name=name)
    head, equals, tail = word.partition("=")
    if equals and canonical(head) in FLAG_OF:
        return Argument(words=(word,), name=canonical(head), value=tail, joined=True)
    match = _ATTACHED.fullmatch(word)
    if match is not None and _values_of(match[1]) and match[1] in FLAG_OF:
        return Argument(words=(word,), name=match[1], value=match[2], joined=True)
    return Argument(words=(word,), name=name)


def _values_of(name: str) -> int:
    if name in TWO_VALUES:
        return 2
    flag = FLAG_OF.get(name)
    return int(flag.read is not None if flag is not None else name in ONE_VALUE)


@frozen
class _State:
    chosen: dict[str, Any] = field(factory=dict[str, Any])
    sources: dict[str, Source] = field(factory=dict[str, Source])
    problems: list[str] = field(factory=list[str])

    def take(self, flag: Flag, reading: Reading, said: str, source: Source) -> None:
        if reading.problem:
            self.problems.append(f"{said} {reading.problem}")
        if not reading.applied:
            return
        value: Any = reading.value
        if flag.merge is not None and flag.field in self.chosen:
            value = flag.merge(self.chosen[flag.field], value)
        # None is what a field holds when nothing is said, or the type's own default.
        self.chosen[flag.field] = value
        self.sources[flag.field] = source


def _apply_variable(state: _State, flag: Flag, env: Mapping[str, str]) -> None:
    if not flag.env:
        return
    if flag.env_off and flag.env_off in env:
        state.take(flag, Reading(flag.unsets), flag.env_off, "env")
        return
    word = env.get(flag.env)
    if word is None:
        return
    said = f"{flag.env}={_shown(word)}"
    if flag.removed:
        state.problems.append(f"{flag.env} {flag.removed}")
    if flag.read is not None:
        state.take(flag, flag.read(word), said, "env")
    elif word in TRUE_WORDS:
        state.take(flag, Reading(flag.sets), said, "env")
    elif flag.off:
        known = word in FALSE_WORDS
        state.take(flag, Reading(flag.unsets) if known else refused("is no boolean"), said, "env")


def _apply_argument(state: _State, argument: Argument) -> None:
    if argument.name in PRESETS:
        state.problems.append(f"{argument.name} picks a model and sizes that nobody can plan for")
    flag = argument.flag
    if flag is None:
        return
    said = " ".join(_shown(word) for word in argument.words)
    if flag.removed:
        state.problems.append(f"{argument.name} {flag.removed}")
    if argument.joined:
        state.problems.append(f"{said} must be written as two words")
    if flag.read is None:
        if not argument.joined:
            value = flag.unsets if argument.name in flag.off else flag.sets
            state.take(flag, Reading(value), said, "flag")
    elif argument.value is None:
        state.problems.append(f"{argument.name} lacks its value")
    else:
        state.take(flag, flag.read(argument.value), said, "flag")


def _shown(word: str) -> str:
    plain = word if word.isprintable() and word else repr(word)
    return plain if len(plain) <= _SHOWN_MAX else plain[:_SHOWN_MAX] + "…"
