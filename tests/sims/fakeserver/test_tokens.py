"""The tokenizer gives back what it took, and the model says the same thing every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvalet.sims.fakeserver import tokens

CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def answer(prompt: list[int], length: int, mixed_in: int = 0) -> list[int]:
    said: list[int] = []
    for _ in range(length):
        said.append(tokens.next_token(tokens.digest(prompt + said), mixed_in))
    return said


@given(st.text())
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    assert tokens.detokenize(tokens.tokenize(text)) == text


@given(st.lists(st.integers(0, tokens.VOCABULARY - 1)))
def test_every_id_of_the_vocabulary_has_a_text(ids: list[int]) -> None:
    tokens.detokenize(ids)
    assert all(tokens.is_token(token) for token in ids)


def test_ids_outside_of_the_vocabulary_are_no_tokens() -> None:
    assert not tokens.is_token(-1)
    assert not tokens.is_token(999_999_999)


def test_a_templates_marks_are_one_token_each_unless_they_are_plain_text() -> None:
    assert tokens.tokenize("<|im_end|>") == [tokens.TURN_END]
    assert len(tokens.tokenize("<|im_end|>", special=False)) > 1
    assert tokens.tokenize("hi", bos=True)[0] == tokens.BOS


def test_a_picture_of_four_bytes_is_more_than_one_token() -> None:
    llama = tokens.tokenize("🦙")
    assert len(llama) == 2
    assert tokens.detokenize(llama) == "🦙"


def test_an_answers_text_is_the_same_ids_again() -> None:
    said = answer(tokens.tokenize(CHAT, bos=True), 400)
    assert tokens.tokenize(tokens.detokenize(said)) == said


def test_the_model_depends_on_all_that_was_said_and_on_nothing_else() -> None:
    one, other = tokens.tokenize("one"), tokens.tokenize("other")
    assert answer(one, 20) == answer(one, 20)
    assert answer(one, 20) != answer(other, 20)
    head = answer(one, 7)
    assert answer(one + head, 13) == answer(one, 20)[7:]


def test_what_is_mixed_in_changes_the_answer() -> None:
    prompt = tokens.tokenize("one")
    assert answer(prompt, 20, mixed_in=3) != answer(prompt, 20)


@pytest.mark.parametrize("length", [0, 1, 9, 40])
def test_the_length_of_an_answer_is_read_off_the_sequence(length: int) -> None:
    prompt = tokens.tokenize(CHAT, bos=True)
    assert tokens.answered(prompt + answer(prompt, length), bound=30) == min(length, 30)


def test_outside_of_a_chat_nothing_is_an_answer() -> None:
    assert tokens.answered(tokens.tokenize("once upon a time " * 40), bound=30) == 0
