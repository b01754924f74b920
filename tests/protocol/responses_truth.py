"""What the tests of the Responses dialect share: requests to ask, and how answers are compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kvalet.protocol.responses import Stream

GOLDEN = Path(__file__).parent / "golden"

Json = dict[str, Any]

TEMPLATE = """\
{%- if tools -%}
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
A:
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif -%}
{%- if message.content %}{{ message.content }}{% endif -%}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}

{% elif message.role == 'tool' -%}
T: {{ message.content }}

{% elif message.role == 'system' -%}
S: {{ message.content }}

{% else -%}
Q: {{ message.content }}

{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
A:
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif -%}
{% endif -%}
"""
"""Has thoughts and tools; a model of any size continues what such a prompt shows it."""

FLAGS = ("--jinja", "--reasoning-format", "deepseek", "--chat-template-file")
"""How a server is told to use the template, whose path comes last."""

END_OF_TURN = 106
"""A token that ends the demo model's answer."""

TOOL: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}

_PLAIN: Json = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
_THINKING: Json = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}


def user(text: str) -> Json:
    """A user's message."""
    return {"role": "user", "content": text}


def said(text: str) -> Json:
    """A message that an earlier response contained."""
    part: Json = {"type": "output_text", "text": text, "annotations": []}
    return {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }


def thought(text: str) -> Json:
    """A thought that an earlier response contained."""
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part]}


def called(city: str) -> list[Json]:
    """A tool call and what came of it."""
    arguments = json.dumps({"city": city})
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather"}
    return [
        {**call, "arguments": arguments, "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."},
    ]


def _weather(city: str) -> list[Json]:
    return [user(f"Weather in {city}?"), *called(city), said("It is sunny.")]


def _sum(number: str, word: str, total: str) -> list[Json]:
    return [
        user(f"{number}+{number}?"),
        thought(f"{word} and {word.lower()}."),
        said(total),
    ]


_WEATHERS = [*_weather("Rome"), *_weather("Paris"), *_weather("Rome")]
_SUMS = [*_sum("2", "Two", "Four."), *_sum("3", "Three", "Six."), *_sum("4", "Four", "Eight.")]
_ECHO = [user("Say one."), said("one"), user("Say two."), said("two")]

REQUESTS: dict[str, Json] = {
    "text": {"input": "Say something.", "max_output_tokens": 6, **_PLAIN},
    "turns": {"input": [*_ECHO, user("Say three.")], "max_output_tokens": 8, **_PLAIN},
    "instructions": {
        "instructions": "Be brief.",
        "input": [*_ECHO, user("Say six.")],
        "max_output_tokens": 3,
        **_PLAIN,
    },
    "blocks": {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "system", "content": "Be kind."},
            *_ECHO,
            {"role": "user", "content": [{"type": "input_text", "text": "Say six."}]},
        ],
        "max_output_tokens": 3,
        **_PLAIN,
    },
    "stop": {
        "input": [*_ECHO, user("Say three.")],
        "max_output_tokens": 12,
        "stop": ["\n\n", "Q:"],
        **_PLAIN,
    },
    "merged": {
        "input": [
            *_ECHO,
            *[user("Say three."), thought("Hm."), said("th"), said("ree"), *called("Rome")],
            *[said("three"), user("Say four.")],
        ],
        "max_output_tokens": 3,
        **_PLAIN,
    },
    "stop_begun": {
        "input": [*_ECHO, user("Say three.")],
        "max_output_tokens": 1,
        "stop": ["three times"],
        **_PLAIN,
    },
    "empty": {"input": "Say nothing.", "logit_bias": [[END_OF_TURN, 100]], **_PLAIN},
    "unicode": {
        "input": [*3 * [user("Say llama."), said("日本🦙")], user("Say llama.")],
        "max_output_tokens": 6,
        **_PLAIN,
    },
    "tools": {
        "input": [*_WEATHERS, user("Weather in Paris?")],
        "tools": [TOOL, {"type": "web_search"}],
        "stop": ["\n\n", "Q:"],
        "max_output_tokens": 60,
        **_PLAIN,
    },
    "tool_cut_short": {
        "input": [*_WEATHERS, user("Weather in Paris?")],
        "tools": [TOOL],
        "max_output_tokens": 18,
        **_PLAIN,
    },
    "tool_result": {
        "input": [*_WEATHERS, user("Weather in Paris?"), *called("Paris")],
        "tools": [TOOL],
        "max_output_tokens": 6,
        **_PLAIN,
    },
    "reasoning": {
        "input": [*_SUMS, user("5+5?")],
        "reasoning": {"effort": "low"},
        "max_output_tokens": 30,
        "stop": ["\n\n", "Q:"],
        **_THINKING,
    },
    "thought_cut_short": {
        "input": [*_SUMS, user("5+5?")],
        "max_output_tokens": 2,
        **_THINKING,
    },
    "progress": {
        "input": "Say something.",
        "max_output_tokens": 2,
        "return_progress": True,
        "timings_per_token": True,
        **_PLAIN,
    },
}
"""Requests by what they show. The demo model answers each alike whenever it is asked."""

