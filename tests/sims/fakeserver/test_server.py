"""The simulated server's routes, byte for byte where a client reads bytes, and its faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio
from trio.testing import MockClock

from tests.sims.fakeserver.house import Guest, house, prompt, streamed

FULL = {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TIMINGS = [
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
]


def names(guest: Guest) -> list[str]:
    lines = guest.raw.split(b"\n")
    return [line[7:].decode() for line in lines if line.startswith(b"event: ")]


async def test_a_streamed_completion_has_the_recorded_fields(autojump_clock: MockClock) -> None:
    async with house(build="G0") as it:
        guest = await it.ask({"prompt": "Once", "n_predict": 2, "stream": True})
    first, _, last = guest.blocks
    assert first == (
        b'data: {"index":0,"content":" li","tokens":[%d],"stop":false,"id_slot":-1,'
        b'"tokens_predicted":1,"tokens_evaluated":3}' % guest.events[0]["tokens"][0]
    ).replace(b" li", guest.events[0]["content"].encode())
    assert last.startswith(b'data: {"index":0,"content":"","tokens":[],"id_slot":')
    assert list(guest.events[-1])[6:] == [
        *("tokens_predicted", "tokens_evaluated", "generation_settings", "prompt"),
        *("has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached", "timings"),
    ]
    assert list(guest.events[-1]["timings"]) == TIMINGS
    assert guest.events[-1]["prompt"] == "<bos>Once"
    assert guest.events[-1]["tokens_cached"] == 4


async def test_a_streamed_chat_has_the_recorded_fields(autojump_clock: MockClock) -> None:
    async with house(build="G0") as it:
        body = {**HI, "stream": True, "stream_options": {"include_usage": True}}
        guest = await it.ask(body, "/v1/chat/completions")
    assert guest.blocks[-1] == b"data: [DONE]"
    role, *deltas, finish, usage = guest.events
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert [list(delta["choices"][0]["delta"]) for delta in deltas] == [["content"]] * 3
    assert finish["choices"] == [{"finish_reason": "length", "index": 0, "delta": {}}]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    envelope = ["choices", "created", "id", "model", "system_fingerprint", "object"]
    assert list(role) == list(finish) == envelope
    assert list(usage) == [*envelope, "usage", "timings"]


async def test_named_events_come_in_the_recorded_order(autojump_clock: MockClock) -> None:
    async with house() as it:
        body = {"input": "hi", "max_output_tokens": 2, "stream": True}
        responses = await it.ask(body, "/v1/responses")
        messages = await it.ask({**HI, "max_tokens": 2, "stream": True}, "/v1/messages")
    assert names(responses) == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.output_text.delta"),
        *("response.output_text.delta", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done", "response.completed"),
    ]
    assert names(messages) == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]


async def test_text_completions_end_with_their_usage(autojump_clock: MockClock) -> None:
    async with house(build="G0") as it:
        body = {"prompt": "Once", "max_tokens": 2, "stream": True}
        guest = await it.ask(body, "/v1/completions")
        whole = await it.ask({**body, "stream": False}, "/v1/completions")
    assert guest.blocks[-1] == b"data: [DONE]"
    assert list(guest.events[-1])[-3:] == ["usage", "id", "timings"]
    assert whole.json["choices"][0]["text"] == "".join(
        event["choices"][0]["text"] for event in guest.events
    )


async def test_an_answer_that_is_not_streamed_is_the_same_text(autojump_clock: MockClock) -> None:
    async with house() as it:
        stream = await it.ask({"prompt": "Once", "n_predict": 9, "stream": True})
        whole = await it.ask({"prompt": "Once", "n_predict": 9, "return_tokens": True})
        chat = await it.ask(HI, "/v1/chat/completions")
    assert whole.json["content"] == stream.text
    assert len(whole.json["tokens"]) == 9
    assert chat.json["choices"][0]["message"]["role"] == "assistant"
    assert whole.json["timings"]["cache_n"] == 2


async def test_progress_is_told_to_those_who_ask(autojump_clock: MockClock) -> None:
    async with house("-b", "100", build="G0") as it:
        guest = await it.ask(streamed(1, 250, 1, return_progress=True))
    parts = [event["prompt_progress"] for event in guest.events if "prompt_progress" in event]
    assert [part["processed"] for part in parts] == [0, 100, 200, 250]
    assert guest.events[0]["tokens"] == [0]


async def test_an_overflow_ends_every_stream_with_its_error_and_no_done(
    autojump_clock: MockClock,
) -> None:
    async with house(build="G0") as it:
        text = it.invite(streamed(1, 100, 1500))
        chat = it.invite({**HI, "max_tokens": 1500, "stream": True}, "/v1/chat/completions")
        await it.until(lambda: text.over and chat.over)
        whole = await it.ask({"prompt": prompt(3, 10), "n_predict": 3})
    assert text.events[-1] == chat.events[-1] == {"error": FULL}
    assert b"[DONE]" not in chat.raw
    assert text.broken == chat.broken == ""
    assert whole.status == 200


async def test_an_overflow_in_the_anthropic_dialect_has_a_name(autojump_clock: MockClock) -> None:
    async with house(build="G0") as it:
        one = it.invite({**HI, "max_tokens": 1500, "stream": True}, "/v1/messages")
        other = it.invite({"prompt": prompt(2, 100), "n_predict": 1500})
        await it.until(lambda: one.over and other.over)
    assert names(one)[-1] == "error"
    assert one.events[-1] == FULL
    assert (other.status, other.json) == (500, {"error": FULL})


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/completion", b'{"n_predict":3}', 400, "key 'prompt' not found"),
        ("/completion", b'{"prompt":"x","top_k":"bad"}', 400, "type must be number, but is string"),
        ("/completion", b'{"prompt":"x","n_predict":-5}', 400, "but got -5"),
        ("/completion", b'{"prompt":[999999999]}', 400, "Prompt contains invalid tokens"),
        ("/completion", b"{b", 400, "parse error"),
        ("/completion", b'{"prompt":{}}', 400, "must be a string"),
        ("/v1/chat/completions", b"{}", 400, "'messages' is required"),
        ("/v1/responses", b"{}", 400, "'input' is required"),
        ("/v1/embeddings", b"{}", 501, "does not support embeddings"),
        ("/props", b"{}", 501, "Start it with `--props`"),
        ("/slots/0?action=erase", b"", 501, "does not support slots action"),
        ("/nope", b"", 404, "File Not Found"),
    ],
)
async def test_what_cannot_be_answered_is_refused(
    autojump_clock: MockClock, path: str, body: bytes, status: int, message: str
) -> None:
    async with house() as it:
        guest = await it.ask(body, path)
    assert guest.status == status
    error = guest.json["error"]
    assert message in error["message"]
    assert error["code"] == status


async def test_exact_mode_refuses_more_than_one_answer(autojump_clock: MockClock) -> None:
    async with house(LLAMA_EXACT_CONCURRENCY="1") as it:
        assert (await it.get("/props"))["exact_concurrency"] is True
        guest = await it.ask({**HI, "n": 2}, "/v1/chat/completions")
        assert guest.status == 400
    async with house() as it:
        guest = await it.ask({**HI, "n": 2}, "/v1/chat/completions")
    assert [choice["index"] for choice in guest.json["choices"]] == [0, 1]


async def test_a_family_that_outgrows_the_pool_gets_a_plain_error_and_the_server_lives(
    autojump_clock: MockClock,
) -> None:
    async with house("--preempt-ram", "64") as it:
        family = await it.ask({**HI, "n": 2, "max_tokens": 2000}, "/v1/chat/completions")
        again = await it.ask(HI, "/v1/chat/completions")
        assert await it.metric("n_preempt_total") == 0
    assert (family.status, family.json) == (500, {"error": FULL})
    assert again.status == 200


async def test_metrics_must_be_switched_on_and_need_the_key(autojump_clock: MockClock) -> None:
    async with house("--api-key", "secret") as it:
        assert (await it.client.get("/metrics")).status_code == 401
        assert (await it.client.get("/health")).status_code == 200
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            page = await it.client.get("/metrics", headers=headers)
            assert page.headers["content-type"] == "text/plain; version=0.0.4"
            assert "llamacpp:n_preempt_total 0\n" in page.text
    async with house("--no-slots", build="G0") as it:
        assert "preempt" not in (await it.client.get("/metrics")).text
        assert (await it.client.get("/slots")).status_code == 501
    async with house() as it:
        it.server.options = attrs.evolve(it.server.options, metrics=False)
        assert (await it.client.get("/metrics")).status_code == 501


async def test_while_loading_everybody_is_told_so(autojump_clock: MockClock) -> None:
    async with house("--api-key", "secret", KVALET_SIM_READY_S="5") as it:
        answer = await it.client.get("/health")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "Loading model")
        await trio.sleep(5)
        assert (await it.client.get("/health")).status_code == 200


async def test_tokens_and_templates_are_answered(autojump_clock: MockClock) -> None:
    async with house() as it:
        body = {"content": "Hi 🦙", "add_special": True, "with_pieces": True}
        pieces = (await it.ask(body, "/tokenize")).json["tokens"]
        plain = (await it.ask({"content": "Hi 🦙"}, "/tokenize")).json["tokens"]
        back = await it.ask({"tokens": plain}, "/detokenize")
        template = await it.ask(HI, "/apply-template")
        count = await it.ask(HI, "/v1/messages/count_tokens")
    assert pieces[0] == {"id": 256, "piece": "<bos>"}
    assert isinstance(pieces[-1]["piece"], list)
    assert back.json == {"content": "Hi 🦙"}
    assert template.json == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
    assert count.json["input_tokens"] > 10


async def test_an_answer_is_continued_where_its_partial_text_ends(
    autojump_clock: MockClock,
) -> None:
    def body(partial: str, tokens: int, **more: Any) -> dict[str, Any]:
        turn = {"role": "assistant", "content": partial}
        return {"messages": [*HI["messages"], turn], "max_tokens": tokens, **more}

    path = "/v1/chat/completions"
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    async with house() as it:
        whole = (await it.ask({**HI, "max_tokens": 20}, path)).json["choices"][0]["message"]
        head = whole["content"][: len(whole["content"]) // 2]
        rest = await it.ask(body(head, 10, **explicit), path)
        repeated = await it.ask(body(head, 10, stream=True), path)
        only_new = await it.ask(body(head, 10, stream=True, **explicit), path)
        both = await it.ask(body(head, 10, continue_final_message=True), path)
    assert rest.json["choices"][0]["message"]["content"] == whole["content"]
    said = [event["choices"][0]["delta"].get("content") or "" for event in repeated.events]
    assert "".join(said) == whole["content"]
    said = [event["choices"][0]["delta"].get("content") or "" for event in only_new.events]
    assert "".join(said) == whole["content"][len(head) :]
    assert both.status == 400


async def test_slots_are_saved_restored_and_erased_with_real_files(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with house("--slot-save-path", str(tmp_path)) as it:
        await it.ask({"prompt": prompt(1, 100), "n_predict": 5, "id_slot": 0})
        saved = (await it.ask({"filename": "a.bin"}, "/slots/0?action=save")).json
        assert list(saved) == ["id_slot", "filename", "n_saved", "n_written", "timings"]
        assert (saved["n_saved"], saved["n_written"]) == (104, (tmp_path / "a.bin").stat().st_size)
        assert (await it.ask(b"", "/slots/0?action=erase")).json == {"id_slot": 0, "n_erased": 104}
        restored = (await it.ask({"filename": "a.bin"}, "/slots/1?action=restore")).json
        assert restored["n_restored"] == 104
        again = await it.ask({"prompt": [*prompt(1, 100), 9], "n_predict": 1, "id_slot": 1})
        assert again.json["timings"]["cache_n"] == 100
        for name in ("../a", "none.bin"):
            assert (await it.ask({"filename": name}, "/slots/0?action=restore")).status == 400
        assert (await it.ask(b"", "/slots/x?action=erase")).status == 400
        assert (await it.ask(b"", "/slots/0?action=zzz")).status == 400


async def test_who_leaves_a_stream_is_noticed_at_the_next_token(autojump_clock: MockClock) -> None:
    async with house(KVALET_SIM_TOKENS_PER_S="10") as it:
        guest = it.invite(streamed(1, 10, 500))
        await trio.sleep(2)
        guest.scope.cancel()
        await trio.sleep(0.3)
        (slot,) = [slot for slot in await it.get("/slots") if "id_task" in slot]
    assert not slot["is_processing"]
    assert len(guest.events) <= slot["n_prompt_tokens"] - 10 + 1 <= len(guest.events) + 2
    assert it.logged("cancel task, id_task = ")


async def test_who_leaves_without_a_stream_is_noticed_only_in_a_quiet_second(
    autojump_clock: MockClock,
) -> None:
    async with house(KVALET_SIM_TOKENS_PER_S="10") as it:
        plain = it.invite({"prompt": prompt(1, 10), "n_predict": 100})
        beside = it.invite(streamed(2, 10, 50))
        await trio.sleep(1)
        plain.scope.cancel()
        await trio.sleep(3)
        assert it.logged("cancel task") == []
        await it.until(lambda: beside.over)
        await trio.sleep(1.5)
        assert len(it.logged("cancel task")) == 1


async def test_a_crash_cuts_every_stream_and_refuses_the_next(autojump_clock: MockClock) -> None:
    faults = '[{"kind":"crash","at_token":10,"code":3}]'
    async with house(KVALET_SIM_FAULTS=faults) as it:
        guest = await it.ask(streamed(1, 10, 50))
        assert guest.broken
        assert len(guest.events) == 9
        assert it.server.exit_code == 3
        with pytest.raises(httpx.ConnectError):
            await it.client.get("/health")


@pytest.mark.parametrize(("split", "crashes"), [("tensor", True), ("layer", False)])
async def test_drafting_heads_over_a_tensor_split_crash_where_that_is_asked(
    autojump_clock: MockClock, split: str, crashes: bool
) -> None:
    faults = '[{"kind":"crash","when":"mtp_tensor"}]'
    argv = ("--spec-type", "draft-mtp", "-sm", split)
    async with house(*argv, KVALET_SIM_FAULTS=faults) as it:
        guest = await it.ask(streamed(1, 10, 20))
        assert it.server.crashed.is_set() is crashes
    assert bool(guest.broken) is crashes


async def test_a_hang_keeps_its_streams_open_and_says_nothing(autojump_clock: MockClock) -> None:
    async with house(KVALET_SIM_FAULTS='[{"kind":"hang","at_token":5}]') as it:
        guest = it.invite(streamed(1, 10, 50))
        await trio.sleep(100)
        assert not guest.over
        assert len(guest.events) == 4
        assert (await it.client.get("/health")).status_code == 200
        with trio.move_on_after(60) as waited:
            await it.client.get("/slots")
        assert waited.cancelled_caught


async def test_metrics_may_be_slow_and_routes_may_be_broken(autojump_clock: MockClock) -> None:
    faults = '[{"kind":"slow_metrics","seconds":7},{"kind":"500","path":"/props","times":2}]'
    async with house(KVALET_SIM_FAULTS=faults) as it:
        began = trio.current_time()
        await it.client.get("/metrics")
        assert trio.current_time() - began == pytest.approx(7)
        codes = [(await it.client.get("/props")).status_code for _ in range(3)]
    assert codes == [500, 500, 200]


async def test_writes_may_be_split_at_every_byte(autojump_clock: MockClock) -> None:
    async with house() as it:
        whole = await it.ask(streamed(1, 10, 5))
    async with house(KVALET_SIM_FAULTS='[{"kind":"split_writes"}]') as it:
        guest = await it.ask(streamed(1, 10, 5))
    assert {len(chunk) for _, chunk in guest.chunks} == {1}
    assert guest.text == whole.text


async def test_pictures_of_a_parked_chat_are_encoded_again(autojump_clock: MockClock) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"messages": [{"role": "user", "content": [picture]}], "max_tokens": 1000}
    body |= {"stream": True}
    path = "/v1/chat/completions"
    async with house("--mmproj", "p.gguf", "--preempt-ram", "1") as it:
        guests = [it.invite(body, path) for _ in range(2)]
        await it.until(lambda: all(guest.over for guest in guests))
        assert all(guest.blocks[-1] == b"data: [DONE]" for guest in guests)
    async with house("--preempt-ram", "1") as it:
        assert (await it.ask(body, path)).status == 500


async def test_tokenize_takes_texts_and_ids_side_by_side(autojump_clock: MockClock) -> None:
    async with house() as it:
        ids = prompt(1, 30)
        plain = (await it.ask({"content": ids, "add_special": True}, "/tokenize")).json["tokens"]
        text = (await it.ask({"content": "one two"}, "/tokenize")).json["tokens"]
        mixed = (await it.ask({"content": ["one two", *ids]}, "/tokenize")).json["tokens"]
    assert plain == ids
    assert mixed == [*text, *ids]
