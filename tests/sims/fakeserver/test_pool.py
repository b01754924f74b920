"""A pool of slots: whose prompt goes where, what is used again, and how an answer ends."""

from __future__ import annotations

import pytest

from kvalet.sims.fakeserver.slot import (
    Acted,
    Action,
    ActionKind,
    Begun,
    Parking,
    Progress,
    Said,
)
from kvalet.sims.fakeserver.tokens import EOS, detokenize, tokenize
from tests.sims.fakeserver.driver import Run, open_run, solo

CHAT = tokenize("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", bos=True)


def acted(run: Run) -> list[Acted]:
    return [out for _, out in run.outputs if isinstance(out, Acted)]


def test_a_prompt_is_evaluated_batch_by_batch_and_then_spoken_to() -> None:
    run = open_run(1024, batch=100)
    run.ask(1, 250, 3)
    run.finish()
    assert isinstance(run.of(1)[0], Begun)
    parts = [out.processed for out in run.of(1) if isinstance(out, Progress)]
    assert parts == [0, 100, 200, 250]
    assert [out.predicted for out in run.of(1) if isinstance(out, Said)] == [1, 2, 3]


def test_a_turn_takes_as_long_as_the_rates_say() -> None:
    run = open_run(1024, prefill_per_s=100, tokens_per_s=10)
    run.ask(1, 200, 11)
    run.finish()
    assert run.ended(1).timings.prompt_ms == pytest.approx(2000)
    assert run.ended(1).timings.predicted_ms == pytest.approx(1000)


def test_the_next_turn_of_a_chat_finds_its_cells_again() -> None:
    run = open_run(1024)
    run.ask(1, 100, 10)
    run.finish()
    said = list(run.ids(1))
    before = run.ended(1)
    run.ask(2, [*(1000 + at for at in range(100)), *said, 5, 6, 7], 1)
    run.finish()
    assert before.cached == 109
    assert run.ended(2).timings.cache_n == 109
    assert run.ended(2).timings.prompt_n == 4
    assert run.ended(2).slot == before.slot


def test_of_a_whole_prompt_found_again_one_token_is_evaluated() -> None:
    run = open_run(1024)
    first = run.ask(1, 100, 1)
    run.finish()
    run.ask(2, list(first.prompt), 1)
    run.finish()
    assert (run.ended(2).timings.cache_n, run.ended(2).timings.prompt_n) == (99, 1)


def test_a_request_that_wants_no_cache_gets_none() -> None:
    run = open_run(1024)
    first = run.ask(1, 100, 1)
    run.finish()
    run.ask(2, list(first.prompt), 1, cache_prompt=False)
    run.finish()
    assert run.ended(2).timings.prompt_n == 100


def test_no_bound_ends_at_the_slots_context() -> None:
    run = open_run(256)
    run.ask(1, 100)
    run.finish()
    assert (run.ended(1).stop_type, run.ended(1).truncated) == ("limit", True)
    assert run.ended(1).cached == 255


def test_a_bound_of_nothing_still_says_one_token() -> None:
    run = open_run(256)
    run.ask(1, 100, 0)
    run.finish()
    assert run.ended(1).predicted == 1
    assert not run.ended(1).truncated


def test_a_chat_ends_by_itself_where_the_model_ends_and_a_legs_rest_knows_it() -> None:
    run = open_run(1024, answer_tokens=30)
    run.ask(1, CHAT)
    run.finish()
    assert run.ended(1).stop_type == "eos"
    assert run.ids(1)[-1] == EOS
    head = list(run.ids(1)[:12])
    run.ask(2, CHAT + head)
    run.finish()
    assert head + list(run.ids(2)) == list(run.ids(1))
    run.ask(3, CHAT, 60, ignore_eos=True)
    run.finish()
    assert run.ended(3).predicted == 60


def test_a_stop_word_ends_the_answer_and_is_not_said() -> None:
    whole = detokenize(solo(100, 1, 30))
    word = whole[20:27]
    run = open_run(1024)
    run.ask(1, 100, 30, stop=(word,))
    run.finish()
    said = "".join(out.text for out in run.of(1) if isinstance(out, Said))
    assert (run.ended(1).stop_type, run.ended(1).stopping_word) == ("word", word)
    assert said == run.ended(1).text == whole[: whole.index(word)]


