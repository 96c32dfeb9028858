"""The GGUF reader against the gguf package's own, and against files meant to break it."""

from __future__ import annotations

import itertools
import os
import random
import struct
import time
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from urdir.model.errors import GgufError, ModelError, UnsupportedError
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import StringArray

Maker = Callable[..., Path]
F32, Q4_K = 0, 12


def _contents(value: object) -> object:
    return list(value) if isinstance(value, StringArray | np.ndarray) else value


@pytest.mark.parametrize("name", ["nano-llama-q4_k_m", "nano-llama-f16", "llama-dense"])
def test_agrees_with_the_gguf_package(reference_file: Callable[[str], Path], name: str) -> None:
    path = reference_file(name)
    expected = reference.GGUFReader(path)
    with Gguf(path) as gguf:
        assert gguf.version == 3
        assert [tensor.name for tensor in expected.tensors] == list(gguf.tensors)
        for tensor in expected.tensors:
            ours = gguf.tensors[tensor.name]
            assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
            assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert ours.type_name == tensor.tensor_type.name
            assert ours.data[:].tobytes() == tensor.data.tobytes()
            assert not ours.data[:].flags.writeable
        assert repr(gguf) == f"<Gguf {str(path)!r}, {len(expected.tensors)} tensors>"
        for key, value in gguf.metadata.items():
            assert _contents(value) == expected.fields[key].contents()


def test_reads_every_value_type_that_the_gguf_package_writes(tmp_path: Path) -> None:
    types = reference.GGUFValueType
    scalars = {
        types.UINT8: 250, types.INT8: -3, types.UINT16: 65000, types.INT16: -30000,
        types.UINT32: 4_000_000_000, types.INT32: -5, types.FLOAT32: 0.5, types.BOOL: True,
        types.STRING: "héllo", types.UINT64: 2**63, types.INT64: -(2**62), types.FLOAT64: 1e300,
    }  # fmt: skip
    writer = reference.GGUFWriter(tmp_path / "types.gguf", "llama")
    for value_type, value in scalars.items():
        writer.add_key_value(f"one.{value_type.name}", value, value_type)
        writer.add_key_value(f"many.{value_type.name}", [value] * 3, types.ARRAY, value_type)
    for step in (
        writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
        writer.close,
    ):  # fmt: skip
        step()
    metadata = Gguf(tmp_path / "types.gguf").metadata
    for value_type, value in scalars.items():
        assert metadata[f"one.{value_type.name}"] == value
        assert type(metadata[f"one.{value_type.name}"]) is type(value)
        assert _contents(metadata[f"many.{value_type.name}"]) == [value] * 3


def test_nested_and_empty_arrays(make_gguf: Maker) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 7, 8)
    nested = struct.pack("<IQ", 9, 2) + inner + struct.pack("<IQ", 4, 0)
    metadata = Gguf(make_gguf({"nested": (9, nested), "none": [], "end": 1})).metadata
    assert [list(row) for row in metadata["nested"]] == [[7, 8], []]  # type: ignore[union-attr]
    assert list(metadata["none"]) == []  # type: ignore[arg-type]
    assert metadata["end"] == 1


def test_version_2_is_read_like_version_3(data: Path, tmp_path: Path) -> None:
    raw = bytearray((data / "golden" / "nano-llama-q4_k_m.gguf").read_bytes())
    raw[4] = 2
    (tmp_path / "v2.gguf").write_bytes(raw)
    gguf = Gguf(tmp_path / "v2.gguf")
    assert gguf.version == 2
    assert len(gguf.tensors) == 21


