"""Server-sent events: bytes in at any cut, whole events out, no byte lost or changed.

Lines end at LF, CRLF or CR and at nothing else; a U+2028 inside a JSON string is text.
"""

from __future__ import annotations

import re

import msgspec

from kvalet.protocol.errors import ServerFault

EVENT_BYTES_MAX = 16 * 1024 * 1024

DONE = b"data: [DONE]\n\n"
"""The event that ends a successful OpenAI stream."""

# Atomic, or the pair below would backtrack and take one CRLF for two ends of line.
_LINE_END = re.compile(rb"(?>\r\n|\r|\n)")
_EVENT_END = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LONGEST_HALF_END = 3


class SseEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event, or one block of comments, with its exact bytes.

    ``data``: the data lines joined by LF, None when there is none. ``comments``: each
    comment's text behind the colon, less one leading space. ``complete`` is False for what
    a broken stream left behind; such a rest is never interpreted.
    """

    raw: bytes
    data: bytes | None = None
    event: bytes | None = None
    comments: tuple[bytes, ...] = ()
    complete: bool = True


class SseSplitter:
    """Cuts one stream into events. ``limit``: the most bytes one event may have."""

    def __init__(self, limit: int = EVENT_BYTES_MAX) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._searched = 0
        self._returns = False

    @property
    def at_boundary(self) -> bool:
        """Whether nothing is carried over: a comment may be inserted at this point."""
        return not self._rest

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events that ``chunk`` completes. ServerFault when one outgrows the limit."""
        if not self._rest and _is_one_datum(chunk) and len(chunk) <= self._limit:
            return [SseEvent(raw=chunk, data=chunk[6:-2])]
        self._rest += chunk
        self._returns = self._returns or b"\r" in chunk
        return self._take()

    def flush(self) -> list[SseEvent]:
        """What is left when the stream has ended; at most one event."""
        if not self._rest:
            return []
        raw = bytes(self._rest)
        whole = self._event_end(0) == len(raw)
        self._rest.clear()
        self._searched = 0
        return [_parse(raw) if whole else SseEvent(raw=raw, complete=False)]

    def _take(self) -> list[SseEvent]:
        events: list[SseEvent] = []
        start = 0
        while (end := self._settled_end(start)) is not None:
            self._check(end - start)
            events.append(_parse(bytes(self._rest[start:end])))
            start = end
        del self._rest[:start]
        self._searched = len(self._rest)
        self._check(self._searched)
        return events

    def _settled_end(self, start: int) -> int | None:
        end = self._event_end(start)
        if end == len(self._rest) and self._rest.endswith(b"\r"):
            return None  # An LF may follow and belongs to this event.
        return end

    def _event_end(self, start: int) -> int | None:
        if self._rest.startswith(b"\n", start):
            return start + 1
        if self._rest.startswith(b"\r", start):
            return start + (2 if self._rest.startswith(b"\r\n", start) else 1)
        # An end may have begun in the bytes that were searched before.
        begin = max(start, self._searched - _LONGEST_HALF_END)
        if not self._returns:  # Much faster than the general search.
            at = self._rest.find(b"\n\n", begin)
            return None if at < 0 else at + 2
        found = _EVENT_END.search(self._rest, begin)
        return None if found is None else found.end()

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise ServerFault(f"one stream event exceeds {self._limit} bytes")


def comment(text: str) -> bytes:
    """The bytes of a comment that stands alone. ``text`` has no line end in it."""
    return b": " + text.encode() + b"\n\n"


def data(payload: bytes) -> bytes:
    """The bytes of an event with one data line. ``payload`` has no line end in it."""
    return b"data: " + payload + b"\n\n"


def _is_one_datum(chunk: bytes) -> bool:
    # By far the most frequent read: exactly one `data: …` line and its blank line.
    return (
        chunk.startswith(b"data: ")
        and chunk.find(b"\n") == len(chunk) - 2
        and chunk.endswith(b"\n\n")
        and b"\r" not in chunk
    )


def _parse(raw: bytes) -> SseEvent:
    if _is_one_datum(raw):
        return SseEvent(raw=raw, data=raw[6:-2])
    lines: list[bytes] = []
    comments: list[bytes] = []
    name: bytes | None = None
    for line in _LINE_END.split(raw):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value
        elif not field and line:
            comments.append(value)
    return SseEvent(
        raw=raw,
        data=b"\n".join(lines) if lines else None,
        event=name,
        comments=tuple(comments),
    )
