"""The few lines of protocol/ that have no file of tests of their own."""

from __future__ import annotations

from typing import Any

import pytest

from kvalet.protocol.commands import MemoryFigure
from kvalet.protocol.errors import ConfigFault, JournalFault, KvaletError, first_fault


def test_a_figure_tells_what_the_server_took_beyond_the_plan() -> None:
    assert MemoryFigure(name="context", planned=100, reported=130).excess == 30
    assert MemoryFigure(name="context", planned=100, reported=90).excess == -10


@pytest.mark.parametrize("problems", [["one", "two"], "one; two"])
def test_all_wrong_settings_are_told_at_once(problems: list[str] | str) -> None:
    fault = ConfigFault(problems)
    assert str(fault) == "one; two"
    assert fault.problems == (["one", "two"] if isinstance(problems, list) else ["one; two"])


def test_the_first_fault_is_found_however_deep_it_lies() -> None:
    deep, late = JournalFault("deep"), JournalFault("late")
    inner: BaseExceptionGroup[KvaletError] = BaseExceptionGroup("inner", [deep])
    parts: list[Any] = [inner, late]
    outer: BaseExceptionGroup[KvaletError] = BaseExceptionGroup("outer", parts)
    assert first_fault(outer) is deep
    assert first_fault(BaseExceptionGroup("outer", [late, deep])) is late
