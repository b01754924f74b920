"""How llama-server reads the value of one flag: numbers, switches, types and lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from attrs import frozen

CACHE_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""What a K or V cache can be made of, the largest element first."""

MTP_TYPES: Final = frozenset({"draft-mtp", "mtp"})
"""Multi-token prediction by heads of the model itself; older builds say ``mtp``."""

MODEL_TYPES: Final = frozenset({"draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark"})
"""Drafting by a second model."""

NGRAM_TYPES: Final = frozenset(
    {"ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"}
)
"""Drafting from the text so far: no model, no cells."""

TRUE_WORDS: Final = frozenset({"on", "enabled", "true", "1"})
FALSE_WORDS: Final = frozenset({"off", "disabled", "false", "0"})
AUTO_WORDS: Final = frozenset({"auto", "-1"})

_INT_MAX: Final = (1 << 31) - 1
_SPEC_TYPES: Final = MTP_TYPES | MODEL_TYPES | NGRAM_TYPES | {"none"}
_LOAD_MODES: Final = frozenset({"auto", "none", "mmap", "mlock", "mmap+mlock", "dio"})
_LEADING_NUMBER: Final = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_PROPORTION: Final = re.compile(r"[ ]*([0-9]+\.?[0-9]*|\.[0-9]+)[ ]*")


@frozen
class Reading:
    """One value as the server takes it; ``problem`` says what is wrong with the word.

    With ``applied`` False the server would not start, and the value must not be used.
    """

    value: object
    problem: str = ""
    applied: bool = True


Reader = Callable[[str], Reading]


def refused(problem: str) -> Reading:
    """The reading of a word that the server does not accept."""
    return Reading(None, problem, applied=False)


def whole(low: int, high: int = _INT_MAX, *, absent: int | None = None) -> Reader:
    """A reader of whole numbers; ``absent`` is the number that means "not said".

    Like the server it stops at the first character that is no digit, and says so.
    """

    def read(word: str) -> Reading:
        match = _LEADING_NUMBER.match(word)
        # A number of a hundred digits would cost int() more than its refusal is worth.
        if match is None or len(match[1]) > 20:
            return refused("is not a whole number")
        number = int(match[1])
        if number == absent:
            return Reading(None)
        if not low <= number <= high:
            return refused(f"must lie between {low} and {high}")
        rest = word[match.end() :]
        return Reading(number, f"is read as {number}" if rest else "")

    return read


def layers(word: str) -> Reading:
    """Layers on the GPU: a number, ``all`` (-1), or None for the server's own choice."""
    if word in AUTO_WORDS:
        return Reading(None)
    if word == "all":
        return Reading(-1)
    reading = whole(-_INT_MAX - 1)(word)
    # The server spells "all" as -2 inside, and any lower number means the same.
    return Reading(-1) if isinstance(reading.value, int) and reading.value < 0 else reading


def cache_type(word: str) -> Reading:
    """The type of a cache; an unknown one stops the server."""
    if word in CACHE_TYPES:
        return Reading(word)
    return refused(f"is no cache type; one of {', '.join(CACHE_TYPES)}")


def flash_attention(word: str) -> Reading:
    """``on``, ``off`` or ``auto`` in any of the server's spellings."""
    if word in AUTO_WORDS:
        return Reading("auto")
    reading = boolean(word)
    if not reading.applied:
        return refused("must be on, off or auto")
    return Reading("on" if reading.value else "off")


def boolean(word: str) -> Reading:
    """A switch with two sides."""
    if word in TRUE_WORDS:
        return Reading(True)
    return Reading(False) if word in FALSE_WORDS else refused("must be on or off")


def one_of(*words: str) -> Reader:
    """A reader of one word out of a few."""

    def read(word: str) -> Reading:
        return Reading(word) if word in words else refused(f"must be one of {', '.join(words)}")

    return read


load_mode: Final = one_of(*sorted(_LOAD_MODES))


def proportions(word: str) -> Reading:
    """Shares of a tensor split, separated by commas or slashes."""
    matches = [_PROPORTION.fullmatch(part) for part in re.split(r"[,/]+", word)]
    shares = tuple(float(match[1]) for match in matches if match is not None)
    if len(shares) != len(matches) or any(share > 1e30 for share in shares):
        return refused("must be a list of shares such as 3,1")
    return Reading(shares)


def devices(word: str) -> Reading:
    """Device names; ``none`` is the empty list, which offloads nothing."""
    if word == "none":
        return Reading(())
    names = tuple(name for name in word.split(",") if name)
    return Reading(names) if names else refused("must name a device, or none")


def spec_types(word: str) -> Reading:
    """Speculative types, ``none`` left out; an unknown one stops the server."""
    names = word.split(",")
    unknown = [name for name in names if name not in _SPEC_TYPES]
    if unknown:
        return refused(f"names no speculative type: {', '.join(unknown) or 'nothing'}")
    return Reading(spec_names(word))


def spec_names(word: str) -> tuple[str, ...]:
    """The speculative types that a list names; empty if one is unknown, as for ``none``."""
    names = word.split(",")
    known = all(name in _SPEC_TYPES for name in names)
    return tuple(name for name in names if name != "none") if known else ()


def overrides(word: str) -> Reading:
    """Tensor placements, each as ``pattern=buffer``."""
    entries = tuple(word.split(","))
    if any(not entry.partition("=")[2] for entry in entries):
        return refused("must be a list of PATTERN=BUFFER")
    return Reading(entries)


def text(word: str) -> Reading:
    """Any word at all."""
    return Reading(word)
