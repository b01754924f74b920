"""Settings that were made at run time and outlive kvalet: one small file in the state directory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvalet.actors.decisions.exact import WISHES
from kvalet.protocol.errors import ClientFault, EnvironmentFault

FILE: Final = "settings.json"


class Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is stored; None: nothing was said."""

    exact_concurrency: str | None = None


def read_stored(state_dir: Path) -> Stored:
    """What was stored last. A file that is not there, or damaged, says nothing."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        stored = msgspec.json.decode((state_dir / FILE).read_bytes(), type=Stored)
        if stored.exact_concurrency in (None, *WISHES):
            return stored
    return Stored()


def write_stored(state_dir: Path, stored: Stored) -> None:
    """Replace the file as a whole. Raises EnvironmentFault when the disk refuses."""
    fresh = state_dir / f".{FILE}.{os.getpid()}"
    try:
        fresh.write_bytes(msgspec.json.encode(stored))
        fresh.replace(state_dir / FILE)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise EnvironmentFault(f"cannot store the setting: {error.strerror}") from error


def parse_stored(body: bytes) -> Stored:
    """A setting from a request. Raises ClientFault that names what is allowed."""
    allowed = ", ".join(WISHES)
    try:
        stored = msgspec.json.decode(body, type=Stored)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ClientFault(f"the body must be a JSON object: {error}") from None
    if stored.exact_concurrency not in (None, *WISHES):
        raise ClientFault(
            f"exact_concurrency must be {allowed}, or null for none, "
            f"not {stored.exact_concurrency!r}"
        )
    return stored
