"""Writes `docs/events.md` and the generated parts of the other documents.

``make docs`` runs it. A part is generated when it stands between ``<!-- generated: NAME -->``
and ``<!-- end -->``; `tests/test_docs.py` compares all of it with what is checked in.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec

from kvalet.actors.cli_options import settings_flags
from kvalet.actors.config import ENV_PREFIX, Config
from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.evolve import evolve
from kvalet.actors.decisions.state import House
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, RequestId, Seq
from kvalet.protocol.journal import SCHEMA, Decision, encode

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(r"(<!-- generated: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)

MEANINGS = {
    "model": "GGUF file to launch llama-server with",
    "demo": "use the small model of `kvalet[demo]`",
    "attach": "URL of a running llama-server; nothing is launched then",
    "server_bin": "llama-server to launch; else the one on `PATH`, else an installed wheel",
    "server_args": "arguments handed on to llama-server, what stands behind `--`",
    "host": "address to listen on; other than this machine's own it needs `api_key_file`",
    "port": "port to listen on; 0 picks a free one",
    "parallel": "slots: chats that can be in the cache at once",
    "ctx": "cells of the pool that all slots share, in steps of 256; default: what fits the cards",
    "mode": "who parks: `proxy` kvalet, `server` the server, `auto` the server if it can",
    "preempt": "whether chats are parked at all; without it each is charged for its whole answer",
    "exact": "exact concurrency: `auto` if it can be had, `on` or no start; default `off`",
    "api_key_file": "accepted keys, one a line, `#` starts a comment; none means no key is asked",
    "state_dir": "where the journal and llama-server's log lie",
    "policy": "whom to park: `least-sunk` (fewest cells), `fair-share` (most tokens), `lifo`",
    "park_method": "`save` or `recompute`; `auto` takes what the probe at load has proved",
    "park_ram_mib": "MiB that saved chats may take; default a quarter of the free memory",
    "block_min": "cells: the smallest credit worth a leg",
    "first_block": "cells: the credit that a newcomer starts with",
    "quantum": "cells: what a resumed chat may run before it can be parked again",
    "resume_max": "times that one chat may be parked",
    "queue_max": "requests that may wait; a further one is answered 429",
    "body_max_mib": "MiB: largest request body; more is answered 413",
    "first_token_s": "seconds of silence before a leg's first token that count as a stall",
    "stall_s": "seconds of silence after it that count as a stall",
    "keepalive_s": "seconds between two comments to a client that waits or is parked",
    "debug": "lets a request ask for parks with the header `Kvalet-Park-Every`; for tests",
    "vram_fraction": "the part of a card's memory that a launch may use, above 0 and up to 1",
    "drain_s": "seconds that running answers get when kvalet is told to stop",
    "restarts_max": "how often a llama-server that died is started again in restart_window_s",
    "restart_window_s": "seconds that a restart counts against restarts_max",
    "restart_wait_s": "seconds before the second restart; each further one waits four times that",
    "health_s": "seconds between two looks at llama-server's /health, and for an answer to one",
}
DEFAULTS = {"state_dir": "$XDG_STATE_HOME/kvalet"}

WORDS = {
    RequestId: "request id",
    Cells: "cells",
    Nanos: "nanoseconds",
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
}

EVENTS_HEAD = """\
# The event log

<!-- Written by docs/generate.py from protocol/commands.py and protocol/events.py. -->

`<state-dir>/journal.jsonl` has one JSON object per line. The first line is the header: `schema`
(now {schema}), `versions`, and `config`, the whole effective configuration. A key is never in it,
only the path of the file that holds the keys. Every further line is one decision:

```json
{example}
```

| field | |
|---|---|
| `seq` | number of the decision, without gaps from 1 |
| `at_ns` | wall clock, nanoseconds since 1970; never falls within a journal |
| `command` | what was asked or reported |
| `events` | what was decided on it, in order; often nothing |

Folding the events gives the state. Deciding the commands again gives the same events to the byte;
`kvalet replay --verify` does that. No prompt, answer, key or token text is in any of it.

