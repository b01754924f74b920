"""``decide`` for the whole house: routes each command by type, and nothing else.

``decide`` looks at its arguments only. It may refuse, choose and count; time is an
argument, ids are counters in the state.
"""

from __future__ import annotations

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
    _route(step, command)
    if step.events:
        if step.freed:
            ledger.fill(step)
        ledger.revive(step)
    return step.events, step.house


def _route(step: Step, command: c.Command) -> None:
    match command:
        case c.CreditSpent():
            requests.spend(step, command)
        case c.Arrive():
            requests.arrive(step, command)
        case c.PromptCounted():
            requests.measure(step, command)
        case c.AnswerEnded():
            requests.finish(step, command)
        case c.Leave():
            requests.leave(step, command)
        case c.CellsFreed():
            requests.freed(step, command)
        case c.CacheSeen():
            requests.judge_cache(step, command)
        case c.SlotSeen():
            requests.release(step, command)
        case c.SlotErased():
            requests.erased(step, command)
        case c.SilenceSeen():
            requests.judge_silence(step, command)
        case c.NoticeHeard():
            requests.hear(step, command)
        case c.PressureRead():
            servers.read_pressure(step, command)
        case c.OpenHouse():
            servers.open_house(step, command)
        case c.CloseHouse():
            servers.close_all(step, command.reason)
        case c.LaunchPlanned():
            servers.plan(step, command)
        case c.SpawnSeen():
            servers.spawn(step, command)
        case c.ReadySeen():
            servers.ready(step, command)
        case c.MemorySeen():
            servers.weigh(step, command)
        case c.ProbeSeen():
            servers.probe(step, command)
        case c.ExitSeen():
            servers.lose(step, command)
