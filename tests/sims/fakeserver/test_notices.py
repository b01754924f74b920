"""What a client of a build with notices hears while it is parked, and when."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.sims.fakeserver.house import Guest, House, house, prompt, streamed

PARKING = ("--preempt-ram", "-1")
CHAT: dict[str, Any] = {"stream": True, "ignore_eos": True}


def surfaces(number: int, tokens: int, n_predict: int) -> list[tuple[str, dict[str, Any]]]:
    """The same prompt of about so many tokens on every surface that streams."""
    text = "".join(f" w{number}" for _ in range(tokens))
    messages = [{"role": "user", "content": text}]
    return [
        ("/completion", {"prompt": text, "n_predict": n_predict, **CHAT}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": n_predict, **CHAT}),
        ("/v1/responses", {"input": text, "max_output_tokens": n_predict, **CHAT}),
        ("/v1/messages", {"messages": messages, "max_tokens": n_predict, **CHAT}),
    ]


async def two_outgrow(it: House, n_predict: int = 1500) -> tuple[Guest, Guest]:
    one = it.invite(streamed(1, 100, n_predict))
    other = it.invite(streamed(2, 100, n_predict))
    await it.until(lambda: one.over and other.over)
    return one, other


async def test_a_parked_stream_hears_of_it_and_its_data_is_as_if_alone(
    autojump_clock: MockClock,
) -> None:
    async with house(*PARKING) as it:
        one, other = await two_outgrow(it)
        alone = await it.ask(streamed(2, 100, 1500))
    parked = other if other.notices else one
    assert parked.notices == ["preempted", "resumed"] * (len(parked.notices) // 2)
    assert other.text == alone.text
    assert parked.events[-1]["preempt"]["parks"] == len(parked.notices) // 2


async def test_keepalives_come_two_to_three_seconds_apart_and_are_named_so(
    autojump_clock: MockClock,
) -> None:
    async with house(*PARKING) as it:
        one, other = await two_outgrow(it)
    parked = other if other.notices else one
    (began, *_), (back, *_) = parked.when(b": preempted\n\n"), parked.when(b": resumed\n\n")
    beats = parked.when(b": preempt-keepalive\n\n")
    assert back - began > 10
    assert 2 <= beats[0] - began <= 3.05
    gaps = [after - before for before, after in itertools.pairwise(beats)]
    assert all(2 <= gap <= 3.05 for gap in gaps)
    assert b":\n\n" not in parked.raw


async def test_a_shorter_ping_that_was_asked_for_is_kept_while_parked(
    autojump_clock: MockClock,
) -> None:
    async with house(*PARKING) as it:
        one = it.invite(streamed(1, 100, 1500, sse_ping_interval=1))
        other = it.invite(streamed(2, 100, 1500, sse_ping_interval=1))
        await it.until(lambda: one.over and other.over)
    beats = (one.when(b"keepalive") or other.when(b"keepalive"))[:5]
    gaps = [after - before for before, after in itertools.pairwise(beats)]
    assert gaps
    assert all(1 <= gap <= 2.05 for gap in gaps)


async def test_switching_pings_off_leaves_the_keepalives(autojump_clock: MockClock) -> None:
    async with house(*PARKING, "--sse-ping-interval", "-1") as it:
        one, other = await two_outgrow(it)
    assert one.when(b"keepalive") or other.when(b"keepalive")


async def test_an_ordinary_ping_is_an_empty_comment(autojump_clock: MockClock) -> None:
    async with house(KVALET_SIM_TOKENS_PER_S="0.2") as it:
        guest = await it.ask(streamed(1, 10, 3, sse_ping_interval=1))
    assert set(guest.comments) == {b":"}
    assert guest.notices == []


@pytest.mark.parametrize("place", range(4))
async def test_a_prompt_parked_before_its_first_token_opens_the_stream_at_once(
    autojump_clock: MockClock, place: int
) -> None:
    async with house(*PARKING) as it:
        resident = it.invite(streamed(1, 1500, 200))
        await trio.sleep(1)
        path, body = surfaces(2, 800, 5)[place]
        asked_at = trio.current_time()
        guest = it.invite(body, path)
        await it.until(lambda: guest.over)
    assert guest.status == 200
    assert guest.opened_at - asked_at < 0.1
    assert guest.blocks[0] == b": preempted"
    assert guest.notices == ["preempted", "resumed"]
    (parked,), first = guest.when(b": preempted"), guest.when(b"data: ")[0]
    assert guest.when(b": resumed")[0] <= first
    assert first - parked > 0.05
    assert resident.over


async def test_an_early_build_keeps_its_notices_until_there_is_something_to_say(
    autojump_clock: MockClock,
) -> None:
    async with house(build="G3-early") as it:
        resident = it.invite(streamed(1, 1500, 200))
        await trio.sleep(1)
        asked_at = trio.current_time()
        guest = await it.ask(streamed(2, 1200, 5))
    assert guest.opened_at - asked_at > 2
    assert guest.raw.startswith(b": preempted\n\n: resumed\n\n")
    assert resident.over


@pytest.mark.parametrize("place", range(4))
async def test_every_park_that_drops_its_cells_says_so_right_after_it_is_back(
    autojump_clock: MockClock, place: int
) -> None:
    async with house("--preempt-ram", "1", LLAMA_SERVER_PREEMPT_EVERY="20") as it:
        path, body = surfaces(1, 100, 70)[place]
        guest = await it.ask(body, path)
        counted = await it.metric("preempt_recompute_total")
    assert guest.notices == ["preempted", "resumed", "recomputed"] * 3
    assert counted == 3


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("stream", [True, False])
async def test_the_record_lies_where_each_surface_has_it(
    autojump_clock: MockClock, place: int, stream: bool
) -> None:
    async with house("--preempt-ram", "1", LLAMA_SERVER_PREEMPT_EVERY="20") as it:
        path, body = surfaces(1, 100, 70)[place]
        guest = await it.ask({**body, "stream": stream}, path)
    ends = [event for event in guest.events if "preempt" in str(event)] if stream else [guest.json]
    last = ends[-1].get("response", ends[-1])
    assert last["preempt"] == {"parks": 3, "recomputes": 3}


async def test_a_chat_that_wants_its_usage_finds_the_record_beside_it(
    autojump_clock: MockClock,
) -> None:
    async with house() as it:
        _, body = surfaces(1, 10, 5)[1]
        body["stream_options"] = {"include_usage": True}
        guest = await it.ask(body, "/v1/chat/completions")
    (last,) = [event for event in guest.events if "preempt" in event]
    assert last["usage"]["completion_tokens"] == 5
    assert last["preempt"] == {"parks": 0, "recomputes": 0}


async def test_the_counts_come_without_the_notice_in_some_builds(autojump_clock: MockClock) -> None:
    env = {"LLAMA_SERVER_PREEMPT_EVERY": "20"}
    async with house("--preempt-ram", "1", build="G4-counts", **env) as it:
        guest = await it.ask(streamed(1, 100, 70))
    assert guest.notices == ["preempted", "resumed"] * 3
    assert guest.events[-1]["preempt"] == {"parks": 3, "recomputes": 3}


@pytest.mark.parametrize("build", ["G0", "G1", "G2", "G3"])
async def test_older_builds_have_no_record(autojump_clock: MockClock, build: str) -> None:
    async with house(build=build) as it:
        guest = await it.ask(streamed(1, 10, 5))
    assert "preempt" not in guest.events[-1]


@pytest.mark.parametrize(
    ("build", "expected"),
    [("G3", {"preempted", "preempted 1"}), ("G4", {"preempted 0", "preempted 1"})],
)
async def test_the_answers_of_one_request_are_told_apart(
    autojump_clock: MockClock, build: str, expected: set[str]
) -> None:
    async with house(*PARKING, build=build, LLAMA_SERVER_PREEMPT_EVERY="20") as it:
        body = {"prompt": [prompt(1, 50), prompt(2, 50)], "n_predict": 70, "stream": True}
        guest = await it.ask(body)
    assert {notice for notice in guest.notices if "preempted" in notice} == expected
    assert {event["index"] for event in guest.events} == {0, 1}


async def test_an_oversized_prompt_behind_a_resident_is_a_plain_error(
    autojump_clock: MockClock,
) -> None:
    async with house(*PARKING) as it:
        it.invite(streamed(1, 1500, 200))
        await trio.sleep(1)
        guest = await it.ask(streamed(2, 2048, 5))
        sibling = await it.ask(streamed(2, 1, 5) | {"prompt": [prompt(2, 9), prompt(3, 4000)]})
    assert guest.status == sibling.status == 400
    assert guest.json["error"]["type"] == "exceed_context_size_error"
    assert guest.json["error"]["n_prompt_tokens"] == 2048
    assert sibling.json["error"]["n_ctx"] == 2048


async def test_an_invalid_token_in_a_sibling_is_a_plain_error_and_nothing_is_parked(
    autojump_clock: MockClock,
) -> None:
    async with house(*PARKING) as it:
        body = {"prompt": [prompt(1, 5), [999_999_999]], "n_predict": 5, "stream": True}
        guest = await it.ask(body)
        assert (guest.status, await it.metric("n_preempt_total")) == (400, 0)
    assert guest.json["error"]["message"] == "Prompt contains invalid tokens"


async def test_who_leaves_while_parked_frees_the_memory_within_a_poll(
    autojump_clock: MockClock,
) -> None:
    async with house(*PARKING) as it:
        guests = [it.invite(streamed(number, 100, 1500)) for number in (1, 2)]
        await it.until(lambda: any(guest.notices for guest in guests))
        parked = next(guest for guest in guests if guest.notices)
        await trio.sleep(0.5)
        assert await it.metric("preempt_ram_bytes") > 0
        assert await it.metric("requests_preempted") == 1
        assert await it.metric("requests_processing") == 2
        parked.scope.cancel()
        await trio.sleep(1.2)
        assert await it.metric("preempt_ram_bytes") == 0
        assert sum(slot["is_processing"] for slot in await it.get("/slots")) == 1


async def test_a_restore_that_never_works_ends_the_stream_with_its_error(
    autojump_clock: MockClock,
) -> None:
    faults = '[{"kind":"restore_fails","times":100000}]'
    env = {"LLAMA_SERVER_PREEMPT_EVERY": "8", "KVALET_SIM_FAULTS": faults}
    async with house(*PARKING, **env) as it:
        guest = await it.ask(streamed(1, 20, 64))
    assert guest.events[-1]["error"]["message"] == "failed to restore the preempted sequence"
    assert guest.when(b"error")[0] > 60


async def test_a_silent_build_says_nothing_for_twenty_five_minutes(
    autojump_clock: MockClock,
) -> None:
    async with house(build="G1", KVALET_SIM_TOKENS_PER_S="0.4") as it:
        resident = it.invite(streamed(1, 1000, 620, sse_ping_interval=-1))
        await trio.sleep(5)
        guest = it.invite(streamed(2, 1900, 2, sse_ping_interval=-1))
        await trio.sleep(1500)
        assert (guest.status, guest.raw) == (0, b"")
        assert await it.metric("requests_preempted") == 1
        await it.until(lambda: guest.over)
    assert resident.over
    assert (guest.status, guest.comments) == (200, [])


async def test_an_issued_copy_still_owns_its_cells_in_slots(autojump_clock: MockClock) -> None:
    env = {"LLAMA_SERVER_PREEMPT_EVERY": "8", "KVALET_SIM_COPY_MIB_PER_S": "10"}
    seen: set[tuple[bool, bool]] = set()
    async with house(*PARKING, **env) as it:
        guest = it.invite(streamed(1, 20, 64))
        while not guest.over:
            for slot in await it.get("/slots"):
                state = (slot["is_preempted"], slot["is_transferring"])
                seen.add(state)
                assert state != (True, True)
                assert not state[1] or slot["n_prompt_tokens"] > 0
            await trio.sleep(0.003)
    assert (False, True) in seen


async def test_older_builds_call_a_copy_parked(autojump_clock: MockClock) -> None:
    env = {"LLAMA_SERVER_PREEMPT_EVERY": "8", "KVALET_SIM_COPY_MIB_PER_S": "10"}
    async with house(build="G3", **env) as it:
        guest = it.invite(streamed(1, 20, 64))
        await it.until(lambda: bool(guest.notices), 0.001)
        slots = await it.get("/slots")
    assert any(slot["is_preempted"] for slot in slots)
    assert all("is_transferring" not in slot for slot in slots)


async def test_slots_count_parks_of_the_present_request_only(autojump_clock: MockClock) -> None:
    async with house(*PARKING, LLAMA_SERVER_PREEMPT_EVERY="8") as it:
        before = await it.get("/slots")
        await it.ask(streamed(1, 20, 64))
        after = await it.get("/slots")
        assert await it.metric("n_preempt_total") == await it.metric("n_resume_total") >= 6
    assert [(slot["is_preempted"], slot["n_preempt"]) for slot in before] == [(False, 0)] * 2
    assert sum(slot["n_preempt"] for slot in after) == 0
