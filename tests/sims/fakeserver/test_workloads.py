"""Whatever is asked of a pool, everybody gets to an end, and parks change nobody's tokens."""

from __future__ import annotations

import random

import pytest

from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver.slot import Ended, Failed, Noticed, Parking
from tests.sims.fakeserver.driver import Run, open_run, solo

SEEDS = 25


def parking(draw: random.Random) -> Parking:
    return Parking(
        budget_mib=draw.choice([-1, 1, 4, 64]),
        asynchronous=draw.random() < 0.5,
        every=draw.choice([0, 0, 7, 30]),
        policy=draw.choice(["smallest", "largest", "youngest", "oldest"]),
        resume=draw.choice(["head", "head", "pass"]),
        planner=draw.random() < 0.8,
        fail_save=draw.random() < 0.2,
    )


def world(seed: int) -> tuple[Run, dict[int, tuple[int, int]]]:
    """Some requests over time, on a pool for which most of them are too much together."""
    draw = random.Random(seed)
    run = open_run(
        draw.choice([256, 512, 1024]),
        draw.choice([2, 3, 4]),
        parking=parking(draw),
        batch=draw.choice([32, 128, 2048]),
        page=draw.choice([1, 1, 16, 64]),
        draft_max=draw.choice([0, 0, 4]),
        copy_bytes_per_s=draw.choice([1e6, 1e8, 1e10]),
        store_mib=draw.choice([0, 16]),
        clear_idle=draw.random() < 0.5,
    )
    asked: dict[int, tuple[int, int]] = {}
    for number in range(1, draw.randrange(3, 9)):
        prompt = draw.randrange(1, run.pool.settings.cells // 2)
        tokens = draw.randrange(1, run.pool.settings.cells - prompt)
        asked[number] = (prompt, tokens)
        run.ask(number, prompt, tokens)
        for _ in range(draw.randrange(40)):
            run.turn()
    return run, asked


@pytest.mark.parametrize("seed", range(SEEDS))
def test_everybody_ends_with_the_tokens_of_a_lone_run(seed: int) -> None:
    run, asked = world(seed)
    run.finish()
    for number, (prompt, tokens) in asked.items():
        assert run.ended(number).predicted == tokens
        assert run.ids(number) == solo(prompt, number, tokens)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_notices_alternate_and_the_counters_end_even(seed: int) -> None:
    run, asked = world(seed)
    run.finish()
    for number in asked:
        heard = [notice for notice in run.notices(number) if notice is not Notice.RECOMPUTED]
        assert heard == [Notice.PREEMPTED, Notice.RESUMED] * (len(heard) // 2)
        assert run.ended(number).parks == len(heard) // 2
        assert run.ended(number).recomputes == run.notices(number).count(Notice.RECOMPUTED)
    assert run.pool.totals.parks == run.pool.totals.resumes
    assert run.pool.parks is not None
    assert run.pool.parks.bytes_held == 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whoever_leaves_and_whenever_nothing_stays_behind(seed: int) -> None:
    run, asked = world(seed)
    draw = random.Random(-seed - 1)
    gone = draw.sample(sorted(asked), k=len(asked) // 2)
    for number in gone:
        for _ in range(draw.randrange(30)):
            run.turn()
        run.pool.cancel(number)
        cut = len(run.outputs)
        run.turn()
        later = [out for _, out in run.outputs[cut:] if isinstance(out, Noticed | Ended | Failed)]
        assert number not in {out.job for out in later}
    run.finish()
    assert all(not slot.busy for slot in run.pool.slots)
    assert run.pool.parks is not None
    assert run.pool.parks.bytes_held == 0
