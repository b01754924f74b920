"""One launch: llama-server's arguments and environment, and the simulation's own, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from attrs import frozen

from kvalet.actors.decisions.plan.flag_table import MEMORY_FLAGS
from kvalet.actors.decisions.plan.flag_values import FALSE_WORDS, MTP_TYPES, TRUE_WORDS
from kvalet.actors.decisions.plan.flag_words import ONE_VALUE
from kvalet.actors.decisions.plan.flags import Argument, arguments, last_word, resolve_flags
from kvalet.actors.decisions.plan.server_flags import DRAFT_MAX, ServerFlags
from kvalet.sims.fakeserver import constants
from kvalet.sims.fakeserver.build import BUILDS, Build
from kvalet.sims.fakeserver.faults import (
    ExitAtStart,
    Fault,
    IgnoreExact,
    RefuseExact,
    RestoreFails,
    read_faults,
)
from kvalet.sims.fakeserver.slot import PoolSettings
from kvalet.sims.fakeserver.switches import Knobs, Wishes, check_exact, read_parking, read_wishes

_VALUES: Final = {
    "host": (("--host",), "LLAMA_ARG_HOST"),
    "port": (("--port",), "LLAMA_ARG_PORT"),
    "api_key_file": (("--api-key-file",), ""),
    "slot_dir": (("--slot-save-path",), ""),
    "alias": (("-a", "--alias"), "LLAMA_ARG_ALIAS"),
    "model": (("-m", "--model"), "LLAMA_ARG_MODEL"),
    "n_predict": (("-n", "--predict", "--n-predict"), "LLAMA_ARG_N_PREDICT"),
    "ping": (("--sse-ping-interval",), "LLAMA_ARG_SSE_PING_INTERVAL"),
    "preempt": (("--preempt-ram",), "LLAMA_ARG_PREEMPT_RAM"),
    "cache_reuse": (("--cache-reuse",), "LLAMA_ARG_CACHE_REUSE"),
}
"""Options with a value: spellings and variable."""

_SWITCHES: Final = {
    "metrics": (("--metrics",), (), "LLAMA_ARG_ENDPOINT_METRICS", False),
    "slots": (("--slots",), ("--no-slots",), "LLAMA_ARG_ENDPOINT_SLOTS", True),
    "props": (("--props",), (), "LLAMA_ARG_ENDPOINT_PROPS", False),
    "shift": (("--context-shift",), ("--no-context-shift",), "LLAMA_ARG_CONTEXT_SHIFT", False),
    "async": (("--preempt-async",), ("--no-preempt-async",), "LLAMA_ARG_PREEMPT_ASYNC", True),
    "idle": (
        ("--cache-idle-slots",),
        ("--no-cache-idle-slots",),
        "LLAMA_ARG_CACHE_IDLE_SLOTS",
        True,
    ),
}
"""Options without one: spellings, spellings that switch it off, variable, default."""


class StartRefused(Exception):
    """The server says ``lines`` on stderr and ends with ``code`` instead of starting."""

    def __init__(self, *lines: str, code: int = 1) -> None:
        super().__init__(lines[0] if lines else "")
        self.lines = lines
        self.code = code


@frozen(kw_only=True)
class Options:
    """One launch. ``notes`` are logged while loading."""

    build: Build
    pool: PoolSettings
    flags: ServerFlags
    faults: tuple[Fault, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    slot_dir: Path | None = None
    metrics: bool = False
    slots: bool = True
    props: bool = False
    ping_s: int = constants.PING_S
    model: str = "sim.gguf"
    alias: str = ""
    n_predict: int = -1
    exact: bool = False
    ready_s: float = constants.READY_S
    trained: int = constants.CONTEXT_TRAINED
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The model as answers call it."""
        return self.alias or self.model

    def has(self, when: str) -> bool:
        """Whether it runs as a fault asks: ``always``; ``mtp``, with heads of the model itself
        drafting; ``mtp_tensor``, with tensors split besides."""
        if when == "always":
            return True
        mtp = not MTP_TYPES.isdisjoint(self.flags.spec_types)
        return mtp and (when == "mtp" or self.flags.split_mode == "tensor")


