"""What was once written to a journal decodes for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest

from kvalet.actors.decisions.replay import replay
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.journal import Decision, Reader, encode

GOLDEN = Path(__file__).parent / "golden"
JOURNALS = sorted(GOLDEN.glob("*_v1.jsonl"))
EVENTS: tuple[type[e.AnyEvent], ...] = get_args(e.AnyEvent)
COMMANDS: tuple[type[c.Command], ...] = get_args(c.Command)


def read(path: Path) -> list[Decision]:
    reader = Reader()
    decisions = list(reader.feed(path.read_bytes()))
    assert reader.header is not None
    assert reader.rest == b""
    return decisions


def tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_a_golden_journal_decodes(path: Path) -> None:
    assert len(read(path)) > 10


def test_a_golden_story_folds_to_a_house_with_nothing_open() -> None:
    house = replay(read(GOLDEN / "story_v1.jsonl"))

    assert (house.granted_total, house.saved_bytes) == (0, 0)
    assert (house.leases, house.holders, house.queue, house.parked) == ({}, {}, (), ())
    assert house.totals.parks > 0


def test_every_kind_of_event_and_command_is_in_a_golden_journal() -> None:
    decisions = [decision for path in JOURNALS for decision in read(path)]

    assert {type(event) for d in decisions for event in d.events} == set(EVENTS)
    assert {type(decision.command) for decision in decisions} == set(COMMANDS)


def test_what_is_decoded_is_written_down_with_nothing_lost() -> None:
    for path in JOURNALS:
        for line, decision in zip(path.read_bytes().splitlines()[1:], read(path), strict=True):
            known, again = msgspec.json.decode(line), msgspec.json.decode(encode(decision))
            assert leaves(known) <= leaves(again), "only fields that came later may be added"


Leaves = set[tuple[str, object]]


def leaves(value: Any, place: str = "") -> Leaves:
    """Every plain value of a JSON document, with its place."""
    found: Leaves = set()
    if isinstance(value, dict):
        for key, entry in cast("dict[str, Any]", value).items():
            found |= leaves(entry, f"{place}/{key}")
    elif isinstance(value, list):
        for number, entry in enumerate(cast("tuple[Any, ...]", value)):
            found |= leaves(entry, f"{place}/{number}")
    else:
        found.add((place, value))
    return found


@pytest.mark.parametrize("kind", EVENTS, ids=tag)
def test_an_events_name_on_disk_is_a_noun_and_a_participle(kind: type[msgspec.Struct]) -> None:
    noun, _, participle = tag(kind).partition(".")

    assert noun.isalpha()
    assert participle.replace("_", "").isalpha()


def test_names_on_disk_are_unique() -> None:
    for kinds in (EVENTS, COMMANDS):
        assert len({tag(kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", [*EVENTS, *COMMANDS], ids=tag)
def test_no_message_has_room_for_what_people_wrote(kind: type[msgspec.Struct]) -> None:
    names = {field.name for field in msgspec.structs.fields(kind)}

    assert not names & {"text", "content", "messages", "prompt_text", "api_key", "tokens", "body"}


@pytest.mark.parametrize("kind", [*EVENTS, *COMMANDS], ids=tag)
def test_a_message_cannot_be_changed_and_says_what_it_means(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.forbid_unknown_fields
    assert kind.__doc__