def test_string_arrays_of_any_bytes() -> None:
    """As Python decodes each string alone: broken characters at its end, NULs, long and empty."""
    rnd = random.Random(6)
    alphabet = [b"a", b"\xe4", b"\xb8\x96", b"\xf0\x9f", b"\0", "é世😀".encode(), b"\xff" * 300]
    for with_nul in (False, True):
        for _ in range(60):
            usable = [part for part in alphabet if with_nul or part != b"\0"]
            raw = [b"".join(rnd.choices(usable, k=rnd.randint(0, 4))) for _ in range(9)]
            stored = b"before" + b"".join(struct.pack("<Q", len(s)) + s for s in raw)
            ends = array("Q", itertools.accumulate((8 + len(s) for s in raw), initial=6))[1:]
            strings = StringArray(memoryview(stored), 6, ends)
            expected = [s.decode("utf-8", "replace") for s in raw]
            assert strings.decoded() == expected
            assert [strings[i] for i in range(9)] == expected
            assert strings.longest == max(map(len, raw))
            for char in "abc":
                lacking = [i for i, text in enumerate(raw) if char.encode() not in text]
                assert strings.first_without(char) == (lacking[0] if lacking else None)
    assert StringArray(memoryview(b""), 0, array("Q")).decoded() == []
    assert StringArray(memoryview(b""), 0, array("Q")).longest == 0
    assert StringArray(memoryview(b""), 0, array("Q")).first_without("a") is None


def test_string_arrays_behave_like_lists(make_gguf: Maker) -> None:
    texts = ["", "a", "日本", "<0x0A>", "x" * 1000]
    strings = Gguf(make_gguf({"s": texts})).metadata["s"]
    assert isinstance(strings, StringArray)
    assert list(strings) == texts
    assert [strings[i] for i in range(-5, 5)] == [*texts, *texts]
    assert strings[1:4] == texts[1:4]
    assert "日本" in strings
    with pytest.raises(IndexError):
        strings[5]


def test_bytes_that_are_no_utf8_do_not_stop_the_reader(make_gguf: Maker) -> None:
    raw = struct.pack("<IQQ", 8, 1, 2) + b"\xff!"
    metadata = Gguf(make_gguf({"s": (8, struct.pack("<Q", 1) + b"\xff"), "a": (9, raw)})).metadata
    assert metadata["s"] == "�"
    assert list(metadata["a"]) == ["�!"]  # type: ignore[arg-type]


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment_of_the_file(tmp_path: Path, alignment: int) -> None:
    writer = reference.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(alignment)
    arrays = {name: np.arange(n, dtype=np.float32) for name, n in (("a", 3), ("b", 5), ("c", 1))}
    for name, numbers in arrays.items():
        writer.add_tensor(name, numbers)
    for step in (
        writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
        writer.close,
    ):  # fmt: skip
        step()
    gguf = Gguf(tmp_path / "aligned.gguf")
    assert gguf.alignment == alignment
    for name, numbers in arrays.items():
        assert gguf.tensors[name].data[:].view(np.float32).tolist() == numbers.tolist()


def test_tensors_outlive_the_file_object(data: Path) -> None:
    with Gguf(data / "golden" / "nano-llama-q2_k.gguf") as gguf:
        norm = gguf.tensors["output_norm.weight"].data
        expected = norm[:].tobytes()
    gguf.close()
    assert norm[:].tobytes() == expected
    assert not gguf.tensors


