"""A completion request on any surface, read as llama-server reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
from attrs import evolve, frozen

from kvalet.sims.fakeserver.refusals import Refused, too_long
from kvalet.sims.fakeserver.template import objects, render
from kvalet.sims.fakeserver.tokens import detokenize, is_token, tokenize, tokenize_parts

Surface = Literal["completion", "text", "chat", "responses", "messages"]

SURFACES: Final[Mapping[str, Surface]] = {
    "/completion": "completion",
    "/completions": "completion",
    "/v1/completions": "text",
    "/chat/completions": "chat",
    "/v1/chat/completions": "chat",
    "/responses": "responses",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
"""Every path that occupies a slot."""

_INT_MAX: Final = (1 << 31) - 1
_NUMBERS: Final = (
    *("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens", "id_slot"),
    *("temperature", "top_k", "top_p", "min_p", "seed", "n_keep", "n_discard", "n_probs"),
    *("repeat_penalty", "repeat_last_n", "sse_ping_interval", "n"),
)
_NO_PROMPT: Final = '"prompt" must be a string or a list of strings or tokens'
_ANTHROPIC: Final = frozenset({"temperature", "top_p", "top_k", "stream", "max_tokens"})
_ANTHROPIC_TOKENS: Final = 4096


@frozen(kw_only=True)
class Ask:
    """One request. ``answers`` for each prompt; ``n_predict`` -1 is no bound.

    ``ping_s`` None: as the server was told. ``body`` is the request as it came.
    """

    surface: Surface
    prompts: tuple[tuple[int, ...], ...]
    answers: int = 1
    stream: bool = False
    n_predict: int = -1
    id_slot: int = -1
    n_keep: int = 0
    cache_prompt: bool = True
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    return_tokens: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    n_probs: int = 0
    include_usage: bool = False
    ping_s: int | None = None
    partial: str = ""
    repeats: bool = False
    model: str = ""
    body: dict[str, Any]

    @property
    def jobs(self) -> int:
        """Answers of the whole request."""
        return len(self.prompts) * self.answers


@frozen(kw_only=True)
class Limits:
    """What a request is held against."""

    n_ctx: int
    slots: int
    n_predict: int = -1
    exact: bool = False
    pictures: bool = False


def decode_object(body: bytes) -> dict[str, Any]:
    """A request's JSON. Raises Refused."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError:
        raise Refused(400, "[json.exception.type_error.305] expected a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refused(
            400,
            "[json.exception.parse_error.101] parse error at line 1, column 1: syntax error "
            "while parsing value",
        ) from None


def read_ask(surface: Surface, raw: bytes, limits: Limits) -> Ask:
    """What is asked. Raises Refused, before anything of it is queued."""
    body = decode_object(raw)
    _check_numbers(body)
    ask = _READERS[surface](body, limits)
    for prompt in ask.prompts:
        if not all(map(is_token, prompt)):
            raise Refused(400, "Prompt contains invalid tokens")
        if len(prompt) >= limits.n_ctx:
            raise too_long(len(prompt), limits.n_ctx)
    if ask.answers > 1 and limits.exact:
        raise Refused(400, "exact concurrency does not support n > 1")
    if not 1 <= ask.answers <= limits.slots:
        raise Refused(400, f"n must be between 1 and the number of slots ({limits.slots})")
    return ask


def prompt_of(body: dict[str, Any], surface: Surface, limits: Limits) -> tuple[str, list[int]]:
    """The text and the ids that a chat is evaluated as. Raises Refused."""
    ask = _READERS[surface](body, limits)
    return detokenize(ask.prompts[0][1:]), list(ask.prompts[0])


