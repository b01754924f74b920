"""Every part of the benchmark runs, in sizes too small to measure anything."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import attrs
import httpx
import msgspec
import pytest
import trio
from click.testing import CliRunner

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.state import House, recount
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.errors import ConfigFault, EnvironmentFault, ServerFault
from kvalet.sims import bench, figures
from kvalet.sims.bench import Sizes
from kvalet.sims.bench_relay import Load, drive
from kvalet.sims.fakeupstream import CELLS
from kvalet.sims.figures import Figure
from kvalet.sims.programs import Program, running
from kvalet.sims.workload import record

TINY = Sizes(commands=300, repeats=2, burst_events=64, paced_s=0.05, solo_tokens=8)


def by_name(found: list[Figure]) -> dict[str, float]:
    values = {figure.name: figure.value for figure in found}
    assert len(values) == len(found), "no two figures share a name"
    return values


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- the workload ---------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [4, 64])
def test_a_recorded_world_uses_every_line_and_breaks_no_promise(slots: int) -> None:
    house = House()
    kinds: Counter[type[e.AnyEvent]] = Counter()
    for at_ns, command in record(slots, 4000):
        events, house = take(house, command, at_ns)
        kinds.update(type(event) for event in events)
        assert house.granted_total <= house.limit
    assert recount(house) == house
    wanted = {e.LeaseExtended, e.LeaseParked, e.LeaseResumed, e.LeaseQueued, e.SlotCleared}
    assert wanted <= set(kinds)
    assert house.totals.finished > 10
    assert house.totals.refused == 0


def test_the_same_seed_records_the_same_commands() -> None:
    one, two, other = record(4, 500, seed=7), record(4, 500, seed=7), record(4, 500, seed=8)

    assert msgspec.json.encode(one) == msgspec.json.encode(two)
    assert one != other
    assert len(one) == 500
    assert isinstance(one[0][1], c.OpenHouse)


# --- the parts ------------------------------------------------------------------------------


async def test_the_core_part_gives_a_rate_for_few_and_for_many_slots(tmp_path: Path) -> None:
    found = by_name(await bench.measure(["core"], TINY, tmp_path))

    assert set(found) == {"decisions, 4 slots", "decisions, 64 slots"}
    assert min(found.values()) > 0


async def test_the_journal_part_stores_what_it_decides_and_leaves_no_file(tmp_path: Path) -> None:
    found = by_name(await bench.measure(["journal"], TINY, tmp_path))

    assert len(found) == 2
    assert min(found.values()) > 0
    assert files_below(tmp_path) == []


async def test_the_relay_part_compares_both_ways_for_every_number_of_streams(
    tmp_path: Path,
) -> None:
    found = by_name(await bench.measure(["relay"], TINY, tmp_path))

    for streams in ("1 stream", "4 streams", "16 streams"):
        assert found[f"burst, through/straight, {streams}"] > 0
        assert f"added latency p50, {streams}" in found
        assert f"added latency p99, {streams}" in found
    assert (tmp_path / "relay" / "journal.jsonl").stat().st_size > 0


@pytest.mark.real
async def test_the_solo_part_compares_both_ways_on_one_real_server(tmp_path: Path) -> None:
    found = by_name(await bench.measure(["solo"], attrs.evolve(TINY, repeats=1), tmp_path))

    assert found["alone, through/straight"] > 0
    assert found["legs of an answer"] >= 1


# --- the programs beside it -----------------------------------------------------------------


async def test_the_fake_upstream_answers_what_kvalet_asks_of_a_server() -> None:
    async with (
        running("kvalet.sims.fakeupstream", "3") as upstream,
        httpx.AsyncClient(base_url=upstream.url, trust_env=False) as client,
    ):
        assert (await client.get("/health")).json() == {"status": "ok"}
        slots = (await client.get("/slots")).json()
        assert [(slot["id"], slot["n_ctx"], slot["is_processing"]) for slot in slots] == [
            (0, CELLS, False),
            (1, CELLS, False),
            (2, CELLS, False),
        ]
        assert (await client.post("/slots/0?action=erase")).status_code == 501
        assert (await client.get("/nothing")).status_code == 404


async def test_a_paced_run_knows_how_late_each_event_came() -> None:
    async with running("kvalet.sims.fakeupstream", "2") as upstream:
        run = await drive(upstream, Load(streams=2, events=5, events_per_s=200.0))

    assert len(run.late_us) == 10
    assert min(run.late_us) > 0
    assert run.wall_s >= 4 / 200


async def test_a_program_that_is_left_has_ended() -> None:
    async with running("kvalet.sims.fakeupstream", "1") as upstream:
        assert is_there(upstream.pid)
    assert not is_there(upstream.pid)


async def test_a_program_that_does_not_start_is_a_fault_of_the_environment() -> None:
    with pytest.RaisesGroup(EnvironmentFault):
        async with running("kvalet.sims.fakeupstream", "not a number"):
            raise AssertionError("it has started")


async def test_an_answer_that_lacks_events_fails_the_run() -> None:
    async def refuse(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, refuse, 0)
        port = listeners[0].socket.getsockname()[1]
        with pytest.RaisesGroup(ServerFault):
            await drive(Program(f"http://127.0.0.1:{port}", 0), Load(streams=1, events=3))
        nursery.cancel_scope.cancel()


# --- figures and the command line -----------------------------------------------------------


def test_a_figure_is_held_against_its_floor_or_its_ceiling() -> None:
    floor = Figure(part="p", name="n", value=0.98, unit="ratio", target=0.99)
    ceiling = Figure(part="p", name="n", value=4.0, unit="us", target=5.0, ceiling=True)
    free = Figure(part="p", name="n", value=1.0, unit="us")

    assert (floor.met, ceiling.met, free.met) == (False, True, None)
    assert [row["met"] for row in figures.document([floor, ceiling, free])] == [False, True, None]
    header, *rows = figures.lines([floor, ceiling, free])
    assert header.split()[:3] == ["part", "figure", "value"]
    assert ">= 0.99  missed" in rows[0]
    assert "<= 5  met" in " ".join(rows[1].split("   "))


def test_a_percentile_is_one_of_the_values() -> None:
    assert figures.percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.0
    assert figures.percentile([3.0, 1.0, 2.0, 4.0], 99) == 4.0
    assert figures.percentile([5.0], 1) == 5.0


def test_parts_run_in_their_own_order_and_unknown_ones_are_named() -> None:
    assert bench.split_parts("journal, core") == ("core", "journal")
    with pytest.raises(ConfigFault, match="cores"):
        bench.split_parts("cores,relay")


def test_the_command_line_prints_one_document() -> None:
    result = CliRunner().invoke(bench.main, ["--only", "core", "--quick", "--json"])

    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["quick"] is True
    assert [figure["part"] for figure in document["figures"]] == ["core", "core"]


def test_a_part_that_does_not_exist_is_wrong_usage() -> None:
    result = CliRunner().invoke(bench.main, ["--only", "wheels"])

    assert result.exit_code == 2
    assert "no such part: wheels" in result.stderr
