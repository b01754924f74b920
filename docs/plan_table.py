"""Writes `docs/plan-accuracy.md`: what the planner says against what a server allocated.

``python -m docs.plan_table`` from the root of the repository writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.decisions.plan.measured import Point, started

OUT = Path(__file__).parent / "plan-accuracy.md"
CLOSE = 0.05
INTRODUCTION = """# How close the planner is

Each point is one start of llama-server build b11434 whose every allocation was logged, with
weights replaced by holes; none ran on a real GPU. *Context* is the attention caches and the
recurrent state. *Compute* is the buffers of the graph, counted on each device; a point is close
when every device is within 5 %. A figure that no rule is known for is marked as doubtful in the
plan and errs on the large side: those points are counted apart. Written by `docs/plan_table.py`.

| architecture | points | context exact | worst ratio | compute points | close | lowest ratio \
| doubtful points | lowest ratio |
|---|---|---|---|---|---|---|---|---|
"""


def document() -> str:
    """The whole text of the document."""
    by_arch: defaultdict[str, list[Point]] = defaultdict(list)
    for point in started():
        by_arch[point.record["arch"]].append(point)
    rows = [_row(f"`{arch}`", by_arch[arch]) for arch in sorted(by_arch)]
    return INTRODUCTION + "\n".join([*rows, _row("**all**", started())]) + "\n"


def _row(name: str, found: Sequence[Point]) -> str:
    return "| " + " | ".join([name, *_figures(found)]) + " |"


def _figures(found: Sequence[Point]) -> Iterator[str]:
    ratios = [_context_ratio(point) for point in found]
    known = [point.compute_ratios for point in found if point.compute.known]
    doubtful = [point.compute_ratios for point in found if not point.compute.known]
    close = sum(all(abs(ratio - 1) <= CLOSE for ratio in ratios) for ratios in known)
    yield str(len(found))
    yield str(sum(ratio == 1 for ratio in ratios))
    yield f"{max(ratios, key=lambda ratio: abs(ratio - 1)):.5f}"
    yield str(len(known))
    yield f"{100 * close / len(known):.0f} %" if known else "-"
    yield _lowest(known)
    yield str(len(doubtful))
    yield _lowest(doubtful)


def _lowest(found: Sequence[Sequence[float]]) -> str:
    return f"{min(min(ratios) for ratios in found):.3f}" if found else "-"


def _context_ratio(point: Point) -> float:
    """Planned over measured bytes; a model that keeps nothing between requests is met by 0."""
    planned = sum(point.context.per_device(point.placement).values())
    measured = sum(point.context_per_device.values())
    return planned / measured if measured else float(planned == 0)


if __name__ == "__main__":
    OUT.write_text(document())
