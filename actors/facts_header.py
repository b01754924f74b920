"""Reads the header of a GGUF file: its metadata and the list of its tensors, never their bytes.

The ``gguf`` package supplies the format's numbers. Its own reader is not used: it maps every
tensor (so a file that holds only a header cannot be opened), builds an array for each token of
the vocabulary, and trusts the counts that the file declares.
"""

from __future__ import annotations

import os
import stat
import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from attrs import field, frozen
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from kvalet.actors.decisions.plan.shape import TOKEN_COUNT, Scalar, Value
from kvalet.actors.decisions.plan.weights import Tensor
from kvalet.protocol.errors import EnvironmentFault

VERSIONS: Final = (2, 3)
CHUNK_BYTES: Final = 1 << 18
KEYS_MAX: Final = 1 << 16
TENSORS_MAX: Final = 1 << 16
STRINGS_MAX: Final = 3 << 20
"""Strings in all arrays together; the largest vocabulary so far, with its merges, has 10^6."""
HEADER_BYTES_MAX: Final = 256 << 20
KEY_BYTES_MAX: Final = 1 << 16
TENSOR_NAME_BYTES_MAX: Final = 256
TEXT_BYTES_MAX: Final = 4096
ARRAY_MAX: Final = 8192
"""Longer arrays speak of tokens, not of layers: they are passed over."""
KEPT_BYTES_MAX: Final = 16 << 20
DIMS_MAX: Final = 4
TYPES_MAX: Final = 1024
SIZE_END: Final = 1 << 63

_MAGIC: Final = GGUF_MAGIC.to_bytes(4, "little")
_CUT: Final = "the file ends within its header"
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_COUNTS: Final = struct.Struct("<QQ")
_ARRAY: Final = struct.Struct("<IQ")
_INFOS: Final = tuple(struct.Struct(f"<{n}QIQ") for n in range(DIMS_MAX + 1))
"""What follows the number of dimensions in a tensor's entry: each of them, type, offset."""
_SCALARS: Final = {
    GGUFValueType.UINT8.value: "B",
    GGUFValueType.INT8.value: "b",
    GGUFValueType.UINT16.value: "H",
    GGUFValueType.INT16.value: "h",
    GGUFValueType.UINT32.value: "I",
    GGUFValueType.INT32.value: "i",
    GGUFValueType.FLOAT32.value: "f",
    GGUFValueType.BOOL.value: "?",
    GGUFValueType.UINT64.value: "Q",
    GGUFValueType.INT64.value: "q",
    GGUFValueType.FLOAT64.value: "d",
}
_STRING: Final = GGUFValueType.STRING.value
_LIST: Final = GGUFValueType.ARRAY.value
_LAYOUTS: Final = {
    kind.value: (kind.name, *GGML_QUANT_SIZES[kind])
    for kind in GGMLQuantizationType
    if kind in GGML_QUANT_SIZES
}
"""Of each tensor type that the package knows: its name, elements in a block, bytes of a block."""


@frozen(kw_only=True)
class Header:
    """What one file says about itself.

    ``flaw`` says in one line why the scan ended early, and is empty when it did not: what was
    read up to there is kept. ``expected_bytes`` is the size that the file must have to hold
    its tensors, 0 when the tensor list is not whole.
    """

    metadata: dict[str, Value] = field(factory=dict[str, Value])
    tensors: tuple[Tensor, ...] = ()
    tensor_count: int = 0
    file_bytes: int = 0
    expected_bytes: int = 0
    flaw: str = ""

    @property
    def complete(self) -> bool:
        """Whether the whole header was read."""
        return not self.flaw


class _Info(NamedTuple):
    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


class _Stop(Exception):
    """The header cannot be followed any further."""


