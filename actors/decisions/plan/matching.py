"""Whether a load that is asked for is the one that runs already."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, field, frozen

from kvalet.actors.decisions.plan.extras import split_mode_of
from kvalet.actors.decisions.plan.flag_table import MEMORY_VARIABLES
from kvalet.actors.decisions.plan.flags import Resolved, arguments, resolve_flags
from kvalet.actors.decisions.plan.server_flags import Split
from kvalet.actors.decisions.plan.speculation import SpecMode

Variables = tuple[tuple[str, str], ...]


def _copied(env: Mapping[str, str] | Variables) -> Variables:
    """What ``env`` says about memory, and nothing else: the rest holds secrets."""
    pairs = env if isinstance(env, tuple) else tuple(env.items())
    return tuple(sorted(pair for pair in pairs if pair[0] in MEMORY_VARIABLES))


@frozen(kw_only=True)
class Request:
    """One load as it was asked for: a copy that no later change of the caller's reaches.

    ``cells`` and ``slots`` are None when they were left to the plan. ``spec`` is the mode that
    was requested, whatever the launch fell back to.
    """

    model: str
    cells: int | None = None
    slots: int | None = None
    tensor: bool = False
    cache_type: str | None = None
    spec: SpecMode = "off"
    extra_args: tuple[str, ...] = field(default=(), converter=tuple[str, ...])
    variables: Variables = field(default=(), converter=_copied)

    @property
    def asked(self) -> Resolved:
        """The memory flags of the arguments over the variables."""
        return resolve_flags(self.extra_args, dict(self.variables))

    @property
    def split(self) -> Split:
        """The split that was requested."""
        return split_mode_of(self.asked, tensor=self.tensor)


@frozen(kw_only=True)
class Loaded:
    """A healthy launch: what was asked, how it really runs, and its number.

    ``generation`` grows with every launch and tells its messages from an earlier one's.
    """

    request: Request
    split: Split
    generation: int


def is_same_load(loaded: Loaded, wanted: Request) -> bool:
    """Whether ``wanted`` changes nothing, so that the server can stay.

    Requested modes are compared, not what became of them: a server that fell back from tensor
    to layer split, or from its drafter, is still the answer to the same request.
    """
    before = loaded.request
    return (
        _plain(before) == _plain(wanted)
        and _memory(before) == _memory(wanted)
        and _others(before) == _others(wanted)
        and _same_split(loaded, wanted)
    )


def _plain(request: Request) -> tuple[object, ...]:
    return request.model, request.cells, request.slots, request.cache_type, request.spec


def _memory(request: Request) -> object:
    """All memory flags but the split's mode, which a variable may only ask for."""
    asked = request.asked
    flags = evolve(asked.flags, split_mode=None)
    paired = asked.said("split_mode", by="env") and asked.flags.split_mode != "layer"
    if paired and asked.said("tensor_split", by="env"):
        return evolve(flags, tensor_split=())
    return flags


def _others(request: Request) -> tuple[tuple[str, ...], ...]:
    """The arguments that say nothing about memory, with flags as the server looks them up."""
    return tuple(
        (argument.name, *argument.words[1:])
        for argument in arguments(request.extra_args)
        if argument.flag is None
    )


def _same_split(loaded: Loaded, wanted: Request) -> bool:
    before = loaded.request
    if before.split == wanted.split:
        return True
    # A variable's wish counts against a server that did split by tensor. One that runs by
    # layer would be downgraded to the same again.
    by_variable: Split = "tensor" if loaded.split == "tensor" else "layer"
    sides = [
        _said_split(side) or (by_variable if side.split == "tensor" else "layer")
        for side in (before, wanted)
    ]
    return sides[0] == sides[1]


def _said_split(request: Request) -> Split | None:
    """The split that was named by somebody, not inherited; None: nobody did."""
    asked = request.asked
    if asked.said("split_mode"):
        return asked.flags.split_mode
    return "tensor" if request.tensor else None
