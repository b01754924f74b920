"""Events in words: one sentence each, for people. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import msgspec

from kvalet.actors.decisions.evolve_lease import RELOAD
from kvalet.actors.decisions.evolve_server import ServerEvent
from kvalet.protocol import events as e
from kvalet.protocol.ids import SlotId

MIB = 2**20

RequestEvent = (
    e.RequestArrived
    | e.PromptMeasured
    | e.LeaseQueued
    | e.LeaseRefused
    | e.NoticeTaken
    | e.ParkSeen
    | e.StreamStalled
)
GrowthEvent = e.LeaseGranted | e.LeaseExtended | e.PoolPressed | e.LeaseEnded | e.LeaseReleased
ParkEvent = (
    e.LeaseParking
    | e.LeaseParked
    | e.LeaseResumed
    | e.LeaseRecomputed
    | e.LeaseRestored
    | e.PartialMeasured
    | e.LeaseCleared
)
HouseEvent = e.HouseOpened | e.JournalTorn | e.SlotCleared | e.PoolRead | e.MethodDemoted


def sentence(event: e.AnyEvent) -> str:
    """What happened, in one line that can be printed as it is."""
    return printable(_say(event))


def printable(text: str) -> str:
    """``text`` without anything that could steer a terminal; always one line."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _say(event: e.AnyEvent) -> str:
    match event:
        case (
            e.RequestArrived()
            | e.PromptMeasured()
            | e.LeaseQueued()
            | e.LeaseRefused()
            | e.NoticeTaken()
            | e.ParkSeen()
            | e.StreamStalled()
        ):
            return _request(event)
        case (
            e.LeaseGranted()
            | e.LeaseExtended()
            | e.PoolPressed()
            | e.LeaseEnded()
            | e.LeaseReleased()
        ):
            return _growth(event)
        case (
            e.LeaseParking()
            | e.LeaseParked()
            | e.LeaseResumed()
            | e.LeaseRecomputed()
            | e.LeaseRestored()
            | e.PartialMeasured()
            | e.LeaseCleared()
        ):
            return _park(event)
        case (
            e.ServerPlanned()
            | e.ServerSpawned()
            | e.ServerReady()
            | e.ServerWeighed()
            | e.ExactJudged()
            | e.ServerProbed()
            | e.ServerExited()
            | e.ServerHung()
            | e.ServerFellBack()
            | e.ServerRestarted()
            | e.LoadOrdered()
            | e.LoadDropped()
        ):
            return _server(event)
        case e.HouseOpened() | e.JournalTorn() | e.SlotCleared() | e.PoolRead() | e.MethodDemoted():
            return _house(event)


def _request(event: RequestEvent) -> str:
    match event:
        case e.RequestArrived():
            cap = "no limit of its own" if event.cap is None else f"at most {event.cap} tokens"
            streaming = "streaming" if event.streaming else "not streaming"
            fixed = "" if event.pausable else ", cannot be parked"
            seats = f", needs {event.seats} slots" if event.seats != 1 else ""
            return f"{event.request} arrives: {event.surface}, {streaming}, {cap}{fixed}{seats}"
        case e.PromptMeasured():
            slot, shared = max(event.affinity, key=lambda pair: pair[1], default=(SlotId(0), 0))
            cached = f", {shared} of them may still lie in slot {slot}" if shared else ""
            return f"{event.request}'s prompt takes {event.prompt} cells{cached}"
        case e.LeaseQueued():
            return f"{event.request} waits for room, place {event.position}"
        case e.LeaseRefused():
            size = f": needs {event.needed} cells of at most {event.limit}" if event.needed else ""
            return f"{event.request} is refused, {event.code}{size}"
        case e.NoticeTaken():
            return f"{event.request} heard its server say {event.notice}"
        case e.ParkSeen():
            return f"{event.request} is seen {'parked by its server' if event.away else 'back'}"
        case e.StreamStalled():
            return (
                f"{event.request} stalled: silent for {event.silent_s:.0f} s ({event.phase}), "
                "and no park excuses it"
            )


def _growth(event: GrowthEvent) -> str:
    match event:
        case e.LeaseGranted():
            fits = ", fits until its end" if event.feasible else ""
            return (
                f"{event.request} starts as lease {event.lease} in {_slots(event.slots)}: "
                f"{event.granted} cells, credit {event.credit}{fits}{_erased(event.erase)}"
            )
        case e.LeaseExtended():
            return (
                f"{event.request} goes on after {event.generated} tokens: {event.granted} cells, "
                f"credit {event.credit}{_erased(event.erase)}"
            )
        case e.PoolPressed():
            who = "it" if event.victim == event.asker else event.victim
            way_out = f"{who} is to be parked" if who else "cells are on their way back"
            return f"{event.asker} is {event.short} cells short: {way_out}"
        case e.LeaseEnded():
            cut = ", its stream was cut" if event.aborted else ""
            return (
                f"{event.request} ends, {event.reason}: {event.generated} tokens, "
                f"{event.cells} cells{cut}"
            )
        case e.LeaseReleased():
            left = f"; {event.residue} cells stay behind, idle" if event.residue else ""
            return f"{event.request} has given everything back, {event.reason}{left}"


