"""Notices are read from comments alone; each stream folds its own."""

from __future__ import annotations

import pytest

from kvalet.protocol import notices
from kvalet.protocol.notices import Notice, NoticeState, read_notice
from kvalet.protocol.sse import SseSplitter

STREAM = (
    b": preempted\n\n: preempt-keepalive\n\n:\n\n: resumed\n\n: recomputed\n\n"
    b'data: {"text":"\\n: preempted"}\n\n:preempted 2\r\n\r\n: keep-alive\n\n'
)
HEARD = [
    (Notice.PREEMPTED, 0),
    (Notice.KEEPALIVE, 0),
    (Notice.RESUMED, 0),
    (Notice.RECOMPUTED, 0),
    (Notice.PREEMPTED, 2),
]


def heard(*chunks: bytes) -> list[tuple[Notice, int]]:
    splitter = SseSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    read = [read_notice(text) for event in events for text in event.comments]
    return [notice for notice in read if notice is not None]


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_notices_survive_any_cut(cut: int) -> None:
    assert heard(STREAM[:cut], STREAM[cut:]) == HEARD


@pytest.mark.parametrize(
    "text", [b"", b"ping", b"preempted!", b"preempted ", b" preempted", b"preempted x", b"Resumed"]
)
def test_other_comments_are_no_notices(text: bytes) -> None:
    assert read_notice(text) is None


def test_our_own_comments_are_no_notices_of_a_server_except_the_shared_keepalive() -> None:
    ours = {name: value for name, value in vars(notices).items() if isinstance(value, bytes)}
    assert len(ours) == 8
    assert {name: heard(value) for name, value in ours.items() if heard(value)} == {
        "PREEMPT_KEEPALIVE": [(Notice.KEEPALIVE, 0)]
    }


def test_a_park_and_its_resume_are_counted() -> None:
    state = NoticeState()
    said = [state.hear(notice) for notice in (Notice.PREEMPTED, Notice.KEEPALIVE)]
    while_parked = state.parked
    said += [state.hear(notice) for notice in (Notice.RESUMED, Notice.RECOMPUTED)]
    said.append(state.datum())
    assert said == [None] * 5
    assert (while_parked, state.parked) == (True, False)
    assert (state.heard, state.anomalies) == (True, 0)
    assert (state.parks, state.resumes, state.recomputes) == (1, 1, 1)


@pytest.mark.parametrize(
    ("order", "anomaly", "counts"),
    [
        ([Notice.PREEMPTED, Notice.PREEMPTED], "preempted-twice", (1, 0, 0)),
        ([Notice.RESUMED], "resumed-without-park", (0, 0, 0)),
        ([Notice.KEEPALIVE], "keepalive-without-park", (0, 0, 0)),
        ([Notice.PREEMPTED, Notice.RECOMPUTED], "recomputed-while-parked", (1, 0, 1)),
    ],
)
def test_a_notice_out_of_order_is_one_anomaly_and_does_no_harm(
    order: list[Notice], anomaly: str, counts: tuple[int, int, int]
) -> None:
    state = NoticeState()
    said = [state.hear(notice) for notice in order]
    assert said == [*[None] * (len(order) - 1), anomaly]
    assert (state.parks, state.resumes, state.recomputes) == counts
    assert state.anomalies == 1


def test_a_datum_ends_a_park_that_nobody_ended() -> None:
    state = NoticeState()
    state.hear(Notice.PREEMPTED)
    assert state.datum() == "data-while-parked"
    assert (state.parked, state.parks, state.resumes, state.anomalies) == (False, 1, 1, 1)


def test_a_stream_is_parked_until_its_last_prompt_is_resumed() -> None:
    state = NoticeState()
    state.hear(Notice.PREEMPTED, 0)
    state.hear(Notice.PREEMPTED, 1)
    state.hear(Notice.RESUMED, 0)
    seen = [state.parked, state.datum(0)]
    state.hear(Notice.RESUMED, 1)
    assert [*seen, state.parked] == [True, None, False]
    assert (state.parks, state.resumes, state.anomalies) == (2, 2, 0)


def test_what_a_server_held_parked_is_parked_no_more_when_the_server_is_gone() -> None:
    state = NoticeState()
    state.hear(Notice.PREEMPTED, 0)
    state.hear(Notice.PREEMPTED, 1)

    state.lose()

    assert not state.parked
    assert (state.parks, state.resumes, state.anomalies) == (2, 0, 0)
    assert state.datum(0) is None
