"""Journal lines: what is written is read again, from any pieces; what is not, is told."""

from __future__ import annotations

import msgspec
import pytest

from kvalet.protocol import commands as c
from kvalet.protocol.errors import JournalFault
from kvalet.protocol.ids import Nanos, RequestId, Seq
from kvalet.protocol.journal import (
    SCHEMA,
    Decision,
    Header,
    Reader,
    decode_decision,
    decode_header,
    encode,
    encode_events,
)

HEADER = Header(schema=SCHEMA, versions={"kvalet": "0.1.0"}, config={"ctx": 2048})


def decision(seq: int) -> Decision:
    command = c.Leave(request=RequestId(f"r{seq}"), reason="left \u2028 for good")
    return Decision(seq=Seq(seq), at_ns=Nanos(seq * 10), command=command, events=[])


JOURNAL = encode(HEADER) + b"".join(encode(decision(seq)) for seq in (1, 2, 3))


def test_a_line_is_one_line_and_reads_back_the_same() -> None:
    line = encode(decision(1))

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_decision(line[:-1], 2, 0, 1) == decision(1)
    assert decode_header(encode(HEADER)) == HEADER


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, len(JOURNAL)])
def test_a_journal_reads_the_same_from_any_pieces(size: int) -> None:
    reader = Reader()
    read = [
        found
        for start in range(0, len(JOURNAL), size)
        for found in reader.feed(JOURNAL[start : start + size])
    ]

    assert read == [decision(1), decision(2), decision(3)]
    assert reader.header == HEADER
    assert (reader.offset, reader.seq, reader.rest) == (len(JOURNAL), 3, b"")


def test_a_tail_without_its_newline_is_kept_apart() -> None:
    for end in range(len(JOURNAL)):
        reader = Reader()
        read = list(reader.feed(JOURNAL[:end]))

        assert reader.offset + len(reader.rest) == end
        assert len(read) == max(0, JOURNAL[:end].count(b"\n") - 1)


def test_a_corrupt_line_is_told_with_its_line_and_byte() -> None:
    first = len(encode(HEADER) + encode(decision(1)))
    broken = JOURNAL[: first + 4] + b"\x00" + JOURNAL[first + 5 :]

    with pytest.raises(JournalFault, match=f"line 3 at byte {first} is corrupt"):
        list(Reader().feed(broken))


def test_decisions_before_a_corrupt_line_are_still_read() -> None:
    read: list[Decision] = []
    with pytest.raises(JournalFault):
        read.extend(Reader().feed(encode(HEADER) + encode(decision(1)) + b"{}\n"))
    found = Reader().feed(encode(HEADER) + encode(decision(1)) + b"{}\n")

    assert next(found) == decision(1)


@pytest.mark.parametrize(("seq", "told"), [(1, "seq 1"), (3, "seq 3"), (0, "seq 0")])
def test_a_gap_a_repeat_and_a_step_back_are_told(seq: int, told: str) -> None:
    with pytest.raises(JournalFault, match=f"line 3 at byte .* {told}, expected 2"):
        list(Reader().feed(encode(HEADER) + encode(decision(1)) + encode(decision(seq))))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b'{"seq":1,"at_ns":1,"command":{"kind":"leave","request":"r1"},"events":[],"more":1}',
        b'{"seq":1,"at_ns":1,"command":{"kind":"leave","request":"r1","text":"x"},"events":[]}',
        b'{"seq":1,"at_ns":1,"command":{"kind":"unheard-of"},"events":[]}',
        b'{"seq":1,"at_ns":1,"command":{"kind":"leave","request":"r1"},"events":[{"kind":"x"}]}',
        b'{"seq":"1","at_ns":1,"command":{"kind":"leave","request":"r1"},"events":[]}',
        b"\xff\xfe",
    ],
)
def test_a_strange_line_is_no_decision(line: bytes) -> None:
    with pytest.raises(JournalFault, match="line 2 at byte 9"):
        decode_decision(line, 2, 9, 1)


def test_another_schema_is_refused_by_name() -> None:
    other = msgspec.json.encode(Header(schema=SCHEMA + 1, versions={}, config={}))

    with pytest.raises(JournalFault, match=f"schema {SCHEMA + 1} is not {SCHEMA}"):
        decode_header(other)


@pytest.mark.parametrize("line", [b"", b"null", b"{}", b'{"schema":"1"}', b"\xff"])
def test_a_strange_first_line_is_no_header(line: bytes) -> None:
    with pytest.raises(JournalFault, match="line 1 at byte 0 is not a journal header"):
        decode_header(line)


def test_two_lists_of_events_are_compared_by_their_bytes() -> None:
    assert encode_events([]) == b"[]"
    assert encode_events(iter([])) == b"[]"
