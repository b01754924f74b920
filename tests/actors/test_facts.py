"""What is read of a model file, a GPU and a host that are in order."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from structlog.testing import capture_logs

from kvalet.actors.decisions.plan.devices import MIB
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.facts import read_gguf
from kvalet.actors.facts_gpu import GpuSample, Nvml, parse_smi, read_gpus, visible
from kvalet.actors.facts_host import HostMemory, read_host
from kvalet.protocol.errors import EnvironmentFault

HEADERS = Path(__file__).resolve().parents[1] / "data" / "gguf_headers"
pynvml: Any = importlib.import_module("pynvml")
ALL_HEADERS = sorted(HEADERS.glob("*.gguf"))


def gemma(path: Path, *, tokens: int = 300, tensors: bool = True, **options: Any) -> Path:
    """A small model, as a converter writes it."""
    writer = GGUFWriter(path, "gemma3", **options)
    writer.add_name("Small\x1b[2J one")
    writer.add_string("general.size_label", "1M")
    writer.add_file_type(15)
    writer.add_block_count(3)
    writer.add_uint64("gemma3.context_length", 32768)
    writer.add_embedding_length(64)
    writer.add_uint16("gemma3.attention.head_count", 4)
    writer.add_array("gemma3.attention.head_count_kv", [1, 2, 1])
    writer.add_sliding_window(512)
    writer.add_array("gemma3.attention.sliding_window_pattern", [True, True, False])
    writer.add_token_list([f"token {n}" for n in range(tokens)])
    writer.add_token_scores([0.0] * tokens)
    writer.add_chat_template("{{ messages }}" * 1000)
    if tensors:
        writer.add_tensor("token_embd.weight", np.zeros((tokens, 64), np.float16))
        for layer in range(3):
            writer.add_tensor(f"blk.{layer}.attn_q.weight", np.zeros((64, 64 << layer), np.float16))
            quantised = np.zeros((64, 34 * 2), np.uint8)
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"blk.{layer}.ffn_up_exps.weight", quantised, raw_dtype=kind)
        writer.add_tensor("output_norm.weight", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return gemma(tmp_path / "small.gguf")


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    gemma(tmp_path / "split.gguf", split_max_tensors=3)
    return sorted(tmp_path.glob("split-*.gguf"))


def test_a_model_is_read_as_it_was_written(small: Path) -> None:
    model = read_gguf(small)
    assert model.shape == ModelShape(
        arch="gemma3",
        layers=3,
        context=32768,
        embd=64,
        vocab=300,
        heads=(4, 4, 4),
        kv_heads=(1, 2, 1),
        window=512,
        swa_pattern=(True, True, False),
    )
    assert (model.name, model.size_label, model.quant) == ("Small[2J one", "1M", "Q4_K_M")
    assert model.has_chat_template
    assert not model.is_projector
    assert (model.complete, model.flaw, model.missing_bytes) == (True, "", 0)
    assert (model.paths, model.file_bytes) == ((small,), small.stat().st_size)


def test_every_tensor_weighs_what_the_gguf_package_says(small: Path) -> None:
    weights = read_gguf(small).weights
    reader = GGUFReader(small)
    assert {(t.name, t.kind, t.n_bytes) for t in weights.tensors} == {
        (t.name, t.tensor_type.name, t.n_bytes) for t in reader.tensors
    }
    assert weights.by_layer == (8192 + 4352, 16384 + 4352, 32768 + 4352)
    assert weights.experts_by_layer == (4352, 4352, 4352)
    assert weights.input_bytes == weights.output_bytes == 300 * 64 * 2
    assert weights.is_tied
    assert weights.other_bytes == 256
    assert weights.kinds == ("F16", "Q8_0", "F32")


def test_the_parts_of_a_model_make_up_the_whole() -> None:
    for path in ALL_HEADERS:
        weights = read_gguf(path).weights
        stored = 0 if weights.is_tied else weights.output_bytes
        parts = weights.input_bytes + weights.per_layer_embd_bytes + weights.other_bytes + stored
        assert sum(weights.by_layer) + parts == weights.total_bytes, path.name
        assert weights.other_bytes >= 0


def test_files_that_hold_a_header_only_say_all_but_the_weights() -> None:
    assert len(ALL_HEADERS) > 40
    for path in ALL_HEADERS:
        model = read_gguf(path)
        assert model.complete, path.name
        assert model.shape.layers > 0
        assert model.shape.embd
        assert model.shape.vocab
        assert len(model.weights.by_layer) == model.shape.layers
        assert model.weights_bytes > model.file_bytes
        # Tensors are padded to 32 bytes: what is missing is a little more than they weigh.
        slack = model.missing_bytes - model.weights_bytes
        assert -64 < slack < 64 * model.n_tensors


def test_a_prefix_of_128_kib_is_enough_for_the_shape(tmp_path: Path) -> None:
    whole = gemma(tmp_path / "whole.gguf", tokens=262_144, tensors=False)
    prefix = tmp_path / "prefix.gguf"
    prefix.write_bytes(whole.read_bytes()[: 128 << 10])
    began = time.process_time()
    model = read_gguf(whole)
    assert time.process_time() - began < 1.0
    assert model.shape.vocab == 262_144
    cut = read_gguf(prefix)
    assert not cut.complete
    assert "ends within its header" in cut.flaw
    assert (cut.shape.vocab, cut.shape.kv_heads) == (262_144, (1, 2, 1))
    assert cut.shape.swa_pattern == model.shape.swa_pattern
    assert cut.weights_bytes == 128 << 10


def test_one_file_leaves_nothing_behind_for_the_next(small: Path) -> None:
    read_gguf(HEADERS / "gemma4-e2b.gguf")
    shape = read_gguf(HEADERS / "llama31-8b.gguf").shape
    assert (shape.shared_kv_layers, shape.swa_pattern, shape.window) == (0, None, None)


def test_any_shard_leads_to_the_whole_model(shards: list[Path], small: Path) -> None:
    assert len(shards) == 3
    whole = read_gguf(small)
    for shard in shards:
        model = read_gguf(shard)
        assert model.paths == tuple(shards)
        assert model.shape == whole.shape
        assert model.weights.by_layer == whole.weights.by_layer
        assert model.weights_bytes == whole.weights_bytes
        assert model.file_bytes == sum(path.stat().st_size for path in shards)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_shard_is_named(shards: list[Path], lost: int) -> None:
    shards[lost].unlink()
    with pytest.raises(EnvironmentFault, match=shards[lost].name):
        read_gguf(shards[2 if lost != 2 else 0])


def test_a_shard_that_was_renamed_says_which_name_it_needs(shards: list[Path]) -> None:
    renamed = shards[0].rename(shards[0].with_name("model.gguf"))
    with pytest.raises(EnvironmentFault, match=r"-00001-of-00003\.gguf"):
        read_gguf(renamed)


def test_a_whole_file_that_is_named_like_a_shard_is_whole(small: Path) -> None:
    odd = small.rename(small.with_name("odd-00001-of-00002.gguf"))
    assert read_gguf(odd).paths == (odd,)


def test_a_download_that_broke_off_says_how_much_is_missing(small: Path) -> None:
    small.write_bytes(small.read_bytes()[:-100])
    model = read_gguf(small)
    assert model.complete
    assert 0 < model.missing_bytes <= 100


def test_a_projector_is_told_from_a_model(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_gguf(tmp_path / "mmproj.gguf").is_projector


class FakeMemory:
    def __init__(self, free_mib: int, total_mib: int) -> None:
        self.free = free_mib * MIB
        self.total = total_mib * MIB


Card = FakeMemory | Exception


class FakeNvml:
    """The driver's library with cards of our choice; an error in place of memory is raised."""

    NVMLError: type[Exception] = pynvml.NVMLError

    def __init__(self, cards: Sequence[Card], *, mig: Sequence[int] = ()) -> None:
        self.cards = cards
        self.mig = mig
        self.open = 0
        self.absent: int | None = None

    def nvmlInit(self) -> None:
        if self.absent is not None:
            raise pynvml.NVMLError(self.absent)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"A card"

    def nvmlDeviceGetMigMode(self, device: int) -> list[int]:
        if device not in self.mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> FakeMemory:
        card = self.cards[handle]
        if isinstance(card, Exception):
            raise card
        return card