def read_header(path: Path) -> Header:
    """The header of the GGUF file at ``path``; bounded in time and memory, whatever it holds.

    Raises EnvironmentFault, which names the file, when it cannot be read, is no regular file,
    no GGUF file of a version that llama-server takes, or too short to say anything.
    """
    with _open(path) as file:
        try:
            return _read(path, _Window(file, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from error


def shown(path: Path) -> str:
    """``path`` on one line, whatever its name is made of."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def _open(path: Path) -> BinaryIO:
    # A FIFO without a writer blocks whoever opens it, and a device may act on being opened.
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise _unreadable(path, "it is a directory")
        if not stat.S_ISREG(kind):
            raise _unreadable(path, "it is not a plain file")
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> EnvironmentFault:
    return EnvironmentFault(f"cannot read the model {shown(path)}: {reason}")


def _read(path: Path, window: _Window) -> Header:
    tensor_count, key_count = _preamble(path, window)
    metadata: dict[str, Value] = {}
    infos: dict[str, _Info] = {}
    flaw = ""
    try:
        _read_keys(window, key_count, metadata)
        _read_infos(window, tensor_count, infos)
        alignment = _alignment(metadata)
    except _Stop as stop:
        flaw, alignment = str(stop), GGUF_DEFAULT_ALIGNMENT
    start = -(-window.position // alignment) * alignment
    tensors, data_bytes = _sized(list(infos.values()), max(0, window.size - start))
    return Header(
        metadata=metadata,
        tensors=tensors,
        tensor_count=tensor_count,
        file_bytes=window.size,
        expected_bytes=0 if flaw else start + data_bytes,
        flaw=flaw,
    )


class _Window:
    """The part of a file that is being read; moves forward only."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._held = b""
        self._at = 0
        self._before = 0
        self.size = size
        self._strings_left = STRINGS_MAX

    @property
    def position(self) -> int:
        return self._before + self._at

    def take(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return self._held[self._at - count : self._at]

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        self._need(layout.size)
        self._at += layout.size
        return layout.unpack_from(self._held, self._at - layout.size)

    def skip(self, count: int) -> None:
        here = len(self._held) - self._at
        if count <= here:
            self._at += count
            return
        self._check_reach(self.position + count)
        self._before = self.position + count
        self._held, self._at = b"", 0
        self._file.seek(self._before)

    def skip_strings(self, count: int) -> None:
        if count > self._strings_left:
            raise _Stop(f"an array of {count} strings is not believable")
        self._strings_left -= count
        length_at = _U64.unpack_from
        while count:
            self._need(8)
            held, at, last = self._held, self._at, len(self._held) - 8
            while count and at <= last:
                at += 8 + length_at(held, at)[0]
                count -= 1
            self._at = min(at, len(held))
            self.skip(at - self._at)

    def _need(self, count: int) -> None:
        here = len(self._held) - self._at
        if here >= count:
            return
        self._check_reach(self.position + count)
        fresh = self._file.read(max(count - here, CHUNK_BYTES))
        self._before += self._at
        self._held, self._at = self._held[self._at :] + fresh, 0
        if len(self._held) < count:
            raise _Stop(_CUT)

    def _check_reach(self, end: int) -> None:
        if end > self.size:
            raise _Stop(_CUT)
        if end > HEADER_BYTES_MAX:
            raise _Stop(f"a header of more than {HEADER_BYTES_MAX >> 20} MiB is not believable")


def _preamble(path: Path, window: _Window) -> tuple[int, int]:
    """Number of tensors and of metadata keys, as declared."""
    try:
        magic = window.take(4)
        if magic != _MAGIC:
            raise EnvironmentFault(f"{shown(path)} is not a GGUF file: it does not begin with GGUF")
        (version,) = window.unpack(_U32)
        if version not in VERSIONS:
            raise EnvironmentFault(f"{shown(path)} {_refusal(version)}")
        tensors, keys = window.unpack(_COUNTS)
    except _Stop:
        raise EnvironmentFault(f"{shown(path)} is not a GGUF file: it is too short") from None
    return tensors, keys


def _refusal(version: int) -> str:
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in VERSIONS:
        return "is a big-endian GGUF file, which llama-server does not load on this machine"
    return f"has GGUF version {version}: llama-server loads 2 and 3; convert the model again"


def _read_keys(window: _Window, count: int, into: dict[str, Value]) -> None:
    kept = 0
    for _ in range(min(count, KEYS_MAX)):
        key = _name(window, KEY_BYTES_MAX)
        (kind,) = window.unpack(_U32)
        if key in into:
            raise _Stop(f"the key {key[:64]!r} is given twice")
        value, cost = _value(window, key, kind, into)
        kept += len(key) + cost
        if kept > KEPT_BYTES_MAX:
            raise _Stop("the header says more than a model can mean")
        if value is not None:
            into[key] = value
    if count > KEYS_MAX:
        raise _Stop(f"{count} keys are not believable")


def _name(window: _Window, bytes_max: int) -> str:
    (length,) = window.unpack(_U64)
    if length > bytes_max:
        raise _Stop(f"a name of {length} bytes is not believable")
    return window.take(length).decode("utf-8", "replace")


def _value(
    window: _Window, key: str, kind: int, into: dict[str, Value]
) -> tuple[Value | None, int]:
    """A value, None when it is passed over, and about how many bytes it takes to keep."""
    code = _SCALARS.get(kind)
    if code is not None:
        return struct.unpack(f"<{code}", window.take(struct.calcsize(f"<{code}")))[0], 32
    if kind == _STRING:
        (length,) = window.unpack(_U64)
        text = window.take(min(length, TEXT_BYTES_MAX)) if length <= window.size else b""
        window.skip(length - len(text))
        return text.decode("utf-8", "replace"), 64 + len(text)
    if kind == _LIST:
        return _array(window, key, into)
    raise _Stop(f"the key {key[:64]!r} has the unknown type {kind}")


def _array(window: _Window, key: str, into: dict[str, Value]) -> tuple[Value | None, int]:
    kind, count = window.unpack(_ARRAY)
    if key == TOKEN_COUNT.removesuffix(".length") and count <= STRINGS_MAX:
        into[TOKEN_COUNT] = count
    if kind == _STRING:
        window.skip_strings(count)
        return None, 0
    code = _SCALARS.get(kind)
    if code is None:
        raise _Stop(f"the key {key[:64]!r} holds an array of the unusable type {kind}")
    if count > ARRAY_MAX:
        window.skip(count * struct.calcsize(f"<{code}"))
        return None, 0
    entries: tuple[Scalar, ...] = struct.unpack(
        f"<{count}{code}", window.take(count * struct.calcsize(f"<{code}"))
    )
    return entries, 64 + 40 * count


def _read_infos(window: _Window, count: int, into: dict[str, _Info]) -> None:
    for _ in range(min(count, TENSORS_MAX)):
        info = _info(window)
        if info.name in into:
            raise _Stop(f"the tensor {info.name[:64]!r} is given twice")
        into[info.name] = info
    if count > TENSORS_MAX:
        raise _Stop(f"{count} tensors are not believable")


def _info(window: _Window) -> _Info:
    name = _name(window, TENSOR_NAME_BYTES_MAX)
    (n_dims,) = window.unpack(_U32)
    if n_dims > DIMS_MAX:
        raise _Stop(f"the tensor {name[:64]!r} has {n_dims} dimensions")
    *sizes, kind, offset = window.unpack(_INFOS[n_dims])
    dims = tuple(sizes)
    if not 0 < prod(dims) < SIZE_END:
        raise _Stop(f"the tensor {name[:64]!r} has impossible dimensions")
    if kind >= TYPES_MAX or offset >= SIZE_END:
        raise _Stop(f"the tensor {name[:64]!r} has an impossible type or place")
    layout = _LAYOUTS.get(kind)
    if layout is not None and (dims[0] if dims else 1) % layout[1]:
        raise _Stop(f"a row of the tensor {name[:64]!r} is no whole number of blocks")
    return _Info(name, dims, kind, offset)


def _sized(infos: list[_Info], held: int) -> tuple[tuple[Tensor, ...], int]:
    """The tensors with their sizes, and where the last one ends, in bytes behind the header.

    One of a type that the package does not know reaches to the next tensor, the last one to
    the end of the ``held`` bytes.
    """
    places = [*sorted(info.offset for info in infos), held]
    following = dict(pairwise(places))
    tensors: list[Tensor] = []
    end = 0
    for name, dims, kind, offset in infos:
        layout = _LAYOUTS.get(kind)
        if layout is None:
            label, n_bytes = f"TYPE_{kind}", max(0, following[offset] - offset)
        else:
            label, block, block_bytes = layout
            n_bytes = prod(dims) // block * block_bytes
        tensors.append(Tensor(name=name, kind=label, dims=dims, n_bytes=n_bytes))
        end = max(end, offset + n_bytes)
    return tuple(tensors), end


def _alignment(metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 0 < value < 1 << 32 or value & (value - 1):
        raise _Stop("general.alignment is not a power of two")
    return value
