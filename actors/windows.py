"""Which layers of a model have a window, asked outside of its file where the file does not say.

Hardly any launch asks anything: the header, or the table of what the server hard-codes, answers
for nearly every model. Otherwise an answer that was kept is taken, an installed ``transformers``
is asked, and at last the hub that the model came from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from stat import S_ISREG
from typing import Final, Literal

from kvalet.actors import default_config
from kvalet.actors.config import default_state_dir
from kvalet.actors.decisions.plan.layers import Hint
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.windows import (
    answers_in,
    fitted,
    key_of,
    pattern_in,
    recallable,
    unanswered,
    with_answer,
)
from kvalet.actors.hub import configurations

CACHE: Final = "swa_cache.json"
CACHE_BYTES_MAX: Final = 4 << 20
LIBRARY: Final = "transformers"
LIBRARY_S: Final = 30.0
"""An import from a cold disk takes long; no launch waits longer than this."""
_INTERPRETERS: Final = ("python", "pypy")
# Only a configuration is wanted: nothing may be fetched, and no framework has to load.
_QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "USE_TORCH": "0",
    "USE_TF": "0",
    "USE_FLAX": "0",
}


def find_hint(shape: ModelShape, env: Mapping[str, str] | None = None) -> Hint | None:
    """The first answer from outside of the file about the windows of ``shape``; None where nobody
    has to be asked, or nobody knows. Blocks, and raises nothing.

    An answer of the library or of a hub is kept, and comes from the disk the next time. ``env``
    is this process's own unless given: ``KVALET_HOME`` says where answers are kept,
    ``KVALET_OFFLINE`` set to 0 allows the network.
    """
    env = os.environ if env is None else env
    if not recallable(shape):
        return None
    home, key = _home(env) / CACHE, key_of(shape)
    recalled = answers_in(_read(home)).get(key)
    pattern = None if recalled is None else fitted(recalled, shape)
    if pattern is not None:
        return Hint(pattern, "cache")
    if not unanswered(shape):
        return None
    for tier, document in _documents(shape, env):
        said = pattern_in(document)
        pattern = None if said is None else fitted(said, shape)
        if pattern is not None:
            # Read again: another launch may have kept its answer in the meantime.
            _replace(home, with_answer(answers_in(_read(home)), key, pattern))
            return Hint(pattern, tier)
    return None


def _documents(
    shape: ModelShape, env: Mapping[str, str]
) -> Iterator[tuple[Literal["transformers", "hub"], object]]:
    """Configurations to read, in their order, each asked for only when it is its turn."""
    yield "transformers", _library(shape.arch)
    for document in configurations(shape.repositories, env):
        yield "hub", document


def _library(arch: str) -> object:
    """The default configuration of ``arch``, asked of the package in a process of its own: none
    of it stays in this one, and what stands in its place here cannot spoil the answer."""
    if not _may_ask():
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", default_config.__file__],
            input=json.dumps({"arch": arch, "path": sys.path}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_QUIET},
            timeout=LIBRARY_S,
            check=False,
        )
        answer: object = json.loads(done.stdout.rpartition(b"\n")[0].rpartition(b"\n")[2])
    except (OSError, ValueError, RecursionError, subprocess.SubprocessError):
        return None
    return answer if done.returncode == 0 else None


def _may_ask() -> bool:
    """Whether this is an interpreter, and not certainly one without the package."""
    named = Path(sys.executable or "").name.lower()
    if getattr(sys, "frozen", False) or not named.startswith(_INTERPRETERS):
        # A host's own program would be started a second time.
        return False
    try:
        return find_spec(LIBRARY) is not None
    except (ImportError, AttributeError, ValueError):
        return True


def _home(env: Mapping[str, str]) -> Path:
    home = env.get("KVALET_HOME")
    try:
        return Path(home) if home else default_state_dir()
    except RuntimeError:
        # Nobody's home: then nothing is kept.
        return Path(os.devnull)


def _read(path: Path) -> bytes:
    """The file's bytes; none where it cannot be read, is too large, or is no file."""
    try:
        # A pipe without a writer would hold an ordinary open up for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not S_ISREG(found.st_mode) or found.st_size > CACHE_BYTES_MAX:
                return b""
            return file.read(CACHE_BYTES_MAX)
    except OSError:
        return b""


def _replace(path: Path, raw: bytes) -> None:
    """Put ``raw`` there, whole or not at all. A disk that takes nothing costs only that the same
    is asked again."""
    temporary = ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(handle, "wb") as file:
            file.write(raw)
        os.replace(temporary, path)
    except OSError:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
