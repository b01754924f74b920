"""Every command has its rule and every event its effect, each under its own type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest

from kvalet.actors.decisions.core import ROUTES
from kvalet.actors.decisions.evolve import RULES
from kvalet.protocol.commands import Command
from kvalet.protocol.events import AnyEvent


@pytest.mark.parametrize(
    ("table", "kinds", "place"), [(ROUTES, Command, 1), (RULES, AnyEvent, 1)], ids=["core", "fold"]
)
def test_a_table_names_every_kind_and_gives_each_to_a_rule_that_takes_it(
    table: dict[type, Callable[..., Any]], kinds: Any, place: int
) -> None:
    assert set(table) == set(get_args(kinds))
    for kind, rule in table.items():
        accepted = list(get_type_hints(rule).values())[place]
        assert kind in (accepted, *get_args(accepted)), f"{rule.__name__} takes no {kind.__name__}"
