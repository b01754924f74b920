"""What a benchmark found: one figure a line, for a person and for a program."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value in ``unit``.

    ``target`` is a floor, or a ceiling where ``ceiling`` says so; None means that the value
    depends on the machine too much to have one. ``note`` says what it is made of.
    """

    part: str
    name: str
    value: float
    unit: str
    target: float | None = None
    ceiling: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.ceiling else self.value >= self.target


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of the not empty ``values`` do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def middle(values: Sequence[float]) -> float:
    """The median, rounded to what a benchmark can tell apart."""
    return float(f"{statistics.median(values):.4g}")


def document(figures: Sequence[Figure]) -> list[dict[str, object]]:
    """The figures as plain values, each with whether its target is ``met``."""
    return [{**msgspec.to_builtins(figure), "met": figure.met} for figure in figures]


def lines(figures: Sequence[Figure]) -> list[str]:
    """A table, one line per figure, columns as wide as they need to be."""
    rows = [("part", "figure", "value", "unit", "target", "", "of")]
    rows += [_row(figure) for figure in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (2, 4)
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(figure: Figure) -> tuple[str, str, str, str, str, str, str]:
    target = ""
    if figure.target is not None:
        target = ("<= " if figure.ceiling else ">= ") + _number(figure.target)
    verdict = {None: "", True: "met", False: "missed"}[figure.met]
    value = _number(figure.value)
    return (figure.part, figure.name, value, figure.unit, target, verdict, figure.note)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