def test_a_large_vocabulary_loads_fast(vocab_file: Callable[[str], Path]) -> None:
    path = vocab_file("qwen2")  # 151,936 tokens and 151,387 merges
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        tokens = list(Gguf(path).metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
        best = min(best, time.process_time() - started)
    assert len(tokens) == 151_936
    assert best < 0.5  # 0.06 s on an idle core; the gguf package takes 5 s


# ---- files that are none, or broken ones ---------------------------------------------------------


def _refused(path: Path, error: type[ModelError] = GgufError) -> str:
    with pytest.raises(error) as caught:
        Gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_no_such_file(tmp_path: Path) -> None:
    assert "no such file" in _refused(tmp_path / "missing.gguf")


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to("../blobs/1f")
    assert "a link to ../blobs/1f, which does not exist" in _refused(tmp_path / "link.gguf")


def test_a_directory(tmp_path: Path) -> None:
    assert "a directory" in _refused(tmp_path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        assert "not a regular file" in _refused(tmp_path / "pipe")
    finally:
        os.close(writer)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    assert "Permission denied" in _refused(path)


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"", GgufError, "empty"),
        (b"PK\x03\x04" + b"\0" * 100, GgufError, "not a GGUF file"),
        (b"GG", GgufError, "not a GGUF file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 4976698672\n",
            GgufError,
            "a Git LFS pointer",
        ),
        (b"GGUF\x03", GgufError, "ends within the header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedError, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), UnsupportedError, "version 4"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), UnsupportedError, "version 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedError, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), GgufError, "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), GgufError, "metadata keys"),
    ],
)
def test_what_is_no_gguf_file(
    tmp_path: Path, raw: bytes, error: type[ModelError], message: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    assert message in _refused(path, error)


def test_the_start_of_a_header_that_goes_on(make_gguf: Maker) -> None:
    """More than is read at first, cut at any place of it."""
    for extra in range(0, 90, 7):
        text = "x" * ((1 << 20) - 60 + extra)
        with Gguf(make_gguf({"a": text, "b": np.arange(9, dtype="<u8"), "c": ["d", "e"]})) as gguf:
            assert gguf.metadata["a"] == text
            assert _contents(gguf.metadata["b"]) == list(range(9))
            assert _contents(gguf.metadata["c"]) == ["d", "e"]


def test_strings_that_are_read_further_and_further(make_gguf: Maker) -> None:
    """A header of 5 MB is read in three goes: one walk over the lengths, whatever they are."""
    rng = random.Random(3)
    texts = ["x" * rng.choice([0, 1, 7, 300]) for _ in range(60_000)]
    with Gguf(make_gguf({"s": texts, "after": 5})) as gguf:
        assert _contents(gguf.metadata["s"]) == texts
        assert gguf.metadata["after"] == 5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((8, struct.pack("<Q", 2**64 - 1) + b"abc"), "'k'"),  # a string longer than the file
        ((9, struct.pack("<IQ", 4, 2**62)), "items in metadata key 'k'"),
        ((9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2**64 - 9)), "'k'"),
        ((9, struct.pack("<IQ", 8, 2) + struct.pack("<Q", 2**63) + b"x" * 20), "'k'"),
        ((9, struct.pack("<IQ", 9, 1) * 40), "5 levels of arrays, at most 4"),
        ((9, struct.pack("<IQ", 9, 4097) + struct.pack("<IQ", 0, 0) * 4097), "arrays within"),
        (
            (
                9,
                struct.pack("<IQ", 9, 64)
                + (struct.pack("<IQ", 9, 64) + struct.pack("<IQ", 0, 0) * 64) * 64,
            ),
            "4,097 arrays within arrays",
        ),
        ((9, struct.pack("<IQ", 0, (4 << 20) + 1) + b"\0" * ((4 << 20) + 1)), "items of an array"),
        ((8, struct.pack("<Q", (64 << 20) + 1) + b"\0" * ((64 << 20) + 1)), "bytes of a string"),
        ((9, struct.pack("<IQ", 13, 0) + b"\0" * 12), "type 13"),  # empty, but of no known type
        ((9, struct.pack("<IQ", 13, 1) + b"\0" * 12), "type 13"),
        ((77, b""), "value type 77"),
    ],
)
def test_bad_metadata_values(make_gguf: Maker, value: object, message: str | None) -> None:
    path = make_gguf({"k": value})
    if message is None:
        assert Gguf(path).metadata["k"] == []
    else:
        assert message in _refused(path)


