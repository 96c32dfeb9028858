"""Files of prefixes: written and read back, and refused if they are of something else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from urdir.model.errors import PrefixFileError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.prefix_copy import PrefixBytes
from urdir.model.memory.prefix_files import _MAGIC, PrefixFiles, layout_digest, model_digest
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

RNG = np.random.default_rng(2)
TOKENS = tuple(int(token) for token in RNG.integers(0, 1 << 20, 37))
ARRAYS = [RNG.integers(0, 256, shape, np.uint8) for shape in ((3, 16), (2, 7), (5,))]
PREFIX = PrefixBytes(TOKENS, ARRAYS)


def shapes(tokens: int) -> list[tuple[int, ...]]:
    return [(-(-tokens // 16), 16), (2, 7), (5,)]


def files(folder: Path, model: str = "m", layout: str = "l", cache: str = "f16") -> PrefixFiles:
    return PrefixFiles(folder, lambda: model, layout, cache)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """In place of what was there; nothing else is left in the folder, and nobody else reads it."""
    saved = files(tmp_path)
    saved.write("a.bin", PrefixBytes((), []))
    nbytes = saved.write("a.bin", PREFIX)
    assert nbytes == (tmp_path / "a.bin").stat().st_size > PREFIX.nbytes
    assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["a.bin"]
    found, read = files(tmp_path).read("a.bin", shapes, 37)
    assert (found.tokens, read) == (TOKENS, nbytes)
    for array, wanted in zip(found.arrays, ARRAYS, strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "../a",
        "/etc/passwd",
        ".a",
        "-a",
        "a\0b",
        "a\nb",
        "ä",
        "a" * 201,
        "a\\b",
    ],
)
def test_names_that_may_be_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    saved = files(tmp_path / "inner")
    (tmp_path / "inner").mkdir()
    for act in (lambda: saved.write(name, PREFIX), lambda: saved.read(name, shapes, 99)):
        with pytest.raises(PrefixFileError, match="expected letters, digits"):
            act()
    assert os.listdir(tmp_path) == ["inner"]
    assert os.listdir(tmp_path / "inner") == []


def test_links_and_others_are_not_followed(tmp_path: Path) -> None:
    """A link is replaced by a write, and what it leads to is as before."""
    saved, other = files(tmp_path), tmp_path / "other"
    files(tmp_path).write("other", PREFIX)
    before = other.read_bytes()
    (tmp_path / "link").symlink_to(other)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    files_before = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    for name in ("link", "pipe", "folder", "missing"):
        with pytest.raises(PrefixFileError, match=f"^'{name}' "):
            saved.read(name, shapes, 99)
    if sys.platform == "linux":
        assert os.listdir("/proc/self/fd") == files_before
    saved.write("link", PrefixBytes((), []))
    assert other.read_bytes() == before
    with pytest.raises(PrefixFileError, match="'folder' in the folder of prefixes: Is a directory"):
        saved.write("folder", PREFIX)
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "other", "pipe"]


def changed(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        copy = bytearray(data)
        copy[at] ^= 1
        return bytes(copy)

    return change


def with_header(**fields: Any) -> Callable[[bytes], bytes]:
    """Other fields of the header, of any length."""

    def change(data: bytes) -> bytes:
        start = len(_MAGIC) + 4
        length = int.from_bytes(data[len(_MAGIC) : start], "little")
        header = json.dumps({**json.loads(data[start : start + length]), **fields}).encode()
        return _MAGIC + len(header).to_bytes(4, "little") + header + data[start + length :]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is not a file of a prefix"),
        (lambda data: data[:30], "is not a file of a prefix"),
        (changed(3), "is not a file of a prefix"),
        (lambda data: _MAGIC + b"\xff\xff\xff\x7f" + data, "is not a file of a prefix"),
        (lambda data: _MAGIC + b"\x02\0\0\0[]", "is not a file of a prefix"),
        (lambda data: _MAGIC + b"\x02\0\0\0\xff\xff", "is not a file of a prefix"),
        (lambda data: _MAGIC + b"\0\x10\0\0" + b"[" * 4096, "is not a file of a prefix"),
        (with_header(model="x"), "is of another model: 'x', not 'm'"),
        (with_header(cache="q8_0"), "is of another cache: 'q8_0', not 'f16'"),
        (with_header(layout=None), "is of another layout: 'None', not 'l'"),
        (with_header(tokens=100), "has 100 tokens: 1 to 99 fit"),
        (with_header(tokens=-1), "has -1 tokens"),
        (with_header(tokens=0), "has 0 tokens"),
        (with_header(tokens=True), "has True tokens"),
        (with_header(tokens=36), "is cut off, or has something else"),
        (lambda data: data[:-1], "is cut off, or has something else"),
        (lambda data: data + b"x", "is cut off, or has something else"),
        (changed(-1), "was changed since it was written"),
        (changed(-60), "was changed since it was written"),
        (with_header(content=7), "was changed since it was written"),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    saved = files(tmp_path)
    saved.write("a", PREFIX)
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(change(data))
    with pytest.raises(PrefixFileError, match=message):
        saved.read("a", shapes, 99)


def test_any_change_of_a_byte_is_found(tmp_path: Path) -> None:
    saved = files(tmp_path)
    saved.write("a", PREFIX)
    data = (tmp_path / "a").read_bytes()
    for at in range(len(data)):
        (tmp_path / "a").write_bytes(changed(at - len(data))(data))
        with pytest.raises(PrefixFileError):
            saved.read("a", shapes, 99)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(PrefixFileError, match="'a' in the folder of prefixes: No such file"):
        files(tmp_path / "none").write("a", PREFIX)


def test_several_write_the_same_file(tmp_path: Path) -> None:
    """It is one of theirs, whole, however their writes alternate."""
    saved = files(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(saved.write, "a", PREFIX) for _ in range(200)]:
            assert done.result() == (tmp_path / "a").stat().st_size
    assert saved.read("a", shapes, 99)[0].tokens == PREFIX.tokens
    assert os.listdir(tmp_path) == ["a"]


def test_keys_that_were_rotated_otherwise_are_of_another_layout(
    reference_file: Callable[[str], Path],
) -> None:
    """Phi-3 has other factors for long contexts; the file of the model is the same."""
    with Gguf(reference_file("phi3-dense")) as file:
        config = Config.of(file)
    cache, states = CacheShape.equal(KvLayout(1, 1, 256, 8, "f16"), 1), RecurrentShape({}, 1)
    (rope,) = config.ropes
    assert rope.long_factors is not None
    short, long, again = (
        layout_digest(cache, states, config.at_context(context).ropes)
        for context in (rope.long_above, rope.long_above + 1, rope.long_above)
    )
    assert short == again != long


@pytest.mark.parametrize("name", ["blk.1.attn_q.lora_a", "blk.0.ffn_down.lora_b"])
def test_a_model_with_another_adapter_of_its_own_has_another_digest(
    name: str, reference_file: Callable[[str], Path]
) -> None:
    with Gguf(reference_file("graniteswitch")) as file:
        tensor = file.tensors[name]
        digests = {model_digest(file)}
        for adapter in range(tensor.shape[0]):
            data = np.array(tensor.data[:])
            data[adapter * tensor.nbytes // tensor.shape[0]] ^= 1
            tensors = {**file.tensors, name: replace(tensor, data=data)}
            other: Any = SimpleNamespace(tensors=tensors)
            digests.add(model_digest(other))
    assert len(digests) == 1 + tensor.shape[0]