def fault(code: int) -> Exception:
    refused: Exception = pynvml.NVMLError(code)
    return refused


def test_the_fake_has_every_function_of_the_real_library() -> None:
    assert all(hasattr(pynvml, name) for name in vars(Nvml) if name.startswith("nvml"))


def test_cards_are_read_with_what_is_free_on_them() -> None:
    nvml = FakeNvml([FakeMemory(1000, 24000), FakeMemory(2000, 48000)])
    first, second = read_gpus({}, nvml=nvml)
    assert first == GpuSample(
        index=0, free_mib=1000, total_mib=24000, uuid="GPU-0abc", name="A card"
    )
    assert (second.index, second.free_mib) == (1, 2000)
    assert nvml.open == 0


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_without_a_driver_there_are_no_cards(code: int) -> None:
    nvml = FakeNvml([FakeMemory(1, 2)])
    nvml.absent = code
    assert read_gpus({}, nvml=nvml) == ()


def test_this_machine_can_be_asked() -> None:
    assert isinstance(read_gpus({}), tuple)


def test_a_lost_card_does_not_take_the_others_with_it() -> None:
    nvml = FakeNvml([FakeMemory(1, 2), fault(pynvml.NVML_ERROR_GPU_IS_LOST), FakeMemory(3, 4)])
    with capture_logs() as logs:
        gpus = read_gpus({}, nvml=nvml)
    assert [gpu.index for gpu in gpus] == [0, 2]
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("gpu.skipped", "warning")]


