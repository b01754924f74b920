"""What goes wrong on purpose, as ``KVALET_SIM_FAULTS`` lists it."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

OUT_OF_MEMORY: Final = -9
ABORT: Final = -6

REFUSAL: Final = "exact concurrency: this model is not supported, refusing to load"


class Crash(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="crash"):
    """End the process once ``at_token`` tokens were said: 1 is the first decode.

    ``when`` ``mtp`` asks for drafting with heads of the model itself, ``mtp_tensor`` for a
    tensor split besides.
    ``code``: an exit status, or a signal as a negative number.
    """

    at_token: int = 1
    when: Literal["always", "mtp", "mtp_tensor"] = "always"
    code: int = ABORT


class Hang(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hang"):
    """Say nothing more once ``at_token`` tokens were said; connections stay open."""

    at_token: int = 1


class SlowMetrics(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="slow_metrics"
):
    """Let ``/metrics`` take so long."""

    seconds: float = 3.0


class RefuseExact(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="refuse_exact"
):
    """Refuse to start in exact mode, with ``line`` as the last words."""

    line: str = REFUSAL


class IgnoreExact(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ignore_exact"
):
    """Start as if the exact variable were not there."""


class ExitAtStart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="exit"
):
    """End while loading with ``code`` and ``line``."""

    code: int = 1
    line: str = "exiting due to model loading error"


class SplitWrites(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="split_writes"
):
    """Write streams byte by byte."""


class Broken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="500"):
    """Answer the next ``times`` requests whose path begins with ``path`` with a 500."""

    path: str = "/"
    times: int = 1


class RestoreFails(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="restore_fails"
):
    """Let the next ``times`` attempts to bring a parked sequence back fail."""

    times: int = 8


Fault = (
    Crash
    | Hang
    | SlowMetrics
    | RefuseExact
    | IgnoreExact
    | ExitAtStart
    | SplitWrites
    | Broken
    | RestoreFails
)


def read_faults(text: str) -> tuple[Fault, ...]:
    """The faults of a JSON list. ValueError says what is wrong with it."""
    try:
        return tuple(msgspec.json.decode(text or "[]", type=list[Fault]))
    except msgspec.MsgspecError as error:
        raise ValueError(f"KVALET_SIM_FAULTS: {error}") from None
