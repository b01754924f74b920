"""Parallel streaming chats against an OpenAI-compatible server, measured from the client's seat."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec
import trio

from kvalet.protocol.errors import ConfigFault, EnvironmentFault, ServerFault
from kvalet.protocol.openai_stream import Chunk, read_chunk
from kvalet.protocol.openai_totals import KvaletUsage
from kvalet.protocol.sse import SseEvent, SseSplitter

CONNECT_TIMEOUT_S: Final = 10.0
SILENCE_MAX_S: Final = 1200.0
"""A server that sends nothing at all for so long is given up."""
_ERROR_CHARS_MAX: Final = 300

PROMPTS: Final = (
    "Write a long story about a lighthouse keeper who collects lost umbrellas.",
    "Tell me the adventures of two rival bakers in a village on a volcano.",
    "Describe, hour by hour, a train journey through a country made of glass.",
    "Write the diary of a clockmaker who repairs the town's forgotten bells.",
    "Tell a tale of a gardener whose roses predict tomorrow's weather.",
    "Narrate how a shy giant learned to sail a very small boat.",
    "Write about a library where every book changes its ending at night.",
    "Tell the story of a postman who delivers letters to the deep sea.",
)

_PARKED: Final = frozenset({b"preempt-paused", b"preempted"})
_RESUMED: Final = frozenset({b"preempt-resumed", b"resumed"})
_RECOMPUTED: Final = frozenset({b"preempt-recomputed", b"recomputed"})


class ChatReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one chat went. ``error`` is None, or one line; times are seconds.

    ``ttft_s`` is None when no text ever came; ``longest_silence_s`` is between two data
    events, comments do not count.
    """

    finished: bool
    tokens: int
    finish_reason: str | None
    error: str | None
    ttft_s: float | None
    longest_silence_s: float
    parks: int
    resumes: int
    recomputes: int


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """All chats of a run; ``tokens_per_s`` is their sum over ``wall_s``."""

    chats: tuple[ChatReport, ...]
    finished: int
    failed: int
    tokens_per_s: float
    wall_s: float

    @property
    def tokens(self) -> int:
        """Tokens of all chats together."""
        return sum(chat.tokens for chat in self.chats)


class ChatView(msgspec.Struct, frozen=True, kw_only=True):
    """One chat at this moment; ``state``: waiting, running, paused, done or failed."""

    state: str = "waiting"
    tokens: int = 0
    parks: int = 0


OnUpdate = Callable[[tuple[ChatView, ...]], None]


class _KvaletPart(msgspec.Struct, frozen=True):
    kvalet: KvaletUsage | None = None


class _Figures(msgspec.Struct, frozen=True):
    """Where kvalet's own figures may stand in a chunk."""

    usage: _KvaletPart | None = None
    kvalet: KvaletUsage | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model] = []


class _Answer:
    """One chat's stream, counted as it comes in."""

    def __init__(self, started_s: float) -> None:
        self.state = "waiting"
        self.tokens = 0
        self.parks = self.resumes = self.recomputes = 0
        self.finish: str | None = None
        self.error: str | None = None
        self._done = False
        self._started_s = started_s
        self._ttft_s: float | None = None
        self._last_datum_s: float | None = None
        self._silence_s = 0.0
        self._billed: int | None = None

    def hear(self, event: SseEvent, at_s: float) -> None:
        """Take one event into account. Raises ServerFault when it is garbage."""
        for comment in event.comments:
            self._hear_comment(comment)
        if event.data is None or not event.complete:
            return
        if self._last_datum_s is not None:
            self._silence_s = max(self._silence_s, at_s - self._last_datum_s)
        self._last_datum_s = at_s
        self._take(read_chunk(event.data), event.data, at_s)

    def _hear_comment(self, comment: bytes) -> None:
        word = comment.partition(b" ")[0]
        if word in _PARKED:
            self.parks += 1
            self.state = "paused"
        elif word in _RESUMED:
            self.resumes += 1
            self.state = "running"
        elif word in _RECOMPUTED:
            self.recomputes += 1

    def _take(self, chunk: Chunk, payload: bytes, at_s: float) -> None:
        self._done = self._done or chunk.done
        if chunk.error is not None:
            self.fail(_message(chunk.error))
        if chunk.text or chunk.reasoning or chunk.tool_call:
            self.tokens += 1
            self.state = "running"
            if self._ttft_s is None:
                self._ttft_s = at_s - self._started_s
        self.finish = chunk.finish or self.finish
        if chunk.usage is not None:
            self._billed = chunk.usage.completion_tokens
        if chunk.usage is not None or chunk.finish is not None:
            self._trust(payload)

    def _trust(self, payload: bytes) -> None:
        """Prefer the figures that kvalet itself gives over our count of its comments."""
        try:
            figures = msgspec.json.decode(payload, type=_Figures)
        except msgspec.DecodeError:
            return
        own = figures.kvalet or (figures.usage and figures.usage.kvalet)
        if own:
            self.parks, self.resumes, self.recomputes = own.parks, own.resumes, own.recomputes

    def fail(self, error: str) -> None:
        """Keep the first error; the chat cannot finish any more."""
        self.error = self.error or error

    def end(self) -> None:
        """The stream is over: judge it."""
        if self._billed is not None:
            self.tokens = self._billed
        if self.finish is None:
            self.fail("the stream ended without a finish_reason")
        elif not self._done:
            self.fail("the stream ended without [DONE]")
        self.state = "failed" if self.error else "done"

    def report(self) -> ChatReport:
        """What is known now."""
        return ChatReport(
            finished=self.state == "done",
            tokens=self.tokens,
            finish_reason=self.finish,
            error=self.error,
            ttft_s=None if self._ttft_s is None else round(self._ttft_s, 4),
            longest_silence_s=round(self._silence_s, 4),
            parks=self.parks,
            resumes=self.resumes,
            recomputes=self.recomputes,
        )


