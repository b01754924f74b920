"""The splitter must not care where a read ends, and must not lose or change a byte."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvalet.protocol import sse
from kvalet.protocol.errors import ServerFault
from kvalet.protocol.sse import SseEvent, SseSplitter

EVENTS = [
    SseEvent(raw=b'data: {"a":1}\n\n', data=b'{"a":1}'),
    SseEvent(raw=b": preempted\r\n\r\n", comments=(b"preempted",)),
    SseEvent(raw=b":\n\n", comments=(b"",)),
    SseEvent(raw=b"event: ping\ndata: one\rdata:two\n\n", event=b"ping", data=b"one\ntwo"),
    SseEvent(raw=b"\n"),
    SseEvent(raw=b"data\rid: 7\r\r", data=b""),
    SseEvent(raw=b"\r\n"),
    SseEvent(raw=b": a\n:b\n\n", comments=(b"a", b"b")),
    SseEvent(
        raw=b'data: {"t":"\xe2\x80\xa8 : preempted"}\n\n', data=b'{"t":"\xe2\x80\xa8 : preempted"}'
    ),
    SseEvent(raw=b"data: [DONE]\n\n", data=b"[DONE]"),
]
STREAM = b"".join(event.raw for event in EVENTS)


def split(*chunks: bytes) -> list[SseEvent]:
    splitter = SseSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    return events + splitter.flush()


def test_a_whole_stream_becomes_its_events() -> None:
    assert split(STREAM) == EVENTS


def test_a_stream_read_byte_by_byte_becomes_its_events() -> None:
    assert split(*(bytes([byte]) for byte in STREAM)) == EVENTS


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_events_survive_any_cut(cut: int) -> None:
    assert split(STREAM[:cut], STREAM[cut:]) == EVENTS


@given(
    st.lists(st.sampled_from([b"data: x", b":", b"a", b"\n", b"\r", b"\r\n", b"\n\n"])), st.data()
)
def test_any_bytes_cut_anywhere_give_the_same_events(
    pieces: list[bytes], draw: st.DataObject
) -> None:
    stream = b"".join(pieces)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    edges = [0, *cuts, len(stream)]
    events = split(*(stream[a:b] for a, b in itertools.pairwise(edges)))
    assert b"".join(event.raw for event in events) == stream
    assert events == split(stream)


@given(st.lists(st.sampled_from([b"data: x", b":", b"\n", b"\r", b"\r\n"])))
def test_every_event_but_the_last_ends_with_its_first_blank_line(pieces: list[bytes]) -> None:
    for event in split(b"".join(pieces)):
        lines = re.split(rb"\r\n|\r|\n", event.raw)
        assert event.complete == (lines[-2:] == [b"", b""])
        assert b"" not in lines[:-2]


def test_a_comment_may_be_inserted_only_between_events() -> None:
    splitter = SseSplitter()
    free = [splitter.at_boundary]
    for chunk in (b"data: 1\n", b"\n", b"data: 2\n\n", b"data: 3\n\n:"):
        splitter.feed(chunk)
        free.append(splitter.at_boundary)
    assert free == [True, False, True, True, False]


def test_a_return_at_the_end_of_a_read_waits_for_its_line_feed() -> None:
    splitter = SseSplitter()
    assert splitter.feed(b"data: 1\r\n\r") == []
    assert not splitter.at_boundary
    assert [event.raw for event in splitter.feed(b"\ndata: 2\n\n")] == [
        b"data: 1\r\n\r\n",
        b"data: 2\n\n",
    ]


def test_a_return_at_the_end_of_the_stream_ends_its_event() -> None:
    splitter = SseSplitter()
    assert splitter.feed(b"data: 1\r\r") == []
    assert splitter.flush() == [SseEvent(raw=b"data: 1\r\r", data=b"1")]
    assert splitter.flush() == []


def test_a_broken_streams_rest_is_handed_over_but_not_read() -> None:
    splitter = SseSplitter()
    assert splitter.feed(b"data: 1\n") == []
    assert splitter.flush() == [SseEvent(raw=b"data: 1\n", complete=False)]
    assert splitter.at_boundary


def test_an_event_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    at_limit = b"data: 12\n\n"
    assert len(SseSplitter(limit=10).feed(at_limit)) == 1
    with pytest.raises(ServerFault, match="exceeds 9 bytes"):
        SseSplitter(limit=9).feed(at_limit)
    with pytest.raises(ServerFault, match="exceeds 9 bytes"):
        SseSplitter(limit=9).feed(b":" + at_limit)


def test_an_event_that_never_ends_is_given_up_at_the_limit() -> None:
    splitter = SseSplitter(limit=10)
    assert splitter.feed(b"data: 1234") == []
    with pytest.raises(ServerFault, match="exceeds 10 bytes"):
        splitter.feed(b"5")


def test_what_is_written_is_read_back() -> None:
    stream = sse.comment("preempt-paused") + sse.data(b"{}") + sse.DONE
    paused, datum, done = split(stream)
    assert paused.comments == (b"preempt-paused",)
    assert (datum.data, done.data) == (b"{}", b"[DONE]")
