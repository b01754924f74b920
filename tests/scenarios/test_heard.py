"""What one stream on a server that parks makes of the bytes that it hears."""

from __future__ import annotations

import msgspec
import pytest

from kvalet.actors.decisions.away import Away
from kvalet.protocol.llama import decode_slots
from kvalet.protocol.notices import read_notice
from kvalet.protocol.sse import SseSplitter

PAUSED, RESUMED = b": preempt-paused\n\n", b": preempt-resumed\n\n"
RECOMPUTED = b": preempt-recomputed\n\n"


class Stream:
    """One stream's bytes, up to what its client is told."""

    def __init__(self) -> None:
        self.away = Away()
        self.told = b""
        self._splitter = SseSplitter()

    def read(self, piece: bytes) -> None:
        for event in self._splitter.feed(piece):
            for text in event.comments:
                notice = read_notice(text)
                if notice is not None:
                    self.told += self.away.hear(*notice, 0.0).comment


def heard(*pieces: bytes) -> Stream:
    stream = Stream()
    for piece in pieces:
        stream.read(piece)
    return stream


def test_half_a_notice_parks_nobody_and_its_other_half_does() -> None:
    stream = heard(b": preem")
    assert (stream.away.parked, stream.told) == (False, b"")
    stream.read(b"pted\n\n")
    assert (stream.away.parked, stream.told) == (True, PAUSED)


@pytest.mark.parametrize(
    ("read", "parked", "told"),
    [
        (b": preempted\n\n: resumed\n\n", False, PAUSED + RESUMED),
        (b": preempted\n\n: resumed\n\n: preempted\n\n", True, PAUSED + RESUMED + PAUSED),
        (b": resumed\n\n: preempted\n\n", True, PAUSED),
    ],
)
def test_of_several_notices_in_one_read_the_last_one_counts(
    read: bytes, parked: bool, told: bytes
) -> None:
    stream = heard(read)
    assert (stream.away.parked, stream.told) == (parked, told)


@pytest.mark.parametrize(
    "quoted",
    [
        b'data: {"content":"a : preempted line"}\n\n',
        b'data: {"content":"x"} : preempted\n\n',
        b"data:\ndata: : preempted\n\n",
        b" : preempted\n\n",
    ],
)
def test_a_notice_must_stand_at_the_beginning_of_a_line(quoted: bytes) -> None:
    assert not heard(quoted).away.parked
    assert heard(b": preempted\n\n").away.parked, "the first line of a stream is one"


def test_a_recompute_changes_nothing_but_the_count() -> None:
    stream = heard(b": preempted\n\n: resumed\n\n")
    parked_s = stream.away.parked_s
    stream.read(b": recomputed\n\n")
    assert not stream.away.parked
    assert stream.away.parked_s == parked_s
    assert stream.told == PAUSED + RESUMED + RECOMPUTED


@pytest.mark.parametrize(
    "odd", [[{"n_decoded": 7}], {"n_decoded": 7}, "none", None, [], [3], {"n_decoded": "x"}]
)
@pytest.mark.parametrize("cache", [0, 90, 5000])
def test_a_slots_cells_are_read_whatever_a_build_says_beside_them(odd: object, cache: int) -> None:
    slot = {"id": 1, "is_processing": True, "n_prompt_tokens": 120, "next_token": odd}
    slot["n_prompt_tokens_cache"] = cache
    (read,) = decode_slots(msgspec.json.encode([slot]))
    assert (read.id, read.is_processing, read.resident) == (1, True, 120)
