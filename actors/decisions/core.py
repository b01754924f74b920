"""``decide`` for the whole house: routes each command by type, and nothing else.

``decide`` looks at its arguments only. It may refuse, choose and count; time is an
argument, ids are counters in the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvalet.actors.decisions import ledger, requests, servers
from kvalet.actors.decisions.state import House
from kvalet.actors.decisions.step import Step
from kvalet.protocol import commands as c
from kvalet.protocol.events import AnyEvent
from kvalet.protocol.ids import Nanos


def decide(house: House, command: c.Command, at_ns: Nanos) -> list[AnyEvent]:
    """The events that follow from ``command``; empty when it comes too late to matter."""
    return take(house, command, at_ns)[0]


def take(house: House, command: c.Command, at_ns: Nanos) -> tuple[list[AnyEvent], House]:
    """``decide`` together with the house after its events (their fold, made on the way)."""
    step = Step(house, at_ns)
    ROUTES[type(command)](step, command)
    if step.events:
        if step.freed:
            ledger.fill(step)
        ledger.revive(step)
    return step.events, step.house


def _close(step: Step, command: c.CloseHouse) -> None:
    servers.close_all(step, command.reason)


# Looked up, not matched: what a struct is an instance of takes longer than most rules.
ROUTES: dict[type[c.Command], Callable[[Step, Any], None]] = {
    c.AnswerEnded: requests.finish,
    c.Arrive: requests.arrive,
    c.CacheSeen: requests.judge_cache,
    c.CellsFreed: requests.freed,
    c.CloseHouse: _close,
    c.CreditSpent: requests.spend,
    c.ExactSeen: servers.arm,
    c.ExitSeen: servers.lose,
    c.HangSeen: servers.hang,
    c.LaunchPlanned: servers.plan,
    c.Leave: requests.leave,
    c.LoadAsked: servers.load,
    c.MemorySeen: servers.weigh,
    c.NoticeHeard: requests.hear,
    c.OpenHouse: servers.open_house,
    c.PartialCounted: requests.take_up,
    c.PressureRead: servers.read_pressure,
    c.ProbeSeen: servers.probe,
    c.ProgressSeen: requests.clear,
    c.PromptCounted: requests.measure,
    c.ReadySeen: servers.ready,
    c.SilenceSeen: requests.judge_silence,
    c.SlotErased: requests.erased,
    c.SlotSeen: requests.release,
    c.SpawnSeen: servers.spawn,
    c.UnloadAsked: servers.unload,
}
"""The rule of each command."""
