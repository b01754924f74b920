"""The command line from outside: what it prints, where, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from kvalet.actors.bench import BenchReport, ChatReport
from kvalet.actors.cli import kvalet, run
from kvalet.actors.cli_demo import opening, verdict
from kvalet.actors.cli_errors import judge
from kvalet.actors.decisions.capabilities import Capabilities
from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.state import House
from kvalet.actors.demo import DemoConfig, DemoReport, is_success, launch_config
from kvalet.actors.http import serve_http
from kvalet.actors.http_exchange import Exchange, HttpLimits
from kvalet.actors.logs import drop_secrets
from kvalet.protocol import commands as c
from kvalet.protocol.errors import ClientFault, ConfigFault, EnvironmentFault
from kvalet.protocol.ids import Cells, Nanos, RequestId, Seq
from kvalet.protocol.journal import Decision, Header, encode

Captured = pytest.CaptureFixture[str]

LIFE: tuple[c.Command, ...] = (
    c.OpenHouse(settings=c.Settings()),
    c.ReadySeen(
        generation=1,
        url="http://127.0.0.1:1",
        build="b1",
        model="m",
        cells=Cells(512),
        slots=2,
        headroom=Cells(2),
    ),
    c.ProbeSeen(generation=1, method="save"),
    c.Arrive(request=RequestId("r1"), surface="openai.chat", streaming=True, cap=9),
    c.PromptCounted(request=RequestId("r1"), prompt=Cells(21)),
    c.AnswerEnded(request=RequestId("r1"), reason="stop", cells=Cells(26), generated=5),
    c.SlotSeen(request=RequestId("r1")),
)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KVALET_HOME", raising=False)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A recorded life of one chat."""
    lines = [encode(Header(schema=1, versions={}, config={}))]
    house = House()
    for number, command in enumerate(LIFE, start=1):
        at_ns = Nanos(number * 10**9)
        events, house = take(house, command, at_ns)
        decision = Decision(seq=Seq(number), at_ns=at_ns, command=command, events=events)
        lines.append(encode(decision))
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def complaint(capsys: Captured) -> str:
    """The one line on stderr; nothing may be on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removesuffix("\n")


def test_the_commands_of_this_version_are_these() -> None:
    expected = {"serve", "demo", "plan", "status", "tail", "replay", "bench", "config", "doctor"}
    assert set(kvalet.commands) == expected


@pytest.mark.parametrize("command", sorted(kvalet.commands))
def test_every_command_explains_itself(command: str, capsys: Captured) -> None:
    assert run([command, "--help"]) == 0
    assert f"kvalet {command} [OPTIONS]" in capsys.readouterr().out


def test_the_version_is_printed(capsys: Captured) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "kvalet 0.1.0\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["srve"], "No such command 'srve'"),
        (["serve", "--prot", "1"], "No such option '--prot'"),
        (["serve", "--port", "x"], "'x' is not a valid integer"),
        (["serve", "m.gguf"], "unexpected extra argument (m.gguf)"),
        (["serve"], "name a model"),
        (["bench"], "Missing argument 'URL'"),
        (["serve", "--demo", "--attach", "http://x"], "--attach uses a running server"),
        (["config", "--mode", "fast"], ""),
        (["--config", "/nowhere/k.toml", "config"], "cannot read the configuration"),
        (["bench", "localhost:1"], "wants an address"),
        (["bench", "http://127.0.0.1:1", "--chats", "0"], "'--chats'"),
        (["tail", "--kind", "lease.prked"], "no event has the kind lease.prked"),
        (["tail", "--since", "yesterday"], "--since wants"),
    ],
)
def test_wrong_usage_is_one_line_and_two(argv: list[str], said: str, capsys: Captured) -> None:
    assert run(argv) == 2
    line = complaint(capsys)
    assert line.startswith("kvalet: ")
    assert said in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["status", "http://127.0.0.1:1"], "start one with kvalet serve"),
        (["bench", "http://127.0.0.1:1"], "no server answers"),
        (["tail", "/nowhere"], "cannot read the journal"),
        (["tail", "http://127.0.0.1:1"], "no kvalet answers"),
        (["replay", "/nowhere"], "cannot read the journal"),
        (["demo", "--server-bin", "/nowhere"], "no llama-server at /nowhere"),
    ],
)
def test_what_the_machine_lacks_is_three(argv: list[str], said: str, capsys: Captured) -> None:
    assert run(argv) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]


def test_no_command_at_all_shows_what_there_is(capsys: Captured) -> None:
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_the_level_that_decided_stands_beside_each_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    file = tmp_path / "kvalet.toml"
    file.write_text("port = 1\nctx = 512\nparallel = 2\n")
    monkeypatch.setenv("KVALET_PORT", "2")
    monkeypatch.setenv("KVALET_CTX", "1024")
    flags = ["--port", "3", "--no-preempt", "--json", "--", "-ngl", "0", "--verbose"]
    assert run(["--config", str(file), "config", *flags]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["port"] == {"value": 3, "level": "flag"}
    assert settings["ctx"] == {"value": 1024, "level": "environment"}
    assert settings["parallel"] == {"value": 2, "level": "file"}
    assert settings["host"] == {"value": "127.0.0.1", "level": "default"}
    assert settings["preempt"] == {"value": False, "level": "flag"}
    assert settings["server_args"] == {"value": ["-ngl", "0", "--verbose"], "level": "flag"}


def test_settings_are_a_table_for_people(capsys: Captured) -> None:
    assert run(["config", "--demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    demo = next(line.split() for line in lines if line.strip().startswith("demo"))
    assert demo == ["demo", "true", "flag"]


def test_a_machine_that_lacks_something_fails_the_doctor(capsys: Captured) -> None:
    assert run(["doctor", "--json", "--model", "/nowhere.gguf", "--port", "0"]) == 3
    out, err = capsys.readouterr()
    report = json.loads(out)
    bad = {found["name"] for found in report["findings"] if found["verdict"] == "bad"}
    assert "model" in bad
    assert not report["ok"]
    assert "model" in err


def test_a_journal_is_folded(journal: Path, capsys: Captured) -> None:
    assert run(["replay", str(journal.parent), "--json"]) == 0
    folded = json.loads(capsys.readouterr().out)
    assert folded["decisions"] == len(LIFE)
    assert folded["final"]["totals"]["finished"] == 1
    assert folded["final"]["open"] == 0
    assert run(["replay", str(journal)]) == 0
    assert "1 finished" in capsys.readouterr().out


def test_a_journal_that_is_decided_alike_passes(journal: Path, capsys: Captured) -> None:
    assert run(["replay", str(journal), "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["identical"], report["first_difference"]) == (True, None)


def test_a_journal_that_is_decided_otherwise_is_found_out(journal: Path, capsys: Captured) -> None:
    journal.write_bytes(journal.read_bytes().replace(b'"granted":', b'"granted":1', 1))
    assert run(["replay", str(journal), "--verify"]) == 1
    out, err = capsys.readouterr()
    assert "recorded: [" in out
    assert "decided: [" in out
    assert "decision 5 comes out differently" in err


def test_of_a_group_the_fault_inside_is_told(capsys: Captured) -> None:
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [EnvironmentFault("no\ndisk")])])
    assert judge(group) == 3
    assert capsys.readouterr().err == "kvalet: no disk\n"


def test_a_bug_shows_its_traceback_even_beside_a_fault(capsys: Captured) -> None:
    assert judge(ExceptionGroup("both", [ConfigFault("wrong"), ZeroDivisionError("ours")])) == 70
    assert "ZeroDivisionError: ours" in capsys.readouterr().err


def test_an_interrupt_is_quiet(capsys: Captured) -> None:
    assert judge(BaseExceptionGroup("stop", [KeyboardInterrupt(), ClientFault("x")])) == 130
    assert capsys.readouterr().err == ""


def test_nothing_that_may_hold_a_key_or_a_prompt_is_logged() -> None:
    fields = {"event": "asked", "Authorization": "Bearer k", "messages": "hi", "slot": 1}
    assert drop_secrets(None, "info", fields) == {"event": "asked", "slot": 1}


async def beside(answer: Callable[[Exchange], Any], argv: Callable[[str], Sequence[str]]) -> int:
    """Run a command line while ``answer`` serves HTTP."""
    async with trio.open_nursery() as nursery:
        door = partial(serve_http, answer, ("127.0.0.1", 0), HttpLimits())
        ((_, port),) = await nursery.start(door)
        url = f"http://127.0.0.1:{port}"
        code = await trio.to_thread.run_sync(run, argv(url))
        nursery.cancel_scope.cancel()
    return code


STATUS = {
    "version": "0.1.0",
    "mode": "proxy",
    "park_method": "save",
    "later": "a field of a later version",
    "server": {"state": "ready", "model": "m", "build": "b1", "slots": 2, "generation": 1},
    "pool": {"cells": 512, "granted": 256, "resident": 128, "headroom": 2},
    "leases": [{"request": "r7", "state": "parked", "surface": "openai.chat", "parks": 2}],
    "queue": [{"request": "r9", "position": 1, "waiting_s": 0.4}],
    "totals": {"requests": 9},
    "warnings": [{"code": "no-swa-full", "message": "this build [b]lacks[/b] it"}],
    "journal": {"path": "/j", "seq": 412},
}


async def answer_status(exchange: Exchange) -> None:
    if exchange.request.headers.get("authorization") not in (None, "Bearer k"):
        await exchange.respond(401, {}, b"{}")
        return
    await exchange.respond(200, {}, json.dumps(STATUS).encode())


async def test_status_is_shown_to_people(capsys: Captured) -> None:
    assert await beside(answer_status, lambda url: ["status", url]) == 0
    shown = capsys.readouterr().out
    assert "server ready, m on b1, 2 slots" in shown
    assert "256 of 512 cells granted" in shown
    assert "r9 for 0.4 s" in shown
    assert "this build [b]lacks[/b] it" in shown


async def test_status_is_passed_on_to_programs(tmp_path: Path, capsys: Captured) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nk\n")
    line = ["--json", "--api-key-file", str(keys)]
    assert await beside(answer_status, lambda url: ["status", url, *line]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


async def test_a_wrong_key_is_told(tmp_path: Path, capsys: Captured) -> None:
    keys = tmp_path / "keys"
    keys.write_text("other\n")
    line = ["--api-key-file", str(keys)]
    assert await beside(answer_status, lambda url: ["status", url, *line]) == 3
    assert "wants an API key" in complaint(capsys)


async def test_bench_prints_one_document_and_tells_of_failures(capsys: Captured) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.respond(404, {}, b'{"error":{"message":"nothing here"}}')

    assert await beside(refuse, lambda url: ["bench", url, "--chats", "2", "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["finished"], report["failed"]) == (0, 2)
    assert err == "kvalet: 2 of 2 chats failed: status 404: nothing here\n"


def part(finished: int, tokens: int = 900) -> BenchReport:
    chats = tuple(
        ChatReport(
            finished=number < finished,
            tokens=tokens,
            finish_reason="length",
            error=None,
            ttft_s=0.1,
            longest_silence_s=0.1,
            parks=1,
            resumes=1,
            recomputes=0,
        )
        for number in range(4)
    )
    return BenchReport(
        chats=chats, finished=finished, failed=4 - finished, tokens_per_s=10, wall_s=360
    )


def demo_of(stock: BenchReport, through: BenchReport) -> DemoReport:
    return DemoReport(
        stock=stock,
        kvalet=through,
        roomy=part(4),
        speed_ratio=0.93,
        granted_at_first_park=0.99,
        journal="/j",
    )


def test_the_demo_succeeds_only_if_every_chat_has_all_its_tokens() -> None:
    assert is_success(DemoConfig(), demo_of(part(0, 478), part(4)))
    assert not is_success(DemoConfig(), demo_of(part(0, 478), part(3)))
    assert not is_success(DemoConfig(), demo_of(part(0, 478), part(4, 899)))


def test_the_verdict_says_when_nothing_was_proved() -> None:
    told = verdict(DemoConfig(), demo_of(part(0, 478), part(4)))
    assert told.startswith("stock finished 0 of 4, kvalet 4 of 4 in the same 2048 cells, at 93%")
    assert "nothing was proved" not in told
    assert "nothing was proved" in verdict(DemoConfig(), demo_of(part(4), part(4)))


def test_a_demo_whose_single_chat_outgrows_the_pool_is_refused(capsys: Captured) -> None:
    assert run(["demo", "--ctx", "512", "--tokens", "500"]) == 2
    assert "do not fit into 512 cells" in capsys.readouterr().err


def test_the_demo_says_how_long_it_may_take() -> None:
    assert "some 9248 tokens, 2 to 6 minutes" in opening(DemoConfig())


def test_the_roomy_server_holds_every_chat_and_is_launched_as_kvalets_own() -> None:
    config = DemoConfig(model=Path("/m.gguf"))
    capable = Capabilities(flags=frozenset({"--swa-full", "--cache-ram"}))
    roomy = launch_config(config, "roomy", capable, Path("/s"))
    stock = launch_config(config, "stock", capable, Path("/s"))
    assert roomy.ctx is not None
    assert roomy.ctx >= 4 * (900 + 64)
    assert roomy.extra_args == ("--swa-full", "--cache-ram", "0")
    assert (stock.ctx, stock.extra_args, stock.preempt) == (2048, (), False)
