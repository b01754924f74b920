"""What a model file says before anything is loaded: shape, weights, and the files it lies in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from attrs import frozen
from gguf.constants import LlamaFileType

from kvalet.actors.decisions.plan.shape import Metadata, ModelShape, shape_of
from kvalet.actors.decisions.plan.weights import EMBEDDINGS, Tensor, Weights
from kvalet.actors.facts_header import Header, read_header, shown
from kvalet.protocol.errors import EnvironmentFault

PROJECTOR_ARCH: Final = "clip"
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_BELIEVABLE_ARCH: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TEMPLATE: Final = "tokenizer.chat_template"


@frozen(kw_only=True)
class ModelFile:
    """One model on disk. Sizes in bytes, over all its shards; ``paths`` begins with shard 1.

    ``complete`` is False when a header was cut short or is damaged, and ``flaw`` then says how:
    what was read up to there is in here. ``missing_bytes`` counts what the files lack of the
    tensors they list: a download that broke off, or a file that holds nothing but a header.
    """

    shape: ModelShape
    weights: Weights
    paths: tuple[Path, ...]
    file_bytes: int
    missing_bytes: int = 0
    n_tensors: int = 0
    name: str = ""
    size_label: str = ""
    quant: str = ""
    has_chat_template: bool = False
    flaw: str = ""

    @property
    def complete(self) -> bool:
        """Whether every header was read to its end."""
        return self.shape.complete

    @property
    def weights_bytes(self) -> int:
        """The tensors' bytes; the files' when the list of tensors is not whole."""
        listed = self.weights.total_bytes
        return listed if not self.flaw else max(listed, self.file_bytes)

    @property
    def is_projector(self) -> bool:
        """Whether this is the vision or audio part of a model (mmproj), which answers nothing."""
        return self.shape.arch == PROJECTOR_ARCH


def read_gguf(path: Path) -> ModelFile:
    """The facts of the model at ``path``, which may be any shard of a split model.

    Reads headers only: a prefix of a file is enough, 128 KiB for the shape of any model.
    Raises EnvironmentFault, in one line that names the file, when a file cannot be read, is no
    GGUF that llama-server takes, lacks a shard, or names no architecture.
    """
    first, wanted = _shard_one(path)
    header = read_header(first)
    arch = header.metadata.get("general.architecture")
    if not isinstance(arch, str) or not _BELIEVABLE_ARCH.fullmatch(arch):
        reason = header.flaw or "general.architecture is missing or no word"
        raise EnvironmentFault(f"{shown(first)} names no architecture: {reason}")
    paths = _shards(first, wanted, header)
    headers = [header, *(read_header(shard) for shard in paths[1:])]
    flaws = [
        f"{shown(shard)}: {read.flaw}"
        for shard, read in zip(paths, headers, strict=True)
        if not read.complete
    ]
    tensors = tuple(tensor for read in headers for tensor in read.tensors)
    return ModelFile(
        shape=shape_of(header.metadata, complete=not flaws, embd_rows=_embd_rows(tensors)),
        weights=Weights(tensors=tensors),
        paths=paths,
        file_bytes=sum(read.file_bytes for read in headers),
        missing_bytes=sum(max(0, read.expected_bytes - read.file_bytes) for read in headers),
        n_tensors=len(tensors),
        name=_text(header.metadata, "general.name"),
        size_label=_text(header.metadata, "general.size_label"),
        quant=_quant(header.metadata),
        has_chat_template=_TEMPLATE in header.metadata,
        flaw=flaws[0] if flaws else "",
    )


def _shard_one(path: Path) -> tuple[Path, int]:
    """The shard that holds the metadata, and the number of shards that the name speaks of."""
    named = _SHARD.fullmatch(path.name)
    if named is None:
        return path, 1
    first = path.with_name(f"{named['stem']}-00001-of-{named['count']}.gguf")
    if first != path and not first.exists():
        raise EnvironmentFault(
            f"{shown(path)} is one of {int(named['count'])} shards; {shown(first)} is missing"
        )
    return first, int(named["count"])


def _shards(first: Path, by_name: int, header: Header) -> tuple[Path, ...]:
    declared = header.metadata.get("split.count")
    if declared is None and header.complete:
        # llama-server goes by the key: a file without it is whole, whatever it is called.
        return (first,)
    count = declared if isinstance(declared, int) and declared > 0 else by_name
    if count == 1:
        return (first,)
    if count != by_name:
        raise EnvironmentFault(
            f"{shown(first)} is one of {count} shards, and its name does not say so: "
            f"it must end in -00001-of-{count:05}.gguf"
        )
    stem = first.name.removesuffix(f"-00001-of-{count:05}.gguf")
    paths: list[Path] = []
    for number in range(1, count + 1):
        shard = first.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")
        if not shard.exists():
            raise EnvironmentFault(f"shard {number} of {count} is missing: {shown(shard)}")
        paths.append(shard)
    return tuple(paths)


def _embd_rows(tensors: tuple[Tensor, ...]) -> int | None:
    found = (t.dims[1] for t in tensors if t.name == EMBEDDINGS and len(t.dims) > 1)
    return next(found, None)


def _quant(metadata: Metadata) -> str:
    """The file type as its files are named, ``Q4_K_M``; empty when not said."""
    value = metadata.get("general.file_type")
    if not isinstance(value, int):
        return ""
    known = {kind.value: kind.name for kind in LlamaFileType}
    return known.get(value, f"type {value}").removeprefix("MOSTLY_").removeprefix("ALL_")


def _text(metadata: Metadata, key: str) -> str:
    """A text fit for a line of output."""
    value = metadata.get(key)
    return "".join(c for c in value if c.isprintable()) if isinstance(value, str) else ""