ADDED = {
    "sequence_number",
    "output_index",
    "content_index",
    "logprobs",
    "annotations",
    "created_at",
    "model",
    "output",
}
"""Fields that kvalet's events have and llama-server's may not have."""

_TIMES = {"created_at", "completed_at", "time_ms"}
_NAMES = {"id", "item_id", "call_id"}


@cache
def read(name: str) -> Json:
    """One request's recording: ``chat``, ``events``, ``chat_answer`` and ``answer``."""
    recorded: Json = json.loads((GOLDEN / f"responses_{name}.json").read_text())
    return recorded


def told(chat: list[Json]) -> Iterator[bytes]:
    """What is sent for each chunk of a chat, and at the end."""
    stream = Stream()
    for chunk in chat:
        yield stream.feed(json.dumps(chunk).encode())
    yield stream.close()


def payloads(stream: bytes) -> list[Json]:
    """The JSON of every event of a stream; each must be named as its type says."""
    events: list[Json] = []
    for block in stream.decode().split("\n\n"):
        if not block:
            continue
        name, _, line = block.partition("\ndata: ")
        event: Json = json.loads(line)
        assert name == "event: " + event["type"], block
        events.append(event)
    return events


class Comparison:
    """Compares answers to the same request. Times differ, ids must be renamed alike."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self.differences: list[str] = []

    def compare(self, real: Any, ours: Any, path: str = "") -> None:
        """Note where ``ours`` is not what ``real`` is, additions apart."""
        last = path.rpartition(".")[2]
        kinds = (real.__class__, ours.__class__)
        if last in _NAMES and kinds == (str, str):
            self._compare_names(real, ours, path)
        elif kinds == (dict, dict):
            self._compare_objects(real, ours, path)
        elif kinds == (list, list):
            self._compare_lists(real, ours, path)
        elif real != ours and last not in _TIMES:
            self.differences.append(f"{path}: {real!r} became {ours!r}")

    def _compare_lists(self, real: list[Any], ours: list[Any], path: str) -> None:
        if len(real) != len(ours):
            self.differences.append(f"{path}: {len(real)} became {len(ours)}")
        for place, (one, other) in enumerate(zip(real, ours, strict=False)):
            self.compare(one, other, f"{path}[{place}]")

    def _compare_objects(self, real: Json, ours: Json, path: str) -> None:
        if path.endswith("timings"):
            real, ours = dict.fromkeys(real), dict.fromkeys(ours)
        for name in real.keys() | ours.keys():
            if name not in ours:
                self.differences.append(f"{path}.{name} is missing")
            elif name in real:
                self.compare(real[name], ours[name], f"{path}.{name}")
            elif name not in ADDED:
                self.differences.append(f"{path}.{name} is new")

    def _compare_names(self, real: str, ours: str, path: str) -> None:
        same_kind = real.partition("_")[0] == ours.partition("_")[0]
        if not same_kind or self._names.setdefault(real, ours) != ours:
            self.differences.append(f"{path}: {real} became {ours}")


def differences(real: Iterable[Json], ours: Iterable[Json]) -> list[str]:
    """Where our events, or answers, are not what llama-server's are."""
    comparison = Comparison()
    comparison.compare(list(real), list(ours))
    return comparison.differences
