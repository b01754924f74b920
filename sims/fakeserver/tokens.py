"""A tokenizer and a model that are one page long: reversible, and the same on every machine.

A token is up to three bytes of a word, so any id below ``VOCABULARY`` has a text and
any text comes back from its ids. The model speaks in syllables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

BOS, EOS, TURN, TURN_END, IMAGE = 256, 257, 258, 259, 260
SPECIAL: Final = {
    "<bos>": BOS,
    "<eos>": EOS,
    "<|im_start|>": TURN,
    "<|im_end|>": TURN_END,
    "<|image|>": IMAGE,
}
_SPECIAL_TEXT: Final = {token: text for text, token in SPECIAL.items()}
_PAIRS: Final = 1024
_TRIPLES: Final = _PAIRS + (1 << 16)
VOCABULARY: Final = _TRIPLES + (1 << 24)

_PIECE: Final = re.compile(r" ?\w+| ?[^\w\s]+|\s", re.DOTALL)
_TURN: Final = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL) + ")")
_CONSONANTS: Final = "bdfgklmnprstvz"
_VOWELS: Final = "aeiou"
_MASK: Final = (1 << 64) - 1
_PRIME: Final = 0x100000001B3
_SEED: Final = 0xCBF29CE484222325
_NAME_ONE_IN: Final = 12

ROLE_TOKENS: Final = 5
"""Tokens of a template's opening of an answer: the mark, the role's name, a line end."""


def tokenize(text: str, *, bos: bool = False, special: bool = True) -> list[int]:
    """``text`` as ids. ``special``: whether the marks of a template are one token each."""
    ids = [BOS] if bos else []
    for part in _TURN.split(text) if special else [text]:
        if special and part in SPECIAL:
            ids.append(SPECIAL[part])
            continue
        for piece in _PIECE.findall(part):
            raw = str(piece).encode("utf-8", "surrogatepass")
            ids.extend(_id_of(raw[at : at + 3]) for at in range(0, len(raw), 3))
    return ids


def tokenize_parts(
    parts: Iterable[str | int], *, bos: bool = False, special: bool = True
) -> list[int]:
    """Texts and ids side by side, as ids; ``bos`` is for a text that comes first."""
    ids: list[int] = []
    for at, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += tokenize(part, bos=bos and at == 0, special=special)
    return ids


def piece_of(token: int) -> bytes:
    """The bytes of one token, those of a template's marks included."""
    if token >= _TRIPLES:
        return (token - _TRIPLES).to_bytes(3, "big")
    if token >= _PAIRS:
        return (token - _PAIRS).to_bytes(2, "big")
    if token in _SPECIAL_TEXT:
        return _SPECIAL_TEXT[token].encode()
    return bytes([token]) if token < BOS else b""


def detokenize(ids: Iterable[int]) -> str:
    """The text of ``ids``; bytes that are no text become the replacement character."""
    return b"".join(map(piece_of, ids)).decode("utf-8", "replace")


def is_token(token: int) -> bool:
    """Whether the vocabulary has it."""
    return 0 <= token < VOCABULARY


def digest(tokens: Iterable[int], start: int = _SEED) -> int:
    """A number that stands for a whole sequence; ``start`` continues an earlier one."""
    for token in tokens:
        start = ((start ^ token) * _PRIME) & _MASK
    return start


def next_token(so_far: int, mixed_in: int = 0) -> int:
    """What the model says after the sequence whose digest is ``so_far``.

    ``mixed_in`` other than 0 stands for everything else that moves the last bits of a
    sum: who else was in the step, and which way the cells came to be there.
    """
    drawn = digest((mixed_in + 1,), so_far)
    drawn ^= drawn >> 29
    drawn, vowel = divmod(drawn, len(_VOWELS))
    drawn, consonant = divmod(drawn, len(_CONSONANTS))
    word = _CONSONANTS[consonant] + _VOWELS[vowel]
    # Never a mark beside a mark: the text of an answer comes back as the same ids.
    return _id_of(f" {word if drawn % _NAME_ONE_IN else word.title()}".encode())


def answered(tokens: Sequence[int], bound: int) -> int:
    """Tokens since the last answer was opened, counted up to ``bound``; 0 outside of a chat."""
    first = max(0, len(tokens) - bound - ROLE_TOKENS)
    for at in range(len(tokens) - 1, first - 1, -1):
        if tokens[at] == TURN:
            return max(0, len(tokens) - at - ROLE_TOKENS)
    return bound if TURN in tokens else 0


def _id_of(raw: bytes) -> int:
    number = int.from_bytes(raw, "big")
    return number + (0, 0, _PAIRS, _TRIPLES)[len(raw)]