def test_a_partitioned_card_has_an_unknown_total() -> None:
    nvml = FakeNvml([FakeMemory(1000, 80000), FakeMemory(500, 0)], mig=[0])
    assert [gpu.total_mib for gpu in read_gpus({}, nvml=nvml)] == [None, None]


def test_a_card_without_memory_of_its_own_has_the_hosts() -> None:
    cards = [fault(pynvml.NVML_ERROR_NOT_SUPPORTED)]
    host = HostMemory(total=9000 * MIB, available=7000 * MIB)
    (gpu,) = read_gpus({}, host=host, nvml=FakeNvml(cards))
    assert (gpu.free_mib, gpu.total_mib) == (7000, None)
    assert read_gpus({}, nvml=FakeNvml(cards)) == ()


@pytest.mark.parametrize(
    ("setting", "indexes"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("1,-1,2", [1]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("GPU-2abc", [2]),
        ("GPU-1,0", [1, 0]),
        ("GPU-", []),
        ("GPU-ffff,0", []),
        ("MIG-0abc", []),
    ],
)
def test_only_visible_cards_count(setting: str | None, indexes: list[int]) -> None:
    gpus = read_gpus({}, nvml=FakeNvml([FakeMemory(1, 2)] * 3))
    assert [gpu.index for gpu in visible(gpus, setting)] == indexes
    env = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    seen = read_gpus(env, nvml=FakeNvml([FakeMemory(1, 2)] * 3))
    assert [gpu.index for gpu in seen] == indexes


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0, 22000, 24564\n1, 100, 49140\n", [(0, 22000, 24564), (1, 100, 49140)]),
        ("0, 22000\n", [(0, 22000, None)]),
        ("0, 22000, N/A", [(0, 22000, None)]),
        ("0, 22000, [Not Supported]", [(0, 22000, None)]),
        ("0, 22000, 0", [(0, 22000, None)]),
        ("0, 22000 MiB, 24564 MiB", [(0, 22000, 24564)]),
        ("x, 1, 2\n1, N/A, 2\n\n2, 5, 6\nnonsense\n3", [(2, 5, 6)]),
        ("", []),
    ],
)
def test_printed_figures_are_read_line_by_line(
    text: str, gpus: list[tuple[int, int, int | None]]
) -> None:
    with capture_logs():
        found = parse_smi(text)
    assert [(gpu.index, gpu.free_mib, gpu.total_mib) for gpu in found] == gpus


def host(root: Path, **files: str) -> HostMemory:
    """A machine of 1000 KiB, 600 of them available, and ``files`` with / written as __."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 5 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n"
    )
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_host(root)


def test_host_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert host(tmp_path) == HostMemory(total=1000 << 10, available=600 << 10)


def test_a_machine_that_tells_nothing_has_unknown_memory(tmp_path: Path) -> None:
    assert read_host(tmp_path) == HostMemory(total=0, available=0)


def test_a_group_of_our_own_may_allow_less(tmp_path: Path) -> None:
    limited = host(
        tmp_path,
        proc__self__cgroup="0::/outer/inner\n",
        sys__fs__cgroup__outer__memory_dot_max="400000",
        sys__fs__cgroup__outer__memory_dot_current="300000",
        sys__fs__cgroup__outer__memory_dot_stat="anon 1\ninactive_file 250000\n",
        sys__fs__cgroup__outer__inner__memory_dot_max="max\n",
        sys__fs__cgroup__outer__inner__memory_dot_current="1",
    )
    assert limited == HostMemory(total=400000, available=350000)


def test_the_first_kind_of_group_limits_too(tmp_path: Path) -> None:
    limited = host(
        tmp_path,
        proc__self__cgroup="5:cpu,cpuacct:/x\n4:memory:/unseen/from/inside\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="500000",
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes="450000",
        sys__fs__cgroup__memory__memory_dot_stat="total_inactive_file 50000\n",
    )
    assert limited == HostMemory(total=500000, available=100000)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    unlimited = host(
        tmp_path,
        proc__self__cgroup="4:memory:/../..\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712",
    )
    assert unlimited == HostMemory(total=1000 << 10, available=600 << 10)