def read_options(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """What a server of the wished generation makes of ``argv`` (the program left out) and ``env``.

    Raises StartRefused where it would not start.
    """
    try:
        wishes = read_wishes(env)
        faults = read_faults(env.get("KVALET_SIM_FAULTS", ""))
    except ValueError as error:
        _refuse(f"error: {error}")
    build = BUILDS[wishes.build]
    words = tuple(arguments(argv))
    for word in words:
        _check(word, build)
    _check_variables(env)
    said = _Said(words, env)
    for fault in faults:
        if isinstance(fault, ExitAtStart):
            raise StartRefused(fault.line, code=fault.code)
    flags = resolve_flags(argv, env).flags
    ignored = not build.exact or any(isinstance(fault, IgnoreExact) for fault in faults)
    exact = wishes.exact and not ignored
    if exact:
        _check_exact(flags, said, faults, wishes)
    pool, notes = _pool(build, flags, said, wishes, faults, exact)
    slot_dir, key_file = said.value("slot_dir"), said.value("api_key_file")
    return Options(
        build=build,
        pool=pool,
        flags=flags,
        faults=faults,
        host=said.value("host") or "127.0.0.1",
        port=said.number("port", 8080),
        api_keys=_keys(words, env),
        api_key_file=Path(key_file) if key_file else None,
        slot_dir=Path(slot_dir) if slot_dir else None,
        metrics=said.switch("metrics"),
        slots=said.switch("slots"),
        props=said.switch("props"),
        ping_s=said.number("ping", constants.PING_S),
        model=said.value("model") or "sim.gguf",
        alias=said.value("alias") or "",
        n_predict=said.number("n_predict", -1),
        exact=exact,
        ready_s=wishes.ready_s,
        trained=wishes.trained,
        notes=notes,
    )


class _Said:
    """Options that decide nothing about memory, with flags before variables."""

    def __init__(self, words: tuple[Argument, ...], env: Mapping[str, str]) -> None:
        self._words = words
        self._env = env

    def value(self, name: str) -> str | None:
        """The last value that was given."""
        return last_word(self._words, self._env, *_VALUES[name])

    def number(self, name: str, default: int) -> int:
        """That value as a whole number. Raises StartRefused."""
        value = self.value(name)
        if value is None:
            return default
        try:
            return int(value)
        except ValueError:
            _refuse(f'error while handling argument "{_VALUES[name][0][-1]}": stoi')

    def switch(self, name: str) -> bool:
        """Whether the option is on. Raises StartRefused for a variable that is no boolean."""
        on, off, variable, default = _SWITCHES[name]
        for word in reversed(self._words):
            if word.name in (*on, *off):
                return word.name in on
        if off and variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_") in self._env:
            return False
        value = self._env.get(variable)
        if value is not None and off and value not in TRUE_WORDS | FALSE_WORDS:
            _refuse(f'error while handling environment variable "{variable}": invalid value')
        return value in TRUE_WORDS or (default and value is None)


def _check(word: Argument, build: Build) -> None:
    if word.joined or word.name not in build.flags:
        _refuse(f"error: invalid argument: {word.words[0]}")
    flag = word.flag
    if (word.name in ONE_VALUE or (flag and flag.read)) and word.value is None:
        _refuse(f'error while handling argument "{word.name}": expected value for argument')
    if flag is None or flag.read is None:
        return
    reading = flag.read(word.value or "")
    problem = flag.removed or ("" if reading.applied else reading.problem)
    if problem:
        _refuse(f'error while handling argument "{word.name}": {problem}')


def _check_variables(env: Mapping[str, str]) -> None:
    for flag in MEMORY_FLAGS:
        value = env.get(flag.env) if flag.env else None
        if value is None:
            continue
        problem = flag.removed
        if not problem and flag.read is not None and not (reading := flag.read(value)).applied:
            problem = reading.problem
        if problem:
            _refuse(f'error while handling environment variable "{flag.env}": {problem}')


def _keys(words: tuple[Argument, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    """Keys of the variable and of every flag add up."""
    lists = [env.get("LLAMA_API_KEY", "")]
    lists += [word.value or "" for word in words if word.name == "--api-key"]
    return tuple(key for keys in lists for key in keys.split(",") if key)


def _check_exact(
    flags: ServerFlags, said: _Said, faults: tuple[Fault, ...], wishes: Wishes
) -> None:
    for fault in faults:
        if isinstance(fault, RefuseExact):
            _refuse(fault.line)
    problem = check_exact(
        flags,
        cache_reuse=said.number("cache_reuse", 0) > 0,
        context_shift=said.switch("shift"),
        kind=wishes.kind,
    )
    if problem:
        _refuse(problem)


def _pool(
    build: Build,
    flags: ServerFlags,
    said: _Said,
    wishes: Wishes,
    faults: tuple[Fault, ...],
    exact: bool,
) -> tuple[PoolSettings, tuple[str, ...]]:
    cells, slot_ctx = pool_size(flags, wishes.trained)
    failures = sum(fault.times for fault in faults if isinstance(fault, RestoreFails))
    budget = said.number("preempt", build.default_mib) if build.parks else 0
    knobs = Knobs(
        budget_mib=budget,
        asynchronous=build.asynchronous and said.switch("async"),
        recompute=build.recompute,
        restore_failures=failures,
        armed=flags.unified and flags.slots > 1 and budget != 0,
        kind=wishes.kind,
        exact=exact,
    )
    try:
        parking, page, notes = read_parking(knobs, wishes.server_env)
    except ValueError as error:
        _refuse(str(error))
    store = flags.cache_ram_mib
    settings = PoolSettings(
        slots=flags.slots,
        cells=cells,
        slot_ctx=slot_ctx,
        unified=flags.unified,
        batch=flags.batch,
        draft_max=(flags.draft_max or DRAFT_MAX) if flags.spec_types else 0,
        page=page,
        context_shift=said.switch("shift"),
        clear_idle=bool(store) and said.switch("idle"),
        store_mib=store,
        answer_tokens=wishes.answer_tokens,
        alone_in_step=exact or not wishes.neighbours,
        recompute_differs=wishes.recompute_differs,
        tokens_per_s=wishes.tokens_per_s,
        prefill_per_s=wishes.prefill_per_s,
        copy_bytes_per_s=wishes.copy_bytes_per_s,
        cell_bytes=wishes.cell_bytes,
        parking=parking,
    )
    return settings, notes


def pool_size(flags: ServerFlags, trained: int) -> tuple[int, int]:
    """Cells of the whole pool, and the most of them that one slot may use."""
    step, slots = constants.POOL_STEP_CELLS, flags.slots
    cap = flags.per_slot or trained
    if flags.unified:
        asked = flags.ctx or (slots * flags.per_slot if flags.per_slot and flags.ctx is None else 0)
        cells = -(-(asked or trained) // step) * step
        return cells, min(cells, trained, cap)
    each = -(-flags.ctx // slots) if flags.ctx else trained
    each = min(-(-each // step) * step, cap)
    return each * slots, min(each, trained)


def _refuse(line: str) -> NoReturn:
    raise StartRefused(line)
