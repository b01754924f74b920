"""The planner's buffers against what a server reserved."""

from __future__ import annotations

from kvalet.actors.decisions.plan.compute import compute_bytes
from kvalet.actors.decisions.plan.drafting import draft_types
from kvalet.actors.decisions.plan.placement import HOST
from kvalet.actors.decisions.plan.shape import shape_of
from tests.decisions.plan.measured import Point, started

CLOSE = 0.05
UNDER_KNOWN = 0.98
UNDER_DOUBTFUL = 0.995
KNOWN_SHARE = 0.97
WHOLE_SHARE = 0.90


def close(point: Point) -> bool:
    return all(abs(ratio - 1) <= CLOSE for ratio in point.compute_ratios)


def test_output_buffers_are_exact() -> None:
    wrong = [
        point.name
        for point in started()
        if point.compute.output != sum(point.target["output_bytes_per_device"].values())
    ]
    assert wrong == []


def test_nearly_every_launch_with_a_known_rule_is_within_five_percent() -> None:
    known = [close(point) for point in started() if point.compute.known]
    assert len(known) > 0.85 * len(started())
    assert sum(known) >= KNOWN_SHARE * len(known)


def test_nine_launches_of_ten_are_within_five_percent_rule_or_no_rule() -> None:
    assert sum(map(close, started())) >= WHOLE_SHARE * len(started())


def test_no_known_figure_is_two_percent_under() -> None:
    low = [
        point.name
        for point in started()
        if point.compute.known and min(point.compute_ratios) < UNDER_KNOWN
    ]
    assert low == []


def test_a_doubtful_figure_is_not_under_and_says_why_it_is_doubtful() -> None:
    doubtful = [point for point in started() if not point.compute.known]
    assert all(point.compute.why for point in doubtful)
    low = [point.name for point in doubtful if min(point.compute_ratios) < UNDER_DOUBTFUL]
    assert low == []


def test_the_buffers_of_a_second_model_are_exact_and_those_of_other_drafters_not_under() -> None:
    for point in started():
        logged, draft = point.record.get("draft"), point.draft
        if logged is None or draft is None:
            continue
        shape = shape_of(point.record.get("draft_metadata") or point.record["metadata"])
        planned = compute_bytes(
            shape, draft, point.flags, draft_types(point.flags), point.placement
        )
        ratio = planned.per_device[HOST] / logged["compute_bytes_per_device"]["CPU"]
        assert planned.output == logged["output_bytes_per_device"]["CPU"], point.name
        assert ratio >= UNDER_KNOWN, point.name
        assert not planned.known or ratio <= 1 + CLOSE, point.name