def test_bad_keys(tmp_path: Path) -> None:
    def file(*keys: bytes) -> Path:
        path = tmp_path / "keys.gguf"
        entries = [struct.pack("<Q", len(key)) + key + struct.pack("<IB", 0, 1) for key in keys]
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(entries))
        return path

    assert "'a.b' occurs twice" in _refused(file(b"a.b", b"c", b"a.b"))
    assert "not UTF-8" in _refused(file(b"\xff"))
    assert "unprintable" in _refused(file(b"a\nb"))
    assert "empty metadata key" in _refused(file(b""))


@pytest.mark.parametrize("alignment", [0, 24, 33])
def test_bad_alignment(make_gguf: Maker, alignment: int) -> None:
    assert "not a power of two" in _refused(make_gguf({"general.alignment": alignment}))


@pytest.mark.parametrize("value", ["32", -32, (10, struct.pack("<Q", 32))])
def test_alignment_must_be_a_u32(make_gguf: Maker, value: object) -> None:
    assert "general.alignment has value type" in _refused(make_gguf({"general.alignment": value}))


def test_alignment_is_limited(make_gguf: Maker) -> None:
    assert "bytes of alignment" in _refused(make_gguf({"general.alignment": 2 << 20}))


def _tensor_file(tmp_path: Path, *infos: bytes, data: int = 4096) -> Path:
    path = tmp_path / "tensors.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos)
    path.write_bytes(header + b"\0" * (-len(header) % 32) + b"\0" * data)
    return path


def _info(name: str, dims: tuple[int, ...], type_id: int = F32, offset: int = 0) -> bytes:
    raw = name.encode()
    return (
        struct.pack("<Q", len(raw)) + raw
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", type_id, offset)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("info", "error", "message"),
    [
        (_info("w", ()), GgufError, "'w' has 0 dimensions"),
        (_info("w", (1, 1, 1, 1, 1)), GgufError, "'w' has 5 dimensions"),
        (_info("w", (4, 0)), GgufError, "'w' has an empty dimension"),
        (_info("w", (1024,)), None, ""),
        (_info("w", (1025,)), GgufError, "'w' ends at byte"),
        (_info("w", (2**40, 2**40)), GgufError, "'w' ends at byte"),  # 2^82 overflows 64 bits
        (_info("w", (2**63, 2)), GgufError, "'w' ends at byte"),
        (_info("w", (4,), offset=2**64 - 32), GgufError, "'w' starts at offset"),
        (_info("w", (4,), offset=16), GgufError, "'w' starts at offset 16, expected 0"),
        (_info("w", (4,), offset=4096), GgufError, "'w' starts at offset 4,096, expected 0"),
        (_info("w", (256, 28), Q4_K), None, ""),
        (_info("w", (256, 29), Q4_K), GgufError, "'w' ends at byte"),
        (_info("w", (128, 2), Q4_K), GgufError, "'w' has rows of 128"),
        (_info("w", (4,), type_id=99), UnsupportedError, "'w' has unknown type 99"),
        (_info("w", (4,), type_id=4), UnsupportedError, "'w' has unknown type 4"),  # Q4_2, removed
        (_info("", (4,)), GgufError, "empty tensor name"),
        (_info("w" * 63, (1025,)), GgufError, "ends at byte"),
        (_info("w" * 64, (4,)), GgufError, "64 bytes of a tensor name, at most 63"),
        (struct.pack("<Q", 2**60), GgufError, "the tensor list"),
    ],
)
def test_bad_tensors(
    tmp_path: Path, info: bytes, error: type[ModelError] | None, message: str
) -> None:
    path = _tensor_file(tmp_path, info)
    if error is None:
        assert Gguf(path).tensors["w"].nbytes <= 4096
    else:
        assert message in _refused(path, error)


def test_a_tensor_name_twice(tmp_path: Path) -> None:
    path = _tensor_file(tmp_path, _info("w", (4,)), _info("v", (4,), offset=32), _info("w", (4,)))
    assert "tensor 'w' occurs twice" in _refused(path)


