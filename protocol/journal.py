"""The journal's lines: one header, then one decision per line.

A decision stores the command *and* the events it produced: folding the events gives the
state, deciding the commands again must give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvalet.protocol.commands import Command
from kvalet.protocol.errors import JournalFault
from kvalet.protocol.events import AnyEvent
from kvalet.protocol.ids import Nanos, Seq

SCHEMA = 1


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Line 1. ``config`` is the whole effective configuration less secrets."""

    schema: int
    versions: dict[str, str]
    config: dict[str, object]


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command, when it was decided (wall clock), and what followed."""

    seq: Seq
    at_ns: Nanos
    command: Command
    events: list[AnyEvent]


_encoder = msgspec.json.Encoder()
_decisions = msgspec.json.Decoder(Decision)
_headers = msgspec.json.Decoder(Header)


def encode(line: Header | Decision) -> bytes:
    """One line, newline included."""
    return _encoder.encode(line) + b"\n"


def encode_events(events: Iterable[AnyEvent]) -> bytes:
    """The bytes that two runs of the decision core are compared by."""
    return _encoder.encode(list(events))


def decode_header(line: bytes) -> Header:
    """The header behind line 1. Raises JournalFault."""
    try:
        header = _headers.decode(line)
    except msgspec.DecodeError as error:
        raise JournalFault(f"line 1 at byte 0 is not a journal header: {error}") from error
    if header.schema != SCHEMA:
        raise JournalFault(f"journal schema {header.schema} is not {SCHEMA}; use another state dir")
    return header


def decode_decision(line: bytes, number: int, offset: int, expected: int) -> Decision:
    """The decision in one line; its ``seq`` must be ``expected``. Raises JournalFault."""
    try:
        decision = _decisions.decode(line)
    except msgspec.DecodeError as error:
        raise JournalFault(f"line {number} at byte {offset} is corrupt: {error}") from error
    if decision.seq != expected:
        raise JournalFault(
            f"line {number} at byte {offset} has seq {decision.seq}, expected {expected}"
        )
    return decision


class Reader:
    """Reads a journal from any pieces of its bytes, in order.

    ``offset`` counts the bytes of whole lines read so far. What remains in ``rest`` after
    the last piece is a torn tail: its append never completed, so nothing was done for it.
    """

    def __init__(self) -> None:
        self.header: Header | None = None
        self.offset = 0
        self.lines = 0
        self.seq = 0
        self.rest = b""

    def feed(self, chunk: bytes) -> Iterator[Decision]:
        """Decisions completed by ``chunk``. Raises JournalFault at a corrupt line."""
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        for line in whole:
            decision = self._line(line)
            self.offset += len(line) + 1
            if decision is not None:
                yield decision

    def _line(self, line: bytes) -> Decision | None:
        self.lines += 1
        if self.header is None:
            self.header = decode_header(line)
            return None
        decision = decode_decision(line, self.lines, self.offset, self.seq + 1)
        self.seq = decision.seq
        return decision