async def run_bench(
    url: str,
    chats: int,
    tokens: int,
    on_update: OnUpdate | None = None,
    api_key: str | None = None,
    client: httpx.AsyncClient | None = None,
) -> BenchReport:
    """Run ``chats`` chats of exactly ``tokens`` tokens at once, at temperature 0.

    A chat that fails is part of the report. ``on_update`` sees all chats after each change.
    Raises ConfigFault for a bad URL, EnvironmentFault when nobody answers there.
    """
    base = _base(url)
    async with _opened(client, api_key) as caller:
        model = await _model_name(caller, base)
        started_s = trio.current_time()
        answers = [_Answer(started_s) for _ in range(chats)]

        def show() -> None:
            if on_update is not None:
                on_update(tuple(_view(answer) for answer in answers))

        async with trio.open_nursery() as nursery:
            for number, answer in enumerate(answers):
                body = _body(model, number, tokens)
                nursery.start_soon(_chat, caller, base, body, answer, show)
        wall_s = trio.current_time() - started_s
    return _sum_up(answers, wall_s)


async def _chat(
    client: httpx.AsyncClient,
    base: str,
    body: bytes,
    answer: _Answer,
    show: Callable[[], None],
) -> None:
    headers = {"Content-Type": "application/json"}
    request = client.stream("POST", f"{base}/v1/chat/completions", content=body, headers=headers)
    splitter = SseSplitter()
    try:
        async with request as response:
            if response.status_code != 200:
                text = _message(await response.aread())
                answer.fail(f"status {response.status_code}: {text}")
            else:
                async for piece in response.aiter_raw():
                    _feed(answer, splitter, piece)
                    show()
    except (httpx.HTTPError, httpx.StreamError) as error:
        answer.fail(f"the connection broke: {str(error) or type(error).__name__}")
    answer.end()
    show()


def _feed(answer: _Answer, splitter: SseSplitter, piece: bytes) -> None:
    """Garbage fails the chat; its stream is read to the end nevertheless."""
    try:
        for event in splitter.feed(piece):
            answer.hear(event, trio.current_time())
    except ServerFault as error:
        answer.fail(str(error))


def prompt_for(number: int) -> str:
    """The prompt of chat ``number``, counted from 0; no two are alike."""
    prompt = PROMPTS[number % len(PROMPTS)]
    chapter = number // len(PROMPTS)
    return f"{prompt} Begin with chapter {chapter + 1}." if chapter else prompt


def _body(model: str, number: int, tokens: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt_for(number)}],
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _sum_up(answers: list[_Answer], wall_s: float) -> BenchReport:
    reports = tuple(answer.report() for answer in answers)
    finished = sum(report.finished for report in reports)
    tokens = sum(report.tokens for report in reports)
    return BenchReport(
        chats=reports,
        finished=finished,
        failed=len(reports) - finished,
        tokens_per_s=round(tokens / wall_s, 3) if wall_s > 0 else 0.0,
        wall_s=round(wall_s, 3),
    )


def _view(answer: _Answer) -> ChatView:
    return ChatView(state=answer.state, tokens=answer.tokens, parks=answer.parks)


def _base(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigFault(f"bench wants an address like http://127.0.0.1:8383, not {url!r}")
    return url.rstrip("/").removesuffix("/v1")


@asynccontextmanager
async def _opened(
    client: httpx.AsyncClient | None, api_key: str | None
) -> AsyncGenerator[httpx.AsyncClient]:
    if client is not None:
        yield client
        return
    # llama-server closes the connection behind every stream although it promises to keep it.
    headers = {"Connection": "close", "Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=SILENCE_MAX_S, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        headers=headers, timeout=timeout, limits=limits, trust_env=False
    ) as opened:
        yield opened


async def _model_name(client: httpx.AsyncClient, base: str) -> str:
    """The first model on offer; asking also proves that somebody is there."""
    try:
        answer = await client.get(f"{base}/v1/models", timeout=CONNECT_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise EnvironmentFault(
            f"no server answers at {base} ({why}): start one, or check the address"
        ) from error
    if answer.status_code in (401, 403):
        raise EnvironmentFault(f"{base} wants an API key: pass --api-key-file FILE")
    try:
        models = msgspec.json.decode(answer.content, type=_Models).data
    except msgspec.DecodeError:
        models = []
    return models[0].id if models else "default"


class _Fault(msgspec.Struct, frozen=True):
    message: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    error: _Fault | str | None = None
    message: str = ""


def _message(body: bytes) -> str:
    """The sentence in an error body, or in an error object alone."""
    try:
        found = msgspec.json.decode(body, type=_Refusal | str)
    except msgspec.DecodeError:
        found = body.decode(errors="replace")
    if isinstance(found, _Refusal):
        inner = found.error.message if isinstance(found.error, _Fault) else found.error
        found = inner or found.message or body.decode(errors="replace")
    return " ".join(found.split())[:_ERROR_CHARS_MAX] or "no reason given"
