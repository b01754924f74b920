"""The planner's caches, state and sizes against what a server allocated, to the byte."""

from __future__ import annotations

from kvalet.actors.decisions.plan.kv_cache import Cache
from tests.decisions.plan.measured import Point, points, started

LAUNCHES = 1999
CUDA_PADDED = 4


def test_every_launch_of_the_file_is_read() -> None:
    assert len(points()) == LAUNCHES


def test_the_planner_refuses_exactly_what_the_server_refused() -> None:
    odd = [p.name for p in points() if (p.planned is None) != (p.record["status"] == "refused")]
    assert odd == []
    assert all("one cache type" in p.refusal for p in points() if p.planned is None)


def test_sizes_are_the_servers_on_every_launch() -> None:
    wrong = [p.name for p in started() if _sizes(p) != _logged_sizes(p)]
    assert wrong == []


def test_caches_have_the_servers_kinds_cells_streams_and_layers() -> None:
    wrong = [p.name for p in started() if _caches(p) != _logged_caches(p)]
    assert wrong == []


def test_cache_bytes_are_exact_but_for_the_padding_of_cuda_rows() -> None:
    wrong: list[Point] = []
    for point in started():
        planned = (point.context.of_kind("non_swa"), point.context.of_kind("swa"))
        measured = (point.target["kv_non_swa_bytes"], point.target["kv_swa_bytes"])
        if planned != measured:
            wrong.append(point)
    assert len(wrong) == CUDA_PADDED
    assert all(p.record["device"] == "stub1-cudafa" for p in wrong)


def test_recurrent_state_is_exact_in_rows_and_in_both_parts() -> None:
    wrong: list[str] = []
    for point in started():
        logged, state = point.target.get("recurrent"), point.context.state
        count = len(state.layers)
        planned = (state.rows, count, count * state.rolling_bytes, count * state.summed_bytes)
        measured = (
            (logged["rows"], logged["layers"], logged["r_bytes"], logged["s_bytes"])
            if logged
            else (0, 0, 0, 0)
        )
        if planned != measured:
            wrong.append(point.name)
    assert wrong == []


def test_bytes_lie_on_the_servers_devices_padding_included() -> None:
    wrong = [
        point.name
        for point in started()
        if {k: v for k, v in point.context.per_device(point.placement).items() if v}
        != {k: v for k, v in point.context_per_device.items() if v}
    ]
    assert wrong == []


def test_a_draft_context_is_exact_where_there_is_one_and_absent_elsewhere() -> None:
    wrong: list[str] = []
    for point in started():
        logged, draft = point.record.get("draft"), point.draft
        measured = None if logged is None else (logged["kv_bytes"], logged["n_ctx"])
        planned = None if draft is None else (draft.bytes, draft.sizes.ctx)
        if planned != measured:
            wrong.append(point.name)
    assert wrong == []


def _sizes(point: Point) -> tuple[int, ...]:
    size = point.context.sizes
    return (
        size.ctx,
        size.ctx_seq,
        size.batch,
        size.ubatch,
        size.slots,
        size.ctx_slot,
        size.outputs,
        size.snapshots,
    )


def _logged_sizes(point: Point) -> tuple[int, ...]:
    names = ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max")
    logged = tuple(int(point.target[name]) for name in names)
    rest = (point.target["n_outputs_max"], point.target["n_rs_seq"])
    return (*logged, point.record["slots"]["n_ctx_slot"], *rest)


def _caches(point: Point) -> list[tuple[str, int, int, int]]:
    return sorted(_described(cache) for cache in point.context.caches)


def _described(cache: Cache) -> tuple[str, int, int, int]:
    return cache.kind, cache.cells, cache.streams, len(cache.layers)


def _logged_caches(point: Point) -> list[tuple[str, int, int, int]]:
    return sorted(
        (kept["kind"], kept["cells_per_stream"], kept["n_stream"], kept["layers"])
        for kept in point.target["kv"]
        if kept["layers"]
    )
