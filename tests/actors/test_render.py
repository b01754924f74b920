"""Every event has a sentence, and the sentence can be printed as it is."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from kvalet.actors.render import printable, sentence
from kvalet.protocol import events as e
from kvalet.protocol.commands import Settings
from kvalet.protocol.ids import Cells, LeaseId, RequestId, SlotId

EVENTS: tuple[type[msgspec.Struct], ...] = get_args(e.AnyEvent)


def sample(kind: inspect.Type) -> Any:
    """Some value of this type, and never a default one."""
    match kind:
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 2.5
        case inspect.StrType():
            return "word"
        case inspect.UnionType():
            return sample(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))
        case inspect.VarTupleType():
            return [sample(kind.item_type)]
        case inspect.TupleType():
            return [sample(item) for item in kind.item_types]
        case inspect.StructType():
            return {field.encode_name: sample(field.type) for field in kind.fields}
        case _:
            raise AssertionError(f"no sample for {kind}")


def example(event: type[msgspec.Struct], *, full: bool) -> e.AnyEvent:
    """An event of this class, with all its fields or with the needed ones alone."""
    shape = inspect.type_info(event)
    assert isinstance(shape, inspect.StructType)
    fields = {
        field.encode_name: sample(field.type) for field in shape.fields if full or field.required
    }
    made: e.AnyEvent = msgspec.convert({"kind": shape.tag, **fields}, e.AnyEvent)
    return made


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_every_event_has_a_sentence(event: type[msgspec.Struct], full: bool) -> None:
    told: object = sentence(example(event, full=full))
    assert isinstance(told, str)
    assert told.isprintable()
    assert len(told) > 10


@pytest.mark.parametrize(
    "event",
    [event for event in EVENTS if "request" in event.__struct_fields__],
    ids=lambda event: event.__name__,
)
def test_a_sentence_about_a_request_names_it(event: type[msgspec.Struct]) -> None:
    assert sentence(example(event, full=True)).startswith("word")


def test_a_park_says_what_came_free_and_how_full_the_pool_was() -> None:
    parked = e.LeaseParked(
        request=RequestId("r7"),
        lease=LeaseId(3),
        method="save",
        cells=Cells(471),
        saved_bytes=3 * 2**20,
        pool_granted=Cells(2030),
    )
    assert sentence(parked) == (
        "r7 is parked (save): 471 cells free, 3.0 MiB saved; 2030 were granted until now"
    )


def test_a_park_that_saves_nothing_does_not_speak_of_saving() -> None:
    parked = e.LeaseParked(
        request=RequestId("r7"),
        lease=LeaseId(3),
        method="recompute",
        cells=Cells(471),
        saved_bytes=0,
        pool_granted=Cells(2030),
    )
    assert "saved" not in sentence(parked)


@pytest.mark.parametrize(
    ("victim", "told"),
    [
        (RequestId("r2"), "r1 is 40 cells short: r2 is to be parked"),
        (RequestId("r1"), "r1 is 40 cells short: it is to be parked"),
        (None, "r1 is 40 cells short: cells are on their way back"),
    ],
)
def test_pressure_says_whom_it_hits(victim: RequestId | None, told: str) -> None:
    pressed = e.PoolPressed(
        asker=RequestId("r1"), victim=victim, cells=Cells(9), generated=1, short=Cells(40)
    )
    assert sentence(pressed) == told


def test_the_likeliest_slot_is_the_one_that_shares_most() -> None:
    counted = e.PromptMeasured(
        request=RequestId("r1"),
        prompt=Cells(21),
        affinity=((SlotId(0), Cells(3)), (SlotId(2), Cells(20))),
    )
    assert sentence(counted).endswith("20 of them may still lie in slot 2")


def test_settings_are_not_spelled_out() -> None:
    opened = e.HouseOpened(settings=Settings(preempt=False))
    assert sentence(opened) == "the journal is taken over: policy fair-share, parking off"


def test_nothing_in_a_sentence_can_steer_the_terminal() -> None:
    exited = e.ServerExited(generation=1, code=1, planned=False, reason="\x1b[2Jgone\nnext")
    assert sentence(exited) == "launch 1 ended unexpectedly with status 1:  [2Jgone next"
    assert printable("a\tb") == "a b"
