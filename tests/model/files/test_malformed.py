"""The malformed files of llama.cpp (tests/test-gguf.cpp, by their names), with other contents:
what it refuses is refused, and the good ones among them are read.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from urdir.model.errors import GgufError, UnsupportedError
from urdir.model.files.gguf import Gguf
from urdir.model.files.tensor_types import TENSOR_TYPES

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _U32, _I32 = 8, 9, 4, 5


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@dataclass
class Info:
    name: bytes
    dims: list[int]
    type_id: int
    offset: int = 0

    @property
    def nbytes(self) -> int:
        kind = TENSOR_TYPES[self.type_id]
        return int(np.prod(self.dims)) // kind.block * kind.nbytes

    def packed(self) -> bytes:
        dims = b"".join((dim % 2**64).to_bytes(8, "little") for dim in self.dims)
        where = struct.pack("<IQ", self.type_id, self.offset % 2**64)
        return string(self.name) + struct.pack("<I", len(self.dims)) + dims + where


@dataclass
class File:
    """A file as it is written; each case changes something."""

    rng: random.Random
    magic: bytes = b"GGUF"
    version: int = 3
    counts: dict[str, int] = field(default_factory=dict)  # that lie
    pairs: list[tuple[bytes, bytes]] = field(default_factory=list)
    infos: list[Info] = field(default_factory=list)
    alignment: int = 32
    data_nbytes: int = 0
    cut: int = 0  # bytes that are missing at the end

    def with_pairs(self) -> File:
        for number in range(self.rng.randint(5, 60)):
            self.pairs.append((f"my_key_{number}".encode(), self._value()))
        return self

    def with_tensors(self) -> File:
        for number in range(self.rng.randint(5, 60)):
            type_id = self.rng.choice([*TENSOR_TYPES])
            dims = [self.rng.randint(1, 9) for _ in range(self.rng.randint(1, 4))]
            dims[0] *= TENSOR_TYPES[type_id].block
            self.infos.append(Info(f"my_tensor_{number}".encode(), dims, type_id))
        return self.laid_out(self.alignment)

    def laid_out(self, alignment: int) -> File:
        offset = 0
        for info in self.infos:
            info.offset = offset
            self.data_nbytes = offset + info.nbytes
            offset += -(-info.nbytes // alignment) * alignment
        return self

    def _value(self) -> bytes:
        kind = self.rng.choice([*_SIZES, _STRING, _ARRAY])
        if kind == _STRING:
            return struct.pack("<I", kind) + string(self.rng.randbytes(self.rng.randint(0, 63)))
        if kind == _ARRAY:
            inner = self.rng.choice([*_SIZES, _STRING])
            count = self.rng.randint(0, 16)
            item = string(b"ab") if inner == _STRING else self.rng.randbytes(_SIZES[inner])
            return struct.pack("<IIQ", kind, inner, count) + item * count
        return struct.pack("<I", kind) + self.rng.randbytes(_SIZES[kind])

    def packed(self) -> bytes:
        n_tensors = self.counts.get("tensors", len(self.infos))
        n_pairs = self.counts.get("pairs", len(self.pairs))
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_pairs)
        head += b"".join(string(key) + value for key, value in self.pairs)
        head += b"".join(info.packed() for info in self.infos)
        head += b"\0" * (-len(head) % self.alignment)
        return head + bytes(i % 256 for i in range(self.data_nbytes - self.cut))


def _aligned(file: File, kind: int, alignment: int) -> None:
    file.pairs.append((b"general.alignment", struct.pack("<II", kind, alignment)))
    if alignment == 1:
        file.alignment = 1
        file.laid_out(1)


def _each(change: Callable[[Info], None]) -> Callable[[File], None]:
    def changed(file: File) -> None:
        for info in file.infos:
            change(info)

    return changed


def _twice(file: File) -> None:
    file.pairs[1] = (file.pairs[0][0], file.pairs[1][1])


Change = Callable[[File], object]

HEADER: dict[str, Change] = {
    "BAD_MAGIC": lambda f: setattr(f, "magic", b"FUGG"),
    "BAD_VERSION_0": lambda f: setattr(f, "version", 0),
    "BAD_VERSION_1": lambda f: setattr(f, "version", 1),
    "BAD_VERSION_FUTURE": lambda f: setattr(f, "version", 4),
    "BAD_N_TENSORS": lambda f: f.counts.update(tensors=2**64 - 1),
    "BAD_N_KV": lambda f: f.counts.update(pairs=2**64 - 1),
}
PAIRS: dict[str, Change] = {
    "KV_BAD_KEY_SIZE": lambda f: f.pairs.insert(0, (b"k" * 1025, f.pairs[0][1])),
    "KV_EMPTY_KEY": lambda f: f.pairs.insert(0, (b"", f.pairs[0][1])),
    "KV_BAD_TYPE": lambda f: f.pairs.insert(0, (b"k", struct.pack("<IB", 13, 0))),
    "KV_DUPLICATE_KEY": _twice,
    "KV_BAD_ALIGN": lambda f: _aligned(f, _U32, 13),
    "KV_WRONG_TYPE_ALIGN": lambda f: _aligned(f, _I32, 32),
}
TENSORS: dict[str, Change] = {
    "BAD_NAME_SIZE": _each(lambda i: setattr(i, "name", i.name + b"_with_a_long_name" * 4)),
    "BAD_N_DIMS": _each(lambda i: setattr(i, "dims", [*i.dims, 1, 1, 1, 1])),
    "BAD_SHAPE": _each(lambda i: setattr(i, "dims", [-1] * len(i.dims))),
    "NE_TOO_BIG": _each(lambda i: setattr(i, "dims", [4 * (2**31 - 1)] * 2)),
    "NBYTES_TOO_BIG": _each(lambda i: vars(i).update(dims=[1_533_916_960] * 2, type_id=27)),
    "BAD_TYPE": _each(lambda i: setattr(i, "type_id", 4711)),
    "BAD_OFFSET": _each(lambda i: setattr(i, "offset", -1)),
    "DUPLICATE_NAME": _each(lambda i: setattr(i, "name", b"my_tensor")),
    "BAD_ALIGN": lambda f: _aligned(f, _U32, 13),
    "INCONSISTENT_ALIGN": lambda f: f.laid_out(1),
    "NOT_ENOUGH_DATA": lambda f: setattr(f, "cut", 1),
    "MEM_SIZE_OVERFLOW": _each(lambda i: vars(i).update(dims=[2**63 - 64], type_id=24)),
    "overlapping": _each(lambda i: setattr(i, "offset", 0)),
    "shuffled": lambda f: f.infos.reverse(),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*HEADER, *PAIRS, *TENSORS])
def test_what_llama_cpp_refuses_is_refused(tmp_path: Path, name: str, seed: int) -> None:
    file = File(random.Random(seed))
    if name not in HEADER:
        file.with_pairs()
    if name in TENSORS:
        file.with_tensors()
    {**HEADER, **PAIRS, **TENSORS}[name](file)
    path = tmp_path / "bad.gguf"
    path.write_bytes(file.packed())
    with pytest.raises((GgufError, UnsupportedError)):
        Gguf(path)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alignment", [32, 1])
def test_good_files_are_read(tmp_path: Path, alignment: int, seed: int) -> None:
    file = File(random.Random(seed)).with_pairs().with_tensors()
    if alignment == 1:
        _aligned(file, _U32, 1)
    path = tmp_path / "good.gguf"
    path.write_bytes(file.packed())
    with Gguf(path) as gguf:
        assert len(gguf.metadata) == len(file.pairs)
        for info, tensor in zip(file.infos, gguf.tensors.values(), strict=True):
            expected = np.arange(info.offset, info.offset + info.nbytes) % 256
            assert np.array_equal(tensor.data[:], expected)
            assert list(tensor.shape[::-1]) == info.dims
