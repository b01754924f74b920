"""The simulated server as an HTTP app: who may ask, what each route answers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import msgspec
import trio

from kvalet.sims.fakeserver import pages, refusals
from kvalet.sims.fakeserver.faults import Broken, SlowMetrics
from kvalet.sims.fakeserver.options import Options
from kvalet.sims.fakeserver.reader import Reader, Reply
from kvalet.sims.fakeserver.refusals import Refused
from kvalet.sims.fakeserver.requests import (
    SURFACES,
    Ask,
    Limits,
    Surface,
    decode_object,
    prompt_of,
    read_ask,
)
from kvalet.sims.fakeserver.slot import Job
from kvalet.sims.fakeserver.slot_files import SlotFiles
from kvalet.sims.fakeserver.template import render
from kvalet.sims.fakeserver.tokens import detokenize, is_token, piece_of, tokenize_parts
from kvalet.sims.fakeserver.turns import Log, Mailbox, Turns
from kvalet.sims.fakeserver.typed_surfaces import open_voice
from kvalet.sims.fakeserver.wire import HEADERS, JSON_HEADERS, Sender

PUBLIC: Final = frozenset({"/health", "/v1/health", "/"})
_ASKED_MAX: Final = 256
_UNSUPPORTED: Final = {
    **dict.fromkeys(
        ("/embedding", "/embeddings", "/v1/embeddings"),
        "This server does not support embeddings. Start it with `--embeddings`",
    ),
    **dict.fromkeys(
        ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
        "This server does not support reranking. Start it with `--reranking`",
    ),
    "/infill": "Infill is not supported by this model: prefix token is missing. "
    "suffix token is missing. middle token is missing. ",
    **dict.fromkeys(
        ("/audio/transcriptions", "/v1/audio/transcriptions"),
        "The current model does not support audio input.",
    ),
}
_NEEDS: Final = "This server does not support {what}. Start it with `{flag}`"
_COUNTED: Final[dict[str, Surface]] = {
    "/v1/messages/count_tokens": "messages",
    "/chat/completions/input_tokens": "chat",
    "/v1/chat/completions/input_tokens": "chat",
    "/responses/input_tokens": "responses",
    "/v1/responses/input_tokens": "responses",
}


class SimServer:
    """One server. ``crashed`` is set, with ``exit_code``, when a fault has ended it."""

    def __init__(
        self, options: Options, log: Log, *, die: Callable[[int], None] | None = None
    ) -> None:
        self.options = options
        self.crashed = trio.Event()
        self.exit_code = 0
        self.stopping = trio.Event()
        """Set: nothing more is generated, and streams are cut when their next ping is due."""
        self.turns = Turns(options, log, die or self._crash)
        self._log = log
        self._files = SlotFiles(options, self.turns)
        self._numbers = itertools.count(1)
        self._asked: dict[int, Ask] = {}
        self._gauges = pages.Gauges()
        self.loaded = trio.Event()
        self._broken = {fault: fault.times for fault in options.faults if isinstance(fault, Broken)}
        self._nursery: trio.Nursery | None = None
        self._limits = Limits(
            n_ctx=options.pool.slot_ctx,
            slots=options.pool.slots,
            n_predict=options.n_predict,
            exact=options.exact,
            pictures=options.flags.mmproj is not None,
        )

    async def run(self) -> None:
        """Load, then serve turns until cancelled or stopping. Requests are answered meanwhile."""
        async with trio.open_nursery() as self._nursery:
            pool = self.options.pool
            self._log(
                f"load_model: initializing, n_slots = {pool.slots}, n_ctx_slot = {pool.slot_ctx}, "
                f"kv_unified = '{str(pool.unified).lower()}'"
            )
            for note in self.options.notes:
                self._log(note)
            await trio.sleep(self.options.ready_s)
            self.loaded.set()
            self._log("llama_server: model loaded")
            with trio.CancelScope() as generating:
                self._nursery.start_soon(self._stop, generating)
                await self.turns.run()
            await trio.sleep_forever()

    async def _stop(self, generating: trio.CancelScope) -> None:
        await self.stopping.wait()
        generating.cancel()

    def _crash(self, code: int) -> None:
        self.exit_code = code
        self.crashed.set()

    async def __call__(self, reply: Reply) -> None:
        """Answer one request."""
        if self._nursery is None:
            await reply.respond(503, JSON_HEADERS, refusals.LOADING)
            return
        try:
            await self._route(reply)
        except Refused as refused:
            await self._json(reply, refused.body, refused.status)

    async def _route(self, reply: Reply) -> None:
        request = reply.request
        if request.method == "OPTIONS":
            allowed = {
                "access-control-allow-credentials": "true",
                "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
                "access-control-allow-headers": "*",
                "content-type": "text/html",
            }
            await reply.respond(200, {**self._origin(reply, HEADERS), **allowed}, b"")
        elif not self.loaded.is_set():
            await self._json(reply, refusals.LOADING, 503)
        elif not self._may(reply):
            await self._json(reply, refusals.NO_KEY, 401)
        else:
            self._break(request.path)
            await self._answer(reply)

    async def _answer(self, reply: Reply) -> None:
        method, path = reply.request.method, reply.request.path
        if method == "POST" and path in SURFACES:
            await self._complete(reply)
        elif method == "POST" and path in _UNSUPPORTED:
            raise Refused(501, _UNSUPPORTED[path])
        elif method == "POST" and path.startswith("/slots/"):
            done = await self._files.act(
                next(self._numbers), path.removeprefix("/slots/"), reply.request
            )
            await self._json(reply, msgspec.json.encode(done))
        elif path in ("/tools", "/cors-proxy"):
            await self._json(reply, refusals.DISABLED, 403)
        elif route := self._routes.get((method, path)):
            await route(reply)
        elif method == "POST" and path in _COUNTED:
            await self._count(reply)
        else:
            await self._json(reply, refusals.NOT_FOUND, 404)

    @property
    def _routes(self) -> dict[tuple[str, str], Callable[[Reply], Awaitable[None]]]:
        return {
            ("GET", "/health"): self._health,
            ("GET", "/v1/health"): self._health,
            ("GET", "/props"): self._props,
            ("POST", "/props"): self._set_props,
            ("GET", "/models"): self._models,
            ("GET", "/v1/models"): self._models,
            ("GET", "/slots"): self._slots,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/lora-adapters"): self._no_list,
            ("POST", "/v1/streams/lookup"): self._no_list,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/apply-template"): self._apply_template,
        }

    def _may(self, reply: Reply) -> bool:
        keys, headers = self.options.api_keys, reply.request.headers
        if not keys or reply.request.path in PUBLIC:
            return True
        said = headers.get("authorization") or headers.get("x-api-key", "")
        return said.removeprefix("Bearer ") in keys

    def _break(self, path: str) -> None:
        for fault, left in self._broken.items():
            if left > 0 and path.startswith(fault.path):
                self._broken[fault] = left - 1
                raise Refused(500, "broken on purpose")

    # --- completions ----------------------------------------------------------------------

    async def _complete(self, reply: Reply) -> None:
        ask = read_ask(SURFACES[reply.request.path], reply.request.body, self._limits)
        numbers = tuple(next(self._numbers) for _ in range(ask.jobs))
        sender = Sender(
            model=ask.model or self.options.name,
            fingerprint=self.options.build.info,
            created=int(trio.current_time()),
            record=self.options.build.record,
            speculation=",".join(self.options.flags.spec_types) or "none",
        )
        reader = Reader(
            options=self.options,
            turns=self.turns,
            box=Mailbox(streams=ask.stream),
            reply=reply,
            ask=ask,
            voice=open_voice(ask, sender, numbers[0]),
            numbers=numbers,
            stopping=self.stopping,
        )
        self._submit(ask, numbers, reader.box)
        assert self._nursery is not None
        self._nursery.start_soon(reader.run)
        try:
            await reader.done.wait()
        finally:
            reader.leave()

    def _submit(self, ask: Ask, numbers: tuple[int, ...], box: Mailbox) -> None:
        if len(self._asked) > _ASKED_MAX:
            known = {slot.last_job for slot in self.turns.pool.slots}
            self._asked = {number: a for number, a in self._asked.items() if number in known}
        for at in range(0, len(numbers), ask.answers):
            family = numbers[at : at + ask.answers]
            jobs = [
                Job(
                    number=number,
                    prompt=ask.prompts[at // ask.answers],
                    n_predict=ask.n_predict,
                    n_keep=ask.n_keep,
                    id_slot=ask.id_slot if ask.jobs == 1 else -1,
                    cache_prompt=ask.cache_prompt,
                    ignore_eos=ask.ignore_eos,
                    stop=ask.stop,
                    family=ask.answers,
                    parent=family[0] if ask.answers > 1 else 0,
                )
                for number in family
            ]
            self._asked |= dict.fromkeys(family, ask)
            self.turns.submit(box, jobs)

    # --- pages ----------------------------------------------------------------------------

    async def _json(self, reply: Reply, body: bytes, status: int = 200) -> None:
        await reply.respond(status, self._origin(reply, JSON_HEADERS), body)

    def _origin(self, reply: Reply, headers: dict[str, str]) -> dict[str, str]:
        origin = reply.request.headers.get("origin", "")
        return {**headers, "access-control-allow-origin": origin}

    async def _ask_the_loop(self) -> None:
        """A question to the main loop: its answer wakes everybody, as any result does."""
        if self.turns.hung:
            await trio.sleep_forever()
        self.turns.bulletin.ring()

    async def _health(self, reply: Reply) -> None:
        await self._json(reply, b'{"status":"ok"}')

    async def _props(self, reply: Reply) -> None:
        await self._json(reply, pages.encode(pages.props_page(self.options)))

    async def _set_props(self, reply: Reply) -> None:
        if not self.options.props:
            raise Refused(501, _NEEDS.format(what="changing global properties", flag="--props"))
        await self._json(reply, b'{"success":true}')

    async def _models(self, reply: Reply) -> None:
        page = pages.models_page(self.options, int(trio.current_time()))
        await self._json(reply, pages.encode(page))

    async def _no_list(self, reply: Reply) -> None:
        await self._json(reply, b"[]")

    async def _slots(self, reply: Reply) -> None:
        if not self.options.slots:
            raise Refused(501, _NEEDS.format(what="slots endpoint", flag="--slots"))
        await self._ask_the_loop()
        page = pages.slots_page(self.options, self.turns.pool, self._asked)
        busy = all(slot["is_processing"] for slot in page)
        if busy and reply.request.query.get("fail_on_no_slot"):
            raise Refused(503, "no slot available")
        await self._json(reply, pages.encode(page))

    async def _metrics(self, reply: Reply) -> None:
        if not self.options.metrics:
            raise Refused(501, _NEEDS.format(what="metrics endpoint", flag="--metrics"))
        for fault in self.options.faults:
            if isinstance(fault, SlowMetrics):
                await trio.sleep(fault.seconds)
        await self._ask_the_loop()
        headers = {**HEADERS, "content-type": "text/plain; version=0.0.4"}
        headers["process-start-time-unix"] = "1"
        body = self._gauges.page(self.options, self.turns.pool)
        await reply.respond(200, self._origin(reply, headers), body)

    async def _tokenize(self, reply: Reply) -> None:
        body = decode_object(reply.request.body)
        content: object = body.get("content", "")
        parts = cast(list[object], content) if isinstance(content, list) else [content]
        ids = tokenize_parts(
            [part if isinstance(part, int) else str(part) for part in parts],
            bos=body.get("add_special") is True,
            special=body.get("parse_special", True) is not False,
        )
        tokens: list[Any] = [_piece(token) for token in ids] if body.get("with_pieces") else ids
        await self._json(reply, msgspec.json.encode({"tokens": tokens}))

    async def _detokenize(self, reply: Reply) -> None:
        tokens = decode_object(reply.request.body).get("tokens", [])
        ids = [token for token in tokens if isinstance(token, int) and is_token(token)]
        await self._json(reply, msgspec.json.encode({"content": detokenize(ids)}))

    async def _apply_template(self, reply: Reply) -> None:
        body = decode_object(reply.request.body)
        prompt = render(body, pictures=self._limits.pictures).prompt
        await self._json(reply, msgspec.json.encode({"prompt": prompt}))

    async def _count(self, reply: Reply) -> None:
        surface = _COUNTED[reply.request.path]
        body = decode_object(reply.request.body)
        _, ids = prompt_of(body, surface, self._limits)
        counted: dict[str, Any] = {"input_tokens": len(ids)}
        if surface != "messages":
            counted["object"] = "response.input_tokens"
        await self._json(reply, msgspec.json.encode(counted))


@asynccontextmanager
async def open_sim(options: Options, log: Log | None = None) -> AsyncGenerator[SimServer]:
    """A server in this program, loaded or still loading, on whatever clock trio runs on."""
    server = SimServer(options, log or (lambda _: None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        yield server
        nursery.cancel_scope.cancel()


def _piece(token: int) -> dict[str, Any]:
    raw = piece_of(token)
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}