The format only grows: a new field has a default, no field changes its type, no kind changes its
name. `GET /kvalet/events` sends the same events, one SSE event each ([http.md](http.md)).
"""

Transition = tuple[str, str, str]


# -- types and fields ---------------------------------------------------------------------


def plain(doc: str | None) -> str:
    """A docstring as Markdown, on one line a paragraph."""
    paragraphs = inspect.cleandoc(doc or "").replace("``", "`").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def shown_type(hint: Any) -> str:
    """A field's type in words."""
    if hint in WORDS:
        return WORDS[hint]
    if isinstance(hint, typing.NewType):
        name = hint.__name__.removesuffix("Id").lower()
        return f"{name} number"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return " or ".join("null" if arg is types.NoneType else shown_type(arg) for arg in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"list of {shown_type(args[0])}"
    if origin is tuple:
        return "[" + ", ".join(shown_type(arg) for arg in args) + "]"
    return f"[{hint.__name__}](#{hint.__name__.lower()})"


def fields_of(struct: type[msgspec.Struct]) -> Iterator[str]:
    """One list item for each field of ``struct``."""
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        words = shown_type(hints[field.name])
        if field.default is not msgspec.NODEFAULT:
            words += f", default `{msgspec.json.encode(field.default).decode()}`"
        yield f"- `{field.encode_name}`: {words}"


def section(title: str, struct: type[msgspec.Struct]) -> str:
    """One message: its name, what it means, its fields."""
    return "\n".join([f"### {title}", "", plain(struct.__doc__), "", *fields_of(struct), ""])


def tag_of(struct: type[msgspec.Struct]) -> str:
    """The name that ``struct`` has on disk."""
    return str(struct.__struct_config__.tag)


def events_md() -> str:
    """The whole of `docs/events.md`."""
    parts = [EVENTS_HEAD.format(schema=SCHEMA, example=example_line())]
    parts += ["## Events", ""]
    parts += [section(f"`{tag_of(struct)}`", struct) for struct in typing.get_args(e.AnyEvent)]
    parts += ["## Commands", ""]
    parts += [section(f"`{tag_of(struct)}`", struct) for struct in typing.get_args(c.Command)]
    parts += [
        "## Shared shapes",
        "",
        section("Settings", c.Settings),
        section("Load", c.Load),
        section("MemoryFigure", c.MemoryFigure),
    ]
    return "\n".join(parts).rstrip() + "\n"


# -- the decision core, walked ------------------------------------------------------------


def opening(generation: int) -> list[c.Command]:
    """A small pool that is ready: two slots, 96 cells."""
    settings = c.Settings(block_min=4, first_block=8, quantum=4)
    return [
        c.OpenHouse(settings=settings),
        c.ReadySeen(
            generation=generation,
            url="http://127.0.0.1:40213",
            build="b10434",
            model="small",
            cells=Cells(96),
            slots=2,
            headroom=Cells(2),
        ),
        c.ProbeSeen(generation=generation, method="save"),
    ]


def example_line() -> str:
    """A real decision, as it lies in a journal."""
    house, at_ns = House(), Nanos(1_764_460_800_000_000_000)
    arrival = c.Arrive(request=RequestId("r1"), surface="openai.chat", streaming=True, cap=40)
    for command in [*opening(1), arrival]:
        house = take(house, command, at_ns)[1]
    counted = c.PromptCounted(request=RequestId("r1"), prompt=Cells(21))
    events = take(house, counted, at_ns)[0]
    line = Decision(seq=Seq(5), at_ns=at_ns, command=counted, events=events)
    return encode(line).decode().strip()


def moves(house: House, number: int, rng: random.Random) -> list[c.Command]:
    """What the world could say next: each lease's possible turns, and a newcomer."""
    possible: list[c.Command] = [c.ExitSeen(generation=1, code=1, planned=False)]
    if len(house.leases) < 5:
        name = RequestId(f"r{number}")
        possible += [
            c.Arrive(
                request=name, surface="openai.chat", streaming=True, pausable=rng.random() < 0.9
            )
        ] * 3
    for lease in house.leases.values():
        name, cells = lease.request, lease.granted
        generated = max(0, cells - lease.prompt)
        match lease.state:
            case "arrived":
                prompt = Cells(rng.choice((4, 12, 24, 200)))
                possible += [c.PromptCounted(request=name, prompt=prompt)] * 4
            case "running":
                spent = c.CreditSpent(request=name, cells=cells, generated=generated)
                ended = c.AnswerEnded(request=name, cells=cells, generated=generated, reason="stop")
                possible += [spent] * 8 + [ended]
            case "parking":
                freed = c.CellsFreed(request=name, method="save", cells=lease.cells)
                possible += [freed] * 4
            case "closing":
                possible += [c.SlotSeen(request=name)] * 4
            case _:
                pass
        possible.append(c.Leave(request=name))
    return possible


def walk(seed: int) -> set[Transition]:
    """The transitions of leases in one random life of a house."""
    rng = random.Random(seed)
    house, found = House(), set[Transition]()
    commands = opening(1)
    for number in range(80):
        command = commands.pop(0) if commands else rng.choice(moves(house, number, rng))
        if isinstance(command, c.ExitSeen):
            commands = opening(1)
        at_ns = Nanos(number)
        for event in take(house, command, at_ns)[0]:
            after = evolve(house, event, at_ns)
            found |= changes(house, event, after)
            house = after
    return found


def changes(before: House, event: e.AnyEvent, after: House) -> set[Transition]:
    """State changes of leases that ``event`` made; ``[*]`` is not there yet, or any more."""
    kind = tag_of(type(event))
    found: set[Transition] = set()
    for name in {*before.leases, *after.leases}:
        old, new = (
            house.leases[name].state if name in house.leases else "[*]" for house in (before, after)
        )
        grown = isinstance(event, e.LeaseExtended) and event.request == name
        if old != new or grown:
            found.add((old, kind, new))
    return found


def lifecycle() -> str:
    """The states of a lease as a diagram: every transition that random walks found."""
    order = ["[*]", "arrived", "queued", "running", "waiting", "parking", "parked", "closing"]
    found = set[Transition]().union(*(walk(seed) for seed in range(200)))
    lines = sorted(found, key=lambda move: (order.index(move[0]), order.index(move[2]), move[1]))
    drawn = [f"    {old} --> {new}: {kind}" for old, kind, new in lines]
    return "\n".join(["```mermaid", "stateDiagram-v2", *drawn, "```", ""])


# -- settings, and who says what ----------------------------------------------------------


def settings() -> str:
    """The table of settings."""
    rows = ["| setting | default | flag | environment | meaning |", "|---|---|---|---|---|"]
    flags = flags_of_settings()
    for field in attrs.fields(Config):
        name = field.name
        default = DEFAULTS[name] if name in DEFAULTS else shown_default(field.default)
        env = ENV_PREFIX + name.upper()
        columns = (code(name), code(default), code(flags.get(name, "")), code(env), MEANINGS[name])
        rows.append(f"| {' | '.join(columns)} |")
    unknown = MEANINGS.keys() - {field.name for field in attrs.fields(Config)}
    assert not unknown, f"no such settings: {unknown}"
    return "\n".join([*rows, ""])


def flags_of_settings() -> dict[str, str]:
    """The flag of each setting that has one."""
    command = click.Command("any", callback=settings_flags(lambda: None))
    declared: list[click.Parameter] = getattr(command.callback, "__click_params__", [])
    flags = {param.name or "": param.opts[-1] for param in declared}
    return {**flags, "preempt": "--no-preempt", "server_args": "--"}


def code(text: str) -> str:
    """``text`` as code in a table; nothing stays nothing."""
    return f"`{text}`" if text else ""


def shown_default(value: object) -> str:
    """A default as one would write it in the file."""
    if value is None or value == ():
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def messages() -> str:
    """Which actor tells the ledger what, and which events it acts on."""
    rows = ["| module | tells the ledger | acts on |", "|---|---|---|"]
    told_kinds = {struct.__name__: tag_of(struct) for struct in typing.get_args(c.Command)}
    kinds = {struct.__name__: tag_of(struct) for struct in typing.get_args(e.AnyEvent)}
    for path in sorted((ROOT / "actors").glob("*.py")):
        if path.stem in ("render", "demo") or path.stem.startswith("cli"):
            continue  # They put events into words.
        tree = ast.parse(path.read_text())
        told = [kind for name, kind in told_kinds.items() if name in called(tree)]
        heard = [kind for name, kind in kinds.items() if name in matched(tree)]
        if told or heard:
            cells = [", ".join(f"`{kind}`" for kind in said) for said in (told, heard)]
            rows.append(f"| `{path.stem}` | {' | '.join(cell or 'nothing' for cell in cells)} |")
    return "\n".join([*rows, ""])


def last_name(node: ast.expr) -> str:
    """``e.LeaseParked`` and ``LeaseParked`` are both ``LeaseParked``."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def called(tree: ast.AST) -> set[str]:
    """Names of everything that is called."""
    return {last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def matched(tree: ast.AST) -> set[str]:
    """Names of the classes that are matched or tested for."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchClass):
            found.add(last_name(node.cls))
        elif isinstance(node, ast.Call) and last_name(node.func) == "isinstance":
            parts = ast.walk(node.args[1])
            found |= {last_name(part) for part in parts if isinstance(part, ast.expr)}
    return found


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "lifecycle": lifecycle,
    "messages": messages,
}


# -- writing ------------------------------------------------------------------------------


def documents() -> dict[str, str]:
    """Every document with generated text in it, by its path, as it should be."""
    found = {"docs/events.md": events_md()}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        if PART.search(text):
            found[path.relative_to(ROOT).as_posix()] = PART.sub(
                lambda part: part[1] + PARTS[part[2]]() + part[3], text
            )
    return found


def main() -> None:
    """Write what has changed."""
    for name, text in documents().items():
        path = ROOT / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
