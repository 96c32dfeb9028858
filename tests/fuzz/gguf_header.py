"""GGUF headers as trees, and trees as headers that may lie about every count and length."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from tests.fuzz import trees
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import StringArray

Tree = dict[str, Any]
_FORMATS = dict(enumerate("BbHhIifB")) | {10: "Q", 11: "q", 12: "d"}
_DTYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10}
_DTYPES |= {"i8": 11, "f8": 12}
_STRING, _ARRAY = 8, 9


class Base:
    """The header of a good file, as a tree and as the bytes of each of its entries."""

    def __init__(self, gguf: Gguf, longest: int) -> None:
        """Of arrays ``longest`` values are kept."""
        self.nbytes = gguf.nbytes
        self._tree = _read(gguf, longest)
        writer = _Writer(random.Random(0), {}, lies=0)
        self._written = {id(entry): writer.pair(entry) for entry in self._tree["values"]}
        self._written |= {id(entry): writer.tensor(entry) for entry in self._tree["tensors"]}

    def mutated(self, rng: random.Random) -> bytes:
        """The bytes of a header, changed as a tree, in its counts, or as bytes."""
        tree = dict(self._tree)
        if rng.random() < 0.9:
            part = rng.choice(("values", "tensors", "values", "version"))
            if part == "version":
                tree["version"] = rng.choice((0, 1, 2, 3, 4, 1 << 16, 3 << 24))
            elif part == "values" and rng.random() < 0.2:
                claimed = trees.claimed(rng, {i: e[2] for i, e in enumerate(tree[part])})
                tree[part] = [[*e[:2], claimed[i]] for i, e in enumerate(tree[part])]
            elif rng.random() < 0.3:
                tree[part] = trees.other(rng, tree[part])
            else:
                entries = list(tree[part])
                for _ in range(rng.randint(1, 3)):
                    at = rng.randrange(len(entries))
                    entries[at] = trees.changed(rng, entries[at])
                tree[part] = entries
        lies = rng.choice((0, 0, 1, 3))
        data = _Writer(rng, self._written, lies).file(tree)
        return trees.raw(rng, data) if rng.random() < 0.25 else data


def _read(gguf: Gguf, longest: int) -> Tree:
    """The header of a good file as a tree; types are one of those that fit."""
    values = []
    for key, value in gguf.metadata.items():
        if isinstance(value, StringArray):
            entry = [key, _ARRAY, [_STRING, list(value)[:longest]]]
        elif isinstance(value, bool):
            entry = [key, 7, value]
        elif isinstance(value, int):
            entry = [key, 4 if 0 <= value < 2**32 else 11, value]
        elif isinstance(value, float):
            entry = [key, 6, value]
        elif isinstance(value, str):
            entry = [key, _STRING, value]
        else:
            entry = [key, _ARRAY, [_DTYPES[value.dtype.str[1:]], value[:longest].tolist()]]
        values.append(entry)
    start = next(iter(gguf.tensors.values())).offset
    tensors = [
        [t.name, list(t.shape[::-1]), t.type_id, t.offset - start] for t in gguf.tensors.values()
    ]
    return {"version": 3, "values": values, "tensors": tensors}


class _Writer:
    """Writes any tree: what does not fit its place is written as something that does."""

    def __init__(self, rng: random.Random, written: dict[int, bytes], lies: int) -> None:
        """``written`` has what is known of entries, by their ids; so many others have ``lies``."""
        self._rng = rng
        self._written = written
        self._lies = lies
        self._chance = 0.0  # of a lie

    def file(self, tree: Tree) -> bytes:
        values, tensors = (
            tree[k] if isinstance(tree[k], list) else [] for k in ("values", "tensors")
        )
        lying = {self._rng.randrange(len(values) + len(tensors) + 1) for _ in range(self._lies)}
        body = [self._entry(self.pair, entry, i in lying) for i, entry in enumerate(values, 1)]
        body += [
            self._entry(self.tensor, entry, i in lying)
            for i, entry in enumerate(tensors, len(values) + 1)
        ]
        self._chance = 0.5 * (0 in lying)
        counts = self._count(len(tensors)) + self._count(len(values))
        return b"".join([b"GGUF", _packed("I", tree["version"]), counts, *body])

    def _entry(self, write: Callable[[Any], bytes], entry: Any, lies: bool) -> bytes:
        self._chance = 0.3 * lies
        known = None if lies else self._written.get(id(entry))
        return write(entry) if known is None else known

    def _count(self, true: int) -> bytes:
        if self._chance and self._rng.random() < self._chance:
            true = self._rng.choice((true + 1, true - 1, *trees.NUMBERS))  # type: ignore[assignment]
        return _packed("Q", true)

    def _string(self, value: Any) -> bytes:
        data = str(value).encode("utf-8", "surrogatepass")
        return self._count(len(data)) + data

    def pair(self, entry: Any) -> bytes:
        if not isinstance(entry, list) or len(entry) != 3:
            return trees.raw(self._rng, self._string(entry))
        key, kind, value = entry
        return self._string(key) + _packed("I", kind) + self._value(kind, value)

    def _value(self, kind: Any, value: Any) -> bytes:
        if kind == _ARRAY:
            inner, items = value if isinstance(value, list) and len(value) == 2 else (0, value)
            items = items if isinstance(items, list) else [items]
            body = b"".join(self._value(inner, item) for item in items)
            return _packed("I", inner) + self._count(len(items)) + body
        if isinstance(kind, int) and kind in _FORMATS:
            return _packed(_FORMATS[kind], value)
        return self._string(value)

    def tensor(self, entry: Any) -> bytes:
        if not isinstance(entry, list) or len(entry) != 4:
            return trees.raw(self._rng, self._string(entry))
        name, dims, kind, offset = entry
        dims = dims if isinstance(dims, list) else [dims]
        sizes = b"".join(_packed("Q", dim) for dim in dims)
        tail = _packed("I", kind) + _packed("Q", offset)
        return self._string(name) + _packed("I", len(dims)) + sizes + tail


def _packed(form: str, value: Any) -> bytes:
    """A number as a field of the file holds it; anything else as its size."""
    if form in "fd":
        number = float(value) if isinstance(value, int | float) else 0.0
        try:
            return struct.pack("<" + form, number)
        except OverflowError:
            return struct.pack("<" + form, float("inf"))
    size = struct.calcsize("<" + form)
    number = value if isinstance(value, int) else len(str(value))
    return (int(number) & (2 ** (8 * size) - 1)).to_bytes(size, "little")