def _park(event: ParkEvent) -> str:
    match event:
        case e.LeaseParking():
            fate = "to be saved" if event.save else "to be dropped and computed again"
            return (
                f"{event.request} is being parked after {event.generated} tokens: "
                f"{event.cells} cells {fate}"
            )
        case e.LeaseParked():
            saved = f", {event.saved_bytes / MIB:.1f} MiB saved" if event.saved_bytes else ""
            if event.cause == RELOAD:
                return f"{event.request} waits for another server to go on"
            if event.cause:
                return f"{event.request} lost its server, and waits for the next one"
            return (
                f"{event.request} is parked ({event.method}): {event.cells} cells free{saved}; "
                f"{event.pool_granted} were granted until now"
            )
        case e.LeaseResumed():
            return (
                f"{event.request} resumes ({event.method}) in {_slots(event.slots)}: "
                f"{event.granted} cells, credit {event.credit}{_erased(event.erase)}"
            )
        case e.LeaseRecomputed():
            miss = ", although they had been saved" if event.miss else ""
            return f"{event.request} had {event.cells} cells computed again{miss}"
        case e.LeaseRestored():
            return f"{event.request} has all its {event.cells} cells back"
        case e.PartialMeasured():
            return (
                f"{event.request} is to go on after {event.generated} tokens, {event.cells} cells"
            )
        case e.LeaseCleared():
            return f"{event.request} decodes again: it did not kill its server"


def _server(event: ServerEvent) -> str:
    launch = f"launch {event.generation}"
    match event:
        case e.ServerPlanned():
            warnings = "".join(f"; warning: {message}" for _, message in event.warnings)
            return f"{launch} is planned: {shlex.join(event.argv)}{warnings}"
        case e.ServerSpawned():
            return f"{launch} runs as pid {event.pid}, to listen at {event.url}"
        case e.ServerReady():
            return (
                f"{launch} answers at {event.url}: {event.model} on {event.build}, "
                f"{event.cells} cells, {event.slots} slots, headroom {event.headroom}"
            )
        case e.ExactJudged():
            why = f": {event.reason}" if event.reason else ""
            parker = {"server": "the server parks chats", "proxy": "kvalet parks chats"}
            who = parker.get(event.mode, "nobody parks chats")
            return f"{launch} is armed: {who}, exact concurrency {event.state}{why}"
        case e.ServerWeighed():
            return f"{launch} allocated {_weighed(event)}"
        case e.ServerProbed():
            detail = f": {event.detail}" if event.detail else ""
            return (
                f"{launch} parks by {event.method}, {event.reused} of {event.saved} "
                f"probed cells came back{detail}"
            )
        case e.ServerExited():
            how = "ended as planned" if event.planned else "ended unexpectedly"
            reason = f": {event.reason}" if event.reason else ""
            return f"{launch} {how} with status {event.code}{reason}"
        case e.ServerHung():
            return f"{launch} gave no sign of life for {event.silent_s:.0f} s: it is ended"
        case e.ServerFellBack():
            return f"{launch} goes without: {event.given}, since {event.reason}"
        case e.LoadOrdered():
            changed = {
                name: value
                for name, value in msgspec.structs.asdict(event.load).items()
                if value is not None
            }
            wishes = ", ".join(f"{name} {value}" for name, value in changed.items())
            return f"{launch} is ordered with {wishes or 'the settings as they were'}"
        case e.LoadDropped():
            return f"the model is unloaded; {launch} would be the next"
        case e.ServerRestarted():
            when = f" in {event.wait_s:g} s" if event.wait_s else ""
            return f"{launch} is ordered{when}: restart {event.attempt}"


def _weighed(event: e.ServerWeighed) -> str:
    total = sum(figure.reported for figure in event.figures)
    if event.exact:
        return f"{total / MIB:,.2f} MiB, as planned"
    odd = (
        f"{figure.name} {figure.reported / MIB:,.2f} for {figure.planned / MIB:,.2f}"
        for figure in event.figures
        if figure.planned != figure.reported
    )
    return f"{total / MIB:,.2f} MiB; MiB allocated for MiB planned: {', '.join(odd)}"


def _house(event: HouseEvent) -> str:
    match event:
        case e.HouseOpened():
            parking = "on" if event.settings.preempt else "off"
            return f"the journal is taken over: policy {event.settings.policy}, parking {parking}"
        case e.JournalTorn():
            return f"the journal's last line was incomplete: {event.dropped_bytes} bytes cut off"
        case e.SlotCleared():
            return f"slot {event.slot} is erased: {event.cells} idle cells gone"
        case e.PoolRead():
            return f"{event.resident} cells are resident, {event.busy} slots busy"
        case e.MethodDemoted():
            return (
                f"{event.misses} misses in a row: parks recompute from now on, not {event.method}"
            )


def _slots(slots: Iterable[SlotId]) -> str:
    numbers = [str(slot) for slot in slots]
    return f"slot{'s' if len(numbers) > 1 else ''} {' and '.join(numbers) or '?'}"


def _erased(slots: tuple[SlotId, ...]) -> str:
    return f"; {_slots(slots)} erased first" if slots else ""
