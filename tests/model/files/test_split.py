"""Models in several GGUF files: those that the gguf package splits, and parts that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from urdir.model.errors import GgufError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf

Parts = Callable[..., list[Path]]


def split_gguf(source: Path, target: Path, tensors_each: int, small_first: bool) -> list[Path]:
    """Write ``source`` anew as parts of at most that many tensors; their paths."""
    read = reference.GGUFReader(source)
    writer = reference.GGUFWriter(
        target, "llama", split_max_tensors=tensors_each, small_first_shard=small_first
    )
    for field in read.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, *inner[:1])
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(target.parent.glob(f"{target.stem}-*-of-*.gguf"))


@pytest.mark.parametrize(("tensors_each", "small_first"), [(7, False), (11, True)])
def test_any_part_opens_the_whole_model(
    data: Path, tmp_path: Path, tensors_each: int, small_first: bool
) -> None:
    whole = Gguf(data / "golden" / "nano-llama-q4_k_m.gguf")
    parts = split_gguf(whole.path, tmp_path / "m.gguf", tensors_each, small_first)
    assert len(parts) == -(-len(whole.tensors) // tensors_each) + small_first > 2
    for part in parts:
        gguf = Gguf(part)
        assert gguf.path == parts[0]
        assert gguf.nbytes == sum(path.stat().st_size for path in parts)
        assert list(gguf.tensors) == list(whole.tensors)
        for name, tensor in whole.tensors.items():
            ours = gguf.tensors[name]
            assert (ours.shape, ours.type_id) == (tensor.shape, tensor.type_id)
            assert np.array_equal(ours.data[:], tensor.data[:])
        assert Config.of(gguf) == Config.of(whole)
        values = {key: whole.metadata[key] for key in whole.metadata}
        for key, value in values.items():
            assert np.array_equal(gguf.metadata[key], value), key


def test_a_missing_part_is_named(data: Path, tmp_path: Path) -> None:
    parts = split_gguf(data / "golden" / "nano-llama-q8_0.gguf", tmp_path / "m.gguf", 7, False)
    parts[1].unlink()
    with pytest.raises(GgufError, match=rf"{parts[1].name} of the model's {len(parts)} parts"):
        Gguf(parts[2])
    parts[2].unlink()
    with pytest.raises(GgufError, match=rf"{parts[1].name} and 1 more of the model's"):
        Gguf(parts[0])


@pytest.fixture
def make_parts(make_gguf: Callable[..., Path], tmp_path: Path) -> Parts:
    """Writes parts of the given metadata, with one tensor each, under the names of parts."""

    def make(*metadata: dict[str, Any], tensors: str = "abcdefg") -> list[Path]:
        paths = []
        for number, keys in enumerate(metadata):
            made = make_gguf(keys, {tensors[number]: (0, (1,), b"\0" * 4)})
            path = tmp_path / f"x-{number + 1:05d}-of-{len(metadata):05d}.gguf"
            paths.append(made.rename(path))
        return paths

    return make


def _keys(number: int, count: int = 2, tensors: int = 2, **more: Any) -> dict[str, Any]:
    keys = {"split.no": number, "split.count": count, "split.tensors.count": tensors}
    return keys | {key.replace("_", "."): value for key, value in more.items()}


def test_parts_made_by_hand(make_parts: Parts) -> None:
    parts = make_parts(_keys(0, general_architecture="llama"), _keys(1))
    with Gguf(parts[1]) as gguf:
        assert (list(gguf.tensors), gguf.architecture) == (["a", "b"], "llama")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (_keys(0), _keys(0), r"00002-of-00002.gguf: split.no is 0, expected 1"),
        (_keys(0), _keys(1, count=3), r"00002-of-00002.gguf: split.count is 3, expected 2"),
        (_keys(0), {"a": 1}, r"00002-of-00002.gguf: metadata key 'split.no' is missing"),
        (_keys(0), _keys(1, tensors=9), r"split.tensors.count is 9, expected 2"),
        (_keys(0, tensors=3), _keys(1, tensors=3), r"hold 2 tensors, split.tensors.count says 3"),
        (_keys(2), _keys(1), r"split.no is 2 of split.count 2"),
        (_keys(-1), _keys(1), r"split.no is -1 of split.count 2"),
        (_keys(0, count=3), _keys(1), r"its name must end in '-00001-of-00003.gguf'"),
        (_keys(1), _keys(0), r"its name must end in '-00002-of-00002.gguf'"),
        (
            _keys(0, general_architecture="llama"),
            _keys(1, general_architecture="qwen2"),
            r"00002-of-00002.gguf: general.architecture is 'qwen2', that of x-00001-of-00002.gguf "
            r"'llama'",
        ),
    ],
)
def test_parts_that_do_not_fit(
    make_parts: Parts, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    parts = make_parts(first, second)
    with pytest.raises(GgufError, match=message):
        Gguf(parts[0])


def test_a_tensor_in_two_parts(make_parts: Parts) -> None:
    parts = make_parts(_keys(0), _keys(1), tensors="aa")
    with pytest.raises(GgufError, match=r"tensor 'a' also occurs in x-00001-of-00002.gguf"):
        Gguf(parts[0])


def test_a_part_under_another_name(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf({"split.no": 1, "split.count": 3})
    with pytest.raises(GgufError, match=r"part 2 .* must end in '-00002-of-00003.gguf'"):
        Gguf(path)
    assert Gguf(make_gguf({"split.no": 0, "split.count": 1})).tensors == {}