@pytest.mark.parametrize(
    "offset",
    [0, 32, 96],  # over the one before, within it, with a gap
)
def test_tensors_lie_one_after_the_other(tmp_path: Path, offset: int) -> None:
    path = _tensor_file(tmp_path, _info("v", (16,)), _info("w", (4,), offset=offset))
    message = f"tensor 'w' starts at offset {offset}, expected 64"
    assert message in _refused(path)
    path = _tensor_file(tmp_path, _info("v", (13,)), _info("w", (4,), offset=64))
    assert Gguf(path).tensors["w"].offset - Gguf(path).tensors["v"].offset == 64


@pytest.mark.slow
def test_small_files_take_little(tmp_path: Path, make_gguf: Maker) -> None:
    """What the header counts costs no more than a few times its bytes, and no time."""
    infos = [_info(f"{i:05d}", (1,), offset=32 * i) for i in range(32_768)]
    nested = struct.pack("<IQ", 9, 4096) + struct.pack("<IQ", 0, 0) * 4096
    files = {
        "tensors": _tensor_file(tmp_path, *infos[:8192], data=32 << 13).read_bytes(),
        "too many": _tensor_file(tmp_path, *infos, _info("w", (1,))).read_bytes(),
        "nested": make_gguf({"general.architecture": (9, nested)}).read_bytes(),
        "keys": make_gguf({f"{i}": True for i in range(4096)}).read_bytes(),
        "strings": make_gguf({"s": [""] * (1 << 18)}).read_bytes(),
    }
    path = tmp_path / "small.gguf"
    for name, raw in files.items():
        path.write_bytes(raw)
        tracemalloc.start()
        started = time.process_time()
        try:
            with Gguf(path) as gguf:
                with pytest.raises(ModelError) as caught:
                    _ = gguf.architecture
                assert len(str(caught.value)) < 300 + len(str(path))
                assert name != "too many"
        except GgufError:
            assert name == "too many"
        seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10 * len(raw) + (32 << 20), name
        assert seconds < 10, name  # traced; 0.3 s without


def test_a_file_that_changes_while_it_is_open(data: Path, tmp_path: Path) -> None:
    raw = (data / "golden" / "nano-llama-q2_k.gguf").read_bytes()
    path = tmp_path / "changing.gguf"
    for change in (raw[:5000], raw[:-1], raw + b"more", raw[:-1] + b"!"):
        path.write_bytes(raw)
        os.utime(path, ns=(1, 1))
        with Gguf(path) as gguf:
            tensor = list(gguf.tensors.values())[-1]
            assert tensor.data[:].tobytes() == raw[tensor.offset : tensor.offset + tensor.nbytes]
            path.write_bytes(change)
            with pytest.raises(GgufError, match="was changed while it was in use"):
                _ = tensor.data[:]
    path.write_bytes(raw)
    with Gguf(path) as gguf:  # the name now means another file, which does no harm
        (tmp_path / "new").write_bytes(b"other")
        os.replace(tmp_path / "new", path)
        tensor = list(gguf.tensors.values())[-1]
        assert tensor.data[:].tobytes() == raw[tensor.offset : tensor.offset + tensor.nbytes]


def test_every_truncation_is_noticed(data: Path, tmp_path: Path) -> None:
    raw = (data / "golden" / "nano-llama-q2_k.gguf").read_bytes()
    header = Gguf(data / "golden" / "nano-llama-q2_k.gguf").tensors["token_embd.weight"].offset
    path = tmp_path / "cut.gguf"
    for length in itertools.chain(range(1, header, 7), (header, len(raw) // 2, len(raw) - 1)):
        path.write_bytes(raw[:length])
        _refused(path)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(4, 1700), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_changed_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    golden = Path(__file__).parent.parent.parent / "data" / "golden" / "nano-llama-q2_k.gguf"
    raw = bytearray(golden.read_bytes())
    for place, byte in changes:
        raw[place] = byte
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(raw)
    try:
        gguf = Gguf(path)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert all(len(tensor.data) == tensor.nbytes for tensor in gguf.tensors.values())
