"""Model files that are damaged, cut, or made to hurt: one clear error, or what can be known."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvalet.actors.facts import ModelFile, read_gguf
from kvalet.actors.facts_header import HEADER_BYTES_MAX, STRINGS_MAX
from kvalet.protocol.errors import EnvironmentFault

HEADERS = sorted((Path(__file__).resolve().parents[1] / "data" / "gguf_headers").glob("*.gguf"))
U32, F32, STRING, ARRAY = 4, 6, 8, 9
EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
BOUND_S = 20.0
PEAK_MIB_MAX = 200


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def array(key: str, kind: int, count: int, body: bytes = b"") -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, count) + body)


def tensor(name: str = "a", dims: tuple[int, ...] = (32, 2), kind: int = 0, at: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + sizes + struct.pack("<IQ", kind, at)


ARCH = pair("general.architecture", STRING, string("llama"))
LAYERS = number("llama.block_count", 2)


def gguf(
    *pairs: bytes,
    tensors: tuple[bytes, ...] = (),
    keys: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
) -> bytes:
    """A header of the architecture llama with two layers, and ``pairs`` after that."""
    listed = (ARCH, LAYERS, *pairs)
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(listed) if keys is None else keys,
    )
    return b"".join([b"GGUF", struct.pack("<IQQ", version, *counts), *listed, *tensors])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def read(path: Path, raw: bytes) -> ModelFile | None:
    """What is known of ``raw``; None when it was refused, in one line that names the file."""
    path.write_bytes(raw)
    try:
        return read_gguf(path)
    except EnvironmentFault as fault:
        message = str(fault)
        assert "\n" not in message
        assert path.name in message
        return None


def known(path: Path, raw: bytes) -> ModelFile:
    began = time.process_time()
    found = read(path, raw)
    assert time.process_time() - began < BOUND_S
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "too short"),
        (b"GG", "too short"),
        (b"GGUF", "too short"),
        (gguf()[:20], "too short"),
        (b"PK\x03\x04" * 100, "not a GGUF file"),
        (b"FUGG" + gguf()[4:], "not a GGUF file"),
        (gguf(version=1), "version 1"),
        (gguf(version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "no architecture"),
        (gguf()[:30], "no architecture: the file ends within its header"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(model: Path, raw: bytes, reason: str) -> None:
    model.write_bytes(raw)
    with pytest.raises(EnvironmentFault, match=reason) as refused:
        read_gguf(model)
    assert model.name in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("arch", [b"", b"a b", b"\x1b[2J", b"\xff\xfe", b"x" * 70, b"a\n"])
def test_an_architecture_is_a_word(model: Path, arch: bytes) -> None:
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    assert read(model, raw + pair("general.architecture", STRING, string(arch))) is None


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_that_are_in_use_are_read(model: Path, version: int) -> None:
    found = known(model, gguf(tensors=(tensor(),), version=version))
    assert (found.shape.layers, found.weights_bytes, found.complete) == (2, 256, True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("none.gguf", "a\nb.gguf", "nul\0.gguf", "long" * 100, "none/none.gguf"):
        with pytest.raises(EnvironmentFault, match="cannot read the model") as refused:
            read_gguf(tmp_path / name)
        assert str(refused.value).isprintable()


def test_what_is_no_plain_file_is_refused_without_being_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(EnvironmentFault, match=r"directory|not a plain file"):
            read_gguf(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_is_not_ours_to_read_is_refused(model: Path) -> None:
    model.write_bytes(gguf())
    model.chmod(0)
    with pytest.raises(EnvironmentFault, match="Permission denied"):
        read_gguf(model)


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    with pytest.raises(EnvironmentFault, match="symbolic links"):
        read_gguf(loop)


HUGE = 2**63
NESTED = struct.pack("<IQ", ARRAY, 1) * 50_000


@pytest.mark.parametrize(
    ("raw", "flaw"),
    [
        (gguf(keys=HUGE), "ends within"),
        (gguf(n_tensors=HUGE, tensors=(tensor(),)), "ends within"),
        (gguf(struct.pack("<Q", HUGE)), "name of"),
        (gguf(string("k") + struct.pack("<I", 99)), "unknown type 99"),
        (gguf(pair("k", STRING, struct.pack("<Q", HUGE))), "ends within"),
        (gguf(array("k", STRING, HUGE)), "not believable"),
        (gguf(array("k", STRING, 2, string("a") + struct.pack("<Q", HUGE))), "ends within"),
        (gguf(array("k", F32, HUGE)), "ends within"),
        (gguf(array("k", F32, 8000)), "ends within"),
        (gguf(array("k", ARRAY, 1, NESTED)), "unusable type 9"),
        (gguf(array("k", 13, 1, b"x" * 99)), "unusable type 13"),
        (gguf(LAYERS), "given twice"),
        (gguf(tensors=(tensor(), tensor())), "given twice"),
        (gguf(tensors=(tensor("n" * 300),)), "name of 300 bytes"),
        (gguf(tensors=(tensor(dims=(1,) * 5),)), "5 dimensions"),
        (gguf(tensors=(tensor(dims=(0, 5)),)), "impossible dimensions"),
        (gguf(tensors=(tensor(dims=(2**32,) * 3),)), "impossible dimensions"),
        (gguf(tensors=(tensor(dims=(33, 2), kind=8),)), "number of blocks"),
        (gguf(tensors=(tensor(kind=2**31),)), "impossible type"),
        (gguf(tensors=(tensor(at=HUGE),)), "impossible type or place"),
        (gguf(number("general.alignment", 0)), "power of two"),
        (gguf(number("general.alignment", 48)), "power of two"),
        (gguf(pair("general.alignment", F32, b"\0\0\0\1")), "power of two"),
        (gguf(*(number(f"k{n}", n) for n in range(1 << 16))), "keys are not believable"),
        (gguf(*(array(f"k{n}", U32, 8192, bytes(32768)) for n in range(60))), "more than"),
    ],
)
def test_what_came_before_the_damage_is_kept(model: Path, raw: bytes, flaw: str) -> None:
    found = known(model, raw)
    assert flaw in found.flaw
    assert not found.complete
    assert (found.shape.arch, found.shape.layers) == ("llama", 2)


def test_a_tensor_beyond_the_end_of_the_file_is_missing(model: Path) -> None:
    found = known(model, gguf(tensors=(tensor(at=2**40),)))
    assert (found.complete, found.weights_bytes) == (True, 256)
    assert found.missing_bytes >= 2**40


def test_a_tensor_type_from_the_future_weighs_what_the_file_gives_it(model: Path) -> None:
    listed = (tensor("a", kind=900, at=0), tensor("b", kind=901, at=512))
    header = gguf(tensors=listed)
    raw = header + bytes(-len(header) % 32) + bytes(600)
    found = known(model, raw)
    assert [t.n_bytes for t in found.weights.tensors] == [512, 88]
    assert found.weights.kinds == ("TYPE_900", "TYPE_901")


def test_words_in_no_known_script_do_no_harm(model: Path) -> None:
    found = known(
        model,
        gguf(pair(b"\xff\xfe", U32, bytes(4)), pair("general.name", STRING, string(b"\xffa\0b\n"))),
    )
    assert found.complete
    assert found.name == "�ab"


def test_a_shard_count_that_nothing_can_have_is_refused(model: Path) -> None:
    assert read(model, gguf(number("split.count", 2**32 - 1))) is None
    odd = model.with_name("m-00001-of-99999.gguf")
    began = time.process_time()
    odd.write_bytes(gguf(number("split.count", 99999)))
    with pytest.raises(EnvironmentFault, match="m-00002-of-99999"):
        read_gguf(odd)
    assert time.process_time() - began < BOUND_S


def test_millions_of_empty_tokens_take_no_time(model: Path) -> None:
    count = STRINGS_MAX
    found = known(model, gguf(array("tokenizer.ggml.tokens", STRING, count, bytes(8 * count))))
    assert found.shape.vocab == count


def test_a_header_as_large_as_a_model_is_not_read_through(model: Path) -> None:
    step = 1 << 20
    count = 1 << 16
    with model.open("wb") as file:
        file.write(gguf(array("k", STRING, count)))
        for _ in range(HEADER_BYTES_MAX // step + 9):
            file.write(struct.pack("<Q", step - 8))
            file.seek(step - 8, os.SEEK_CUR)
        file.truncate(step * count)
    began = time.process_time()
    found = read_gguf(model)
    assert time.process_time() - began < BOUND_S
    assert "256 MiB is not believable" in found.flaw


def test_a_header_may_be_cut_at_every_byte(model: Path) -> None:
    pairs = (
        pair("general.name", STRING, string("a name")),
        array("llama.attention.head_count_kv", U32, 2, struct.pack("<2I", 4, 8)),
        array("tokenizer.ggml.tokens", STRING, 3, string("a") + string("bc") + string("")),
        array("tokenizer.ggml.scores", F32, 3, bytes(12)),
        number("llama.attention.head_count", 8),
    )
    raw = gguf(*pairs, tensors=(tensor("token_embd.weight"), tensor("blk.1.a", at=256)))
    whole = known(model, raw)
    named = raw.index(b"llama\x11") + 5
    for cut in range(len(raw)):
        found = read(model, raw[:cut])
        if cut < named:
            assert found is None
        else:
            assert found is not None
            assert not found.complete
            assert found.shape.layers in (0, 2)
            assert found.shape.vocab in (None, 2, 3)
    assert (whole.complete, whole.shape.vocab, whole.shape.kv_heads) == (True, 3, (4, 8))


def test_a_large_header_may_be_cut_anywhere(model: Path) -> None:
    raw = next(path for path in HEADERS if path.stem == "qwen36-27b-mtp").read_bytes()
    rng = random.Random(7)
    for _ in range(200):
        cut = rng.randrange(len(raw))
        found = read(model, raw[:cut])
        assert found is None or not found.complete or cut > len(raw) - 64


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """``raw`` with one to four flips, cuts, or numbers that no one wrote."""
    bent = bytearray(raw)
    # Most of a header is its list of tensors: the metadata before it gets its fair share.
    reach = len(bent) if rng.random() < 0.5 else min(len(bent), 1500)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(reach)
        match rng.randrange(5):
            case 0:
                bent[at] ^= 1 << rng.randrange(8)
            case 1:
                bent[at] = rng.randrange(256)
            case 2:
                bent[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case 3:
                bent[at : at + 4] = struct.pack("<Q", rng.choice(EXTREMES))[:4]
            case _:
                if rng.random() < 0.5:
                    del bent[at : at + rng.randint(1, 64)]
                else:
                    bent[at:at] = rng.randbytes(rng.randint(1, 64))
        reach = min(reach, len(bent)) or 1
    return bytes(bent)


def mutations(count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    headers = [path.read_bytes() for path in HEADERS]
    # Each model gets its share of the bytes, not of the turns: that is where the time goes.
    weights = [1 / len(raw) for raw in headers]
    for raw in rng.choices(headers, weights, k=count):
        yield mutated(rng, raw)


def read_mutations(count: int, seed: int) -> tuple[int, float]:
    """Reads ``count`` mutations; how many were refused, and the seconds that the worst took."""
    refused, worst = 0, 0.0
    # A file in memory: making and emptying one on a disk takes longer than reading it.
    path = Path(f"/proc/self/fd/{os.memfd_create('bent.gguf')}")
    for raw in mutations(count, seed):
        began = time.process_time()
        refused += read(path, raw) is None
        worst = max(worst, time.process_time() - began)
    return refused, worst


def peak_mib() -> int:
    # Of this program alone: what getrusage tells is inherited from the parent.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10


def test_ten_thousand_mutations_are_read_in_bounded_time_and_memory() -> None:
    # In a process of its own: the peak of this one belongs to every test before.
    done = subprocess.run(
        [sys.executable, __file__, "10000", "7"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused, worst_s, peak = done.stdout.split()
    assert 0 < int(refused) < 10_000
    assert float(worst_s) < BOUND_S
    assert int(peak) < PEAK_MIB_MAX


if __name__ == "__main__":
    times, first = sys.argv[1:]
    outcome = read_mutations(int(times), int(first))
    sys.stdout.write(f"{outcome[0]} {outcome[1]} {peak_mib()}\n")
