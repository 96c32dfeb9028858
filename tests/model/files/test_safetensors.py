"""Files in the safetensors format: the library's own as reference, and files meant to break it."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from urdir.model.errors import ModelError, SafetensorsError
from urdir.model.files.safetensors import read_folder, read_safetensors


def entry(begin: int, end: int, shape: list[Any], dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_bytes(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    """A file; a header that is no bytes is written as JSON."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if size is None else size) + raw + data


def test_agrees_with_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    arrays = {
        "b.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "a": rng.standard_normal(7).astype(np.float16),
        "c": np.arange(12, dtype=np.int64).reshape(1, 2, 6),
        "scalar": np.array(2.0),
    }
    library.save_file(arrays, tmp_path / "m.safetensors", {"format": "pt"})
    read = read_safetensors(tmp_path / "m.safetensors")
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        assert read[name].shape == array.shape
        assert read[name].data[:].tobytes() == array.tobytes()
        assert not read[name].data[:].flags.writeable


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 4976698672\n"
GOOD = {"a": entry(0, 4, [2, 2]), "b": entry(4, 6, [2])}


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"])
def test_every_type_of_the_format_is_read(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"a": entry(0, 8, [1 if dtype == "C64" else 8], dtype)}, b"x" * 8))
    assert read_safetensors(path)["a"].dtype == dtype


def test_tensors_without_values_are_left_out(tmp_path: Path) -> None:
    """Buffers that a class keeps and does not use; an index may list them."""
    found = {"a": entry(0, 2, [2]), "b": entry(2, 2, [0]), "c": entry(2, 2, [3, 0], "BF16")}
    index = {"weight_map": dict.fromkeys(found, "x.safetensors")}
    (tmp_path / "x.safetensors").write_bytes(file_bytes(found, b"ab"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_folder(tmp_path)) == set(read_safetensors(tmp_path / "x.safetensors")) == {"a"}


def test_a_file_made_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(GOOD | {"__metadata__": {"format": "pt"}}, b"abcdef"))
    read = read_safetensors(path)
    assert {name: t.data[:].tobytes() for name, t in read.items()} == {"a": b"abcd", "b": b"ef"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"abc", "3 bytes are not a safetensors file"),
        (file_bytes(GOOD, b"abcdef", size=2**63), "claims a header of 9,223,372,036,854,775,808"),
        (file_bytes(GOOD, b"", size=1000), "claims a header of 1,000 bytes"),
        (file_bytes(b"{", b""), "the header is not JSON"),
        (file_bytes(b"\xff{}", b""), "the header is not JSON"),
        (file_bytes(b"[" * 100_000, b""), "too deeply nested"),
        (file_bytes(b"[]", b""), "the header is not a JSON object"),
        (file_bytes(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "has 'dtype' twice"),
        (
            file_bytes(
                b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
                b"ab",
            ),
            "has 'a' twice",
        ),
        (file_bytes(GOOD, b"abcde"), r"'b' ends at byte \d+, the file at \d+: truncated"),
        (file_bytes(GOOD, b"abcdefg"), "1 bytes belong to no tensor"),
        (file_bytes({"a": entry(0, 4, [4]), "b": entry(3, 5, [2])}, b"abcde"), "'b' overlaps"),
        (file_bytes({"a": entry(0, 4, [4]), "b": entry(5, 6, [1])}, b"abcdef"), "a gap before"),
        (file_bytes({"a": entry(1, 4, [3])}, b"abcd"), "a gap before"),
        (file_bytes({"a": entry(0, 4, [5])}, b"abcd"), "'a' has 4 bytes; U8 of shape .5. has 5"),
        (file_bytes({"a": entry(4, 0, [4])}, b"abcd"), "'a' has -4 bytes"),
        (file_bytes({"a": entry(0, 4, [2**62, 2**62])}, b"abcd"), "'a' has 4 bytes; U8 of shape"),
        (file_bytes({"a": entry(0, 4, [2**63])}, b"abcd"), "'a' has the shape"),
        (file_bytes({"a": entry(0, 1, [0, 4])}, b"a"), "'a' has 1 bytes; U8 of shape"),
        (file_bytes({"a": entry(0, 4, [-4])}, b"abcd"), "'a' has the shape"),
        (file_bytes({"a": entry(0, 1, [True])}, b"a"), "'a' has the shape"),
        (file_bytes({"a": entry(0, 1, [1.0])}, b"a"), "'a' has the shape"),
        (file_bytes({"a": entry(0, 1, [1] * 9)}, b"a"), "'a' has the shape"),
        (file_bytes({"a": entry(0, 4, [4], "F128")}, b"abcd"), "'a' has the unknown dtype 'F128'"),
        (file_bytes({"a": entry(0, 4, [4], ["U8"])}, b"abcd"), "'a' has the unknown dtype"),
        (file_bytes({"a": entry(0, 4, [4]) | {"x": 1}}, b"abcd"), "'a' has other fields"),
        (file_bytes({"a": entry(0, 4, "\x1b[31m")}, b"abcd"), r"the shape '\\x1b\[31m'"),
        (file_bytes({"a": entry(0, 4, [4]) | {"data_offsets": "\0"}}, b"abcd"), r"offsets '\\x00'"),
        (file_bytes({"a": [1]}, b"abcd"), "'a' has other fields"),
        (file_bytes({"": entry(0, 4, [4])}, b"abcd"), "no printable name"),
        (file_bytes({"a\nb": entry(0, 4, [4])}, b"abcd"), "no printable name"),
        (file_bytes({"model." * 10**5: entry(0, 4, [4])}, b"abcd"), "600,000 characters of a name"),
        (file_bytes({"__metadata__": 3}), "__metadata__ is not an object"),
        (LFS, "a Git LFS pointer.* in its place: run 'git lfs pull'"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorsError, match=message) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_byte_never_crashes(tmp_path_factory: Any, data: st.DataObject) -> None:
    content = bytearray(file_bytes(GOOD, b"abcdef"))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / "x.safetensors"
    path.write_bytes(content)
    try:
        read = read_safetensors(path)
    except ModelError:
        return
    assert sum(len(tensor.data) for tensor in read.values()) == 6


def _folder(path: Path, index: object, **files: dict[str, Any]) -> Path:
    for name, header in files.items():
        (path / f"{name}.safetensors").write_bytes(file_bytes(header, b"abcdef"[: len(header) * 2]))
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_file_that_changes_while_it_is_open(tmp_path: Path) -> None:
    raw, path = file_bytes(GOOD, b"abcdef"), tmp_path / "changing.safetensors"
    for change in (raw[:10], raw[:-1], raw + b"more", raw[:-1] + b"!"):
        path.write_bytes(raw)
        os.utime(path, ns=(1, 1))
        tensor = read_safetensors(path)["b"]
        assert tensor.data[:].tobytes() == b"ef"
        path.write_bytes(change)
        with pytest.raises(SafetensorsError, match="was changed while it was in use"):
            _ = tensor.data[:]


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: b'{"a":[' + b"[]," * 3_000_000 + b"0]}", 6_000_004),
        (lambda: b'{"a":[' + b'{"":0},' * 1_500_000 + b"0]}", 4_500_004),
        (lambda: b"{" + b",".join(b'"%x":0' % n for n in range(2_200_000)) + b"}", 4_400_001),
    ],
)
def test_more_values_than_any_header_has(
    tmp_path: Path, make: Callable[[], bytes], values: int
) -> None:
    """Lists of nothing take 25 times their size, and three seconds for ten megabytes."""
    path = tmp_path / "m.safetensors"
    body = make()
    path.write_bytes(file_bytes(body))
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(SafetensorsError, match=f"the header: {values:,} keys and values"):
            read_safetensors(path)
        assert time.process_time() - begin < 1.0
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


