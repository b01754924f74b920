"""What kvalet reads from a llama-server it reads from the simulated one."""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from kvalet.protocol import llama
from kvalet.protocol.notices import NoticeState, read_notice
from kvalet.protocol.sse import SseSplitter
from kvalet.sims.fakeserver.build import BUILDS
from tests.sims.fakeserver.house import house, prompt, streamed


@pytest.mark.parametrize("build", BUILDS)
async def test_its_pages_are_understood(
    autojump_clock: MockClock, build: str, tmp_path: Path
) -> None:
    async with house("--slot-save-path", str(tmp_path), build=build) as it:
        props = llama.decode_props((await it.client.get("/props")).content)
        answer = await it.ask({"prompt": prompt(1, 50), "n_predict": 5})
        slots = llama.decode_slots((await it.client.get("/slots")).content)
        tokens = await it.ask({"content": "Hi"}, "/tokenize")
        erased = await it.ask(b"", f"/slots/{answer.json['id_slot']}?action=erase")
        refused = await it.ask({"prompt": prompt(1, 3000), "n_predict": 5})
    assert (props.n_ctx, props.slots, props.build) == (2048, 2, BUILDS[build].info)
    assert llama.decode_completion(answer.raw).tokens_cached == 54
    assert sum(slot.n_prompt_tokens for slot in slots) == 54
    assert llama.decode_tokens(tokens.raw)
    assert llama.decode_slot_action(erased.raw).n_erased == 54
    assert llama.decode_error(refused.raw).n_prompt_tokens == 3000


async def test_its_notices_are_counted_as_it_counts_its_parks(autojump_clock: MockClock) -> None:
    env = {"LLAMA_SERVER_PREEMPT_EVERY": "20"}
    async with house("--preempt-ram", "1", **env) as it:
        guest = await it.ask(streamed(1, 100, 70))
    state = NoticeState()
    for event in SseSplitter().feed(guest.raw):
        for comment in event.comments:
            notice = read_notice(comment)
            assert notice is not None
            state.hear(*notice)
    record = guest.events[-1]["preempt"]
    assert (state.parks, state.resumes, state.recomputes) == (record["parks"], 3, 3)
    assert (state.anomalies, state.parked) == (0, False)
