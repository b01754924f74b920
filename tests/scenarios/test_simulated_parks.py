"""Corners of a parking server's own behaviour, played by the simulated one."""

from __future__ import annotations

import pytest

from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver.options import read_options
from kvalet.sims.fakeserver.slot import FULL, Parking
from tests.sims.fakeserver.driver import open_run, solo

PARKING = ("-np", "2", "-kvu", "--preempt-ram", "64")


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_parking_at_once_is_announced_by_no_banner(way: str) -> None:
    argv = (*PARKING, "--no-preempt-async") if way == "flag" else PARKING
    env = {"LLAMA_ARG_PREEMPT_ASYNC": "0"} if way == "variable" else {}
    found = read_options(argv, {"KVALET_SIM_BUILD": "G4", **env})
    assert found.pool.parking is not None
    assert not found.pool.parking.asynchronous
    assert not any("asynchronously" in note for note in found.notes)
    banner = read_options(PARKING, {"KVALET_SIM_BUILD": "G4"}).notes
    assert any("asynchronously" in note for note in banner)


def test_parked_alone_and_nearly_as_large_as_the_pool_it_still_comes_back() -> None:
    run = open_run(256, parking=Parking(every=4))
    run.ask(1, 230, 20)
    run.finish()
    assert run.parks(1) >= 4
    assert run.ids(1) == solo(230, 1, 20)
    assert run.logged("cannot fit") == []


def test_parked_and_too_large_for_the_empty_pool_it_fails_with_the_error_of_a_full_one() -> None:
    run = open_run(1000, parking=Parking(), page=64)
    run.ask(1, 500, 40)
    run.ask(2, 970, 5)
    run.finish()
    assert run.ended(1).predicted == 40
    assert run.notices(2) == [Notice.PREEMPTED]
    assert run.failed(2).message == FULL
    assert len(run.logged("cannot fit the pool of 1000 cells even alone")) == 1
    run.ask(3, 100, 5)
    run.finish()
    assert run.ended(3).predicted == 5