def _check_numbers(body: dict[str, Any]) -> None:
    for name in _NUMBERS:
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            kind = {str: "string", bool: "boolean", list: "array", dict: "object"}[type(value)]
            raise Refused(
                400,
                f"Field '{name}': [json.exception.type_error.302] type must be number, "
                f"but is {kind}",
            )
    for name in ("n_predict", "max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is not None and not -1 <= value <= _INT_MAX:
            raise Refused(
                400,
                f"Field 'n_predict': Value must be between -1 <= value <= {_INT_MAX}, "
                f"but got {value}",
            )


def _completion(body: dict[str, Any], limits: Limits) -> Ask:
    if "prompt" not in body:
        raise Refused(400, "[json.exception.out_of_range.403] key 'prompt' not found")
    return _native(body, limits, "completion", _prompts(body["prompt"]))


def _text(body: dict[str, Any], limits: Limits) -> Ask:
    return evolve(_completion(body, limits), surface="text")


def _chat(body: dict[str, Any], limits: Limits) -> Ask:
    rendered = render(body, pictures=limits.pictures)
    ask = _native(body, limits, "chat", (tuple(tokenize(rendered.prompt, bos=True)),))
    return evolve(ask, partial=rendered.partial, repeats=rendered.repeats)


def _responses(body: dict[str, Any], limits: Limits) -> Ask:
    asked = body.get("input")
    if asked is None:
        raise Refused(400, "'input' is required")
    turn = {"role": "user", "content": asked}
    messages = [turn] if isinstance(asked, str) else objects(asked, "input")
    if "instructions" in body:
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    chat = {**body, "messages": messages}
    chat.setdefault("n_predict", body.get("max_output_tokens"))
    return evolve(_chat(chat, limits), surface="responses", body=body)


def _messages(body: dict[str, Any], limits: Limits) -> Ask:
    kept: dict[str, Any] = {name: body[name] for name in _ANTHROPIC if name in body}
    kept.setdefault("max_tokens", _ANTHROPIC_TOKENS)
    if "stop_sequences" in body:
        kept["stop"] = body["stop_sequences"]
    if "messages" in body:
        system = body.get("system")
        first = [{"role": "system", "content": system}] if system else []
        kept["messages"] = [*first, *objects(body["messages"], "messages")]
    return evolve(
        _chat(kept, limits), surface="messages", body=body, model=str(body.get("model") or "")
    )


_READERS: Final[Mapping[Surface, Callable[[dict[str, Any], Limits], Ask]]] = {
    "completion": _completion,
    "text": _text,
    "chat": _chat,
    "responses": _responses,
    "messages": _messages,
}


def _native(
    body: dict[str, Any], limits: Limits, surface: Surface, prompts: tuple[tuple[int, ...], ...]
) -> Ask:
    bounds = (body.get(name) for name in ("n_predict", "max_completion_tokens", "max_tokens"))
    stop = body.get("stop") or ()
    ping = body.get("sse_ping_interval")
    return Ask(
        surface=surface,
        prompts=prompts,
        answers=int(body.get("n") or 1),
        stream=body.get("stream") is True,
        n_predict=next((int(bound) for bound in bounds if bound is not None), limits.n_predict),
        id_slot=int(body.get("id_slot", -1)),
        n_keep=int(body.get("n_keep") or 0),
        cache_prompt=body.get("cache_prompt", True) is not False,
        ignore_eos=body.get("ignore_eos") is True,
        stop=(stop,) if isinstance(stop, str) else tuple(str(word) for word in stop),
        return_tokens=body.get("return_tokens") is True,
        timings_per_token=body.get("timings_per_token") is True,
        return_progress=body.get("return_progress") is True,
        n_probs=int(body.get("n_probs") or (1 if body.get("logprobs") is True else 0)),
        include_usage=_wants_usage(body.get("stream_options")),
        ping_s=None if ping is None else int(ping),
        model=str(body.get("model") or ""),
        body=body,
    )


def _wants_usage(options: object) -> bool:
    match options:
        case {"include_usage": True}:
            return True
        case _:
            return False


def _prompts(prompt: object) -> tuple[tuple[int, ...], ...]:
    """A list that holds a number is one prompt; any other list is several."""
    match _parts(prompt):
        case None:
            return (_one_prompt(prompt),)
        case parts if any(isinstance(part, int) for part in parts):
            return (_one_prompt(prompt),)
        case parts:
            return tuple(_one_prompt(part) for part in parts)


def _one_prompt(prompt: object) -> tuple[int, ...]:
    """A text begins with the mark of a beginning; ids are taken as they are."""
    if isinstance(prompt, str):
        return tuple(tokenize(prompt, bos=True))
    ids_and_texts: list[str | int] = []
    for part in _parts(prompt) or ():
        if isinstance(part, bool) or not isinstance(part, str | int):
            raise Refused(400, _NO_PROMPT)
        ids_and_texts.append(part)
    if not ids_and_texts:
        raise Refused(400, _NO_PROMPT)
    return tuple(tokenize_parts(ids_and_texts, bos=True))


def _parts(prompt: object) -> list[object] | None:
    """The entries of a list that has some."""
    try:
        return msgspec.convert(prompt, list[object]) or None
    except msgspec.ValidationError:
        return None