def test_neighbours_change_an_answer_unless_they_may_not() -> None:
    def beside(alone_in_step: bool) -> tuple[int, ...]:
        run = open_run(1024, alone_in_step=alone_in_step)
        run.ask(1, 100, 50)
        run.ask(2, 100, 50)
        run.finish()
        return run.ids(1)

    assert beside(True) == solo(100, 1, 50)
    assert beside(False) != solo(100, 1, 50)


def test_a_recompute_changes_an_answer_only_when_that_is_wished() -> None:
    def parked(differs: bool) -> tuple[int, ...]:
        parking = Parking(every=20, fail_save=True)
        run = open_run(1024, parking=parking, recompute_differs=differs)
        run.ask(1, 100, 50)
        run.finish()
        return run.ids(1)

    assert parked(False) == solo(100, 1, 50)
    assert parked(True)[:20] == solo(100, 1, 50)[:20]
    assert parked(True) != solo(100, 1, 50)


def test_who_finds_no_slot_waits_and_a_pinned_one_waits_for_his() -> None:
    run = open_run(4096)
    run.ask(1, 100, 20, id_slot=0)
    run.ask(2, 100, 5, id_slot=1)
    run.ask(3, 100, 5, id_slot=4)
    run.finish()
    assert run.ended(3).slot == run.ended(1).slot == 0
    ends = [out.job for _, out in run.outputs if isinstance(out, type(run.ended(1)))]
    assert ends == [2, 1, 3]


def test_a_new_request_empties_idle_slots_and_the_store_gives_the_prompt_back() -> None:
    run = open_run(4096, clear_idle=True, store_mib=512)
    first = run.ask(1, 300, 5)
    run.finish()
    run.ask(2, 300, 5)
    run.finish()
    assert sum(map(len, (slot.cells for slot in run.pool.slots))) == 304
    run.ask(3, list(first.prompt), 5)
    run.finish()
    assert run.ended(3).timings.cache_n == 299
    run.ask(4, 300, 5, id_slot=run.ended(3).slot)
    run.finish()
    run.ask(5, list(first.prompt), 5, id_slot=1 - run.ended(4).slot)
    run.finish()
    assert run.ended(5).timings.cache_n == 0


@pytest.mark.parametrize("kind", ["save", "erase"])
def test_an_action_on_a_busy_slot_waits_until_it_is_idle(kind: ActionKind) -> None:
    run = open_run(1024)
    run.ask(1, 100, 20, id_slot=0)
    run.turn()
    run.pool.act(Action(number=7, kind=kind, slot=0))
    run.turn()
    assert acted(run) == []
    run.finish()
    (done,) = acted(run)
    assert len(done.tokens) == 119
    assert len(run.pool.slots[0].cells) == (119 if kind == "save" else 0)


def test_an_action_on_a_parked_slot_waits_too() -> None:
    run = open_run(2048, parking=Parking())
    run.ask(1, 100, 1500)
    run.ask(2, 100, 1500)
    run.until(lambda: run.parks(1) + run.parks(2) == 1)
    parked = 1 if run.parks(1) else 2
    run.pool.act(Action(number=7, kind="erase", slot=run.slot_of(parked).number))
    run.turn()
    assert acted(run) == []
    run.finish()
    assert len(acted(run)) == 1


def test_a_restored_slot_is_continued_and_one_without_room_is_refused() -> None:
    run = open_run(1024)
    saved = tuple(range(5000, 5600))
    run.pool.act(Action(number=1, kind="restore", slot=0, tokens=saved))
    run.finish()
    run.ask(1, [*saved, 9], 1, id_slot=0)
    run.finish()
    assert run.ended(1).timings.cache_n == 600
    run.pool.act(Action(number=2, kind="restore", slot=1, tokens=saved))
    run.finish()
    assert [done.done for done in acted(run)] == [True, False]


def test_a_cancelled_request_keeps_its_cells_and_says_so() -> None:
    run = open_run(1024)
    run.ask(1, 100, 50)
    run.ask(2, 100, 50, id_slot=0)
    run.until(lambda: len(run.ids(1)) == 10)
    assert run.pool.cancel(1) == ["cancel task, id_task = 1", "stop processing: n_tokens = 109"]
    assert run.pool.cancel(2) == []
    run.finish()
    assert sum(len(slot.cells) for slot in run.pool.slots) == 109
    assert run.of(2) == []