def test_one_of_several_files_without_an_index_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {}, x={"a": entry(0, 2, [2])})
    (folder / "model.safetensors.index.json").unlink()
    (folder / "x.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    with pytest.raises(SafetensorsError, match="is one of 3 files: download the others"):
        read_folder(folder)
    whole = folder / "model-00001-of-00001.safetensors"
    (folder / "model-00001-of-00003.safetensors").rename(whole)
    assert list(read_folder(folder)) == ["a"]


def test_an_index_of_two_files(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    folder = _folder(tmp_path, index, x={"a": entry(0, 2, [2])}, y={"b": entry(0, 2, [2])})
    assert set(read_folder(folder)) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "no weight_map"),
        ({}, "no weight_map"),
        ({"a": "../x.safetensors"}, "'../x.safetensors' is not the name of a file"),
        ({"a": "/etc/passwd"}, "'/etc/passwd' is not the name of a file"),
        ({"a": "..\\x.safetensors"}, "is not the name of a file"),
        ({"a": "x.bin"}, "'x.bin' is not the name of a file"),
        ({"a": 3}, "'3' is not the name of a file"),
        ({"a": ["x.safetensors"]}, "is not the name of a file"),
        (
            {"a": "x.safetensors", "c": "z.safetensors", "d": "w.safetensors"},
            r"2 of the 3 files that it lists are missing: w\.safetensors, z\.safetensors",
        ),
        ({"a": "x.safetensors"}, "tensor 'b' of x.safetensors is not listed"),
        ({"a": "x.safetensors", "b": "y.safetensors"}, "tensor 'b' of x.safetensors is not listed"),
        (
            {"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"},
            "x.safetensors: tensor 'c' is missing",
        ),
    ],
)
def test_bad_indices(tmp_path: Path, weight_map: object, message: str) -> None:
    both = {"a": entry(0, 2, [2]), "b": entry(2, 4, [2])}
    folder = _folder(tmp_path, {"weight_map": weight_map}, x=both, y={"b": entry(0, 2, [2])})
    with pytest.raises(SafetensorsError, match=message):
        read_folder(folder)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    both = {"a": entry(0, 2, [2]), "b": entry(2, 4, [2])}
    folder = _folder(tmp_path, index, x={"a": entry(0, 2, [2])}, y=both)
    with pytest.raises(SafetensorsError, match=r"'a' also occurs in x\.safetensors"):
        read_folder(folder)


def test_a_whole_file_comes_before_an_index(tmp_path: Path) -> None:
    """As in transformers: the index of a folder that was saved again in one file is stale."""
    index = {"weight_map": {"a": "gone.safetensors"}}
    folder = _folder(tmp_path, index, model={"b": entry(0, 2, [2])})
    assert set(read_folder(folder)) == {"b"}


def test_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(SafetensorsError, match=r": no file ends in \.safetensors$"):
        read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SafetensorsError, match=r"of PyTorch, which is not read: save it with"):
        read_folder(tmp_path)
    (tmp_path / "any.safetensors").write_bytes(file_bytes(GOOD, b"abcdef"))
    assert set(read_folder(tmp_path)) == {"a", "b"}
    (tmp_path / "more.safetensors").write_bytes(file_bytes(GOOD, b"abcdef"))
    with pytest.raises(SafetensorsError, match=r"index\.json, but 2 others"):
        read_folder(tmp_path)
