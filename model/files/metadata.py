"""GGUF metadata: typed look-ups whose errors name the key, and lazy string arrays."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConfigError
from urdir.model.files.limits import NAME_LENGTH

#: The key of a GGUF file made of a folder: keys and rows are a folder's.
FOLDER = "own.folder"
#: Says that experts are in another order than their folder, which adapters do not fit.
REORDERED = "own.reordered"
#: The tokeniser's kind; of a file made of a folder it has a name of its own ("own.llama"), so that
#: other programs refuse the file, whose rows are in an order that they do not know.
TOKENIZER, OWN = "tokenizer.ggml.model", "own."
_T = TypeVar("_T")
_D = TypeVar("_D")


class StringArray(Sequence[str]):
    """Strings in a GGUF file, decoded when accessed.

    A vocabulary holds some 300,000 strings that most commands never read: the reader only skips
    over their lengths. Invalid UTF-8 becomes U+FFFD.
    """

    __slots__ = ("_buffer", "_ends", "_start")

    def __init__(self, buffer: memoryview, start: int, ends: array[int]) -> None:
        """`start` is the offset of the first length field, `ends[i]` the end of string i."""
        self._buffer = buffer
        self._start = start
        self._ends = ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> StringArray:
        """The strings of a file that is not GGUF."""
        encoded = [text.encode("utf-8", "replace") for text in texts]
        buffer = b"".join(len(text).to_bytes(8, "little") + text for text in encoded)
        ends = array("Q", itertools.accumulate(8 + len(text) for text in encoded))
        return cls(memoryview(buffer), 0, ends)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else self._start
        return str(self._buffer[start + 8 : self._ends[index]], "utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return iter(self.decoded())

    @property
    def longest(self) -> int:
        """Length of the longest string in bytes."""
        if not self._ends:
            return 0
        ends = np.frombuffer(self._ends, np.uint64)
        return int(np.diff(ends, prepend=np.uint64(self._start)).max()) - 8

    def first_without(self, char: str) -> int | None:
        """The first string without an ASCII character; None if all contain it."""
        text, starts = self._joined()
        if not len(starts):
            return None
        has = np.logical_or.reduceat(text == ord(char), starts)
        return None if has.all() else int(has.argmin())

    def decoded(self) -> list[str]:
        """All strings, decoded at once."""
        text, _ = self._joined()
        strings = text.tobytes().decode("utf-8", "replace").split("\0")[1:]
        if len(strings) != len(self):  # a string contains a NUL
            return [self[i] for i in range(len(self))]
        return strings

    def _joined(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """All bytes, with a NUL in place of each length; positions of these NULs."""
        if not self._ends:
            return np.empty(0, np.uint8), np.empty(0, np.int64)
        nbytes = self._ends[-1] - self._start
        text = np.frombuffer(self._buffer, np.uint8, nbytes, self._start).copy()
        lengths_at = np.append(0, np.frombuffer(self._ends, np.uint64)[:-1] - self._start)
        lengths_at = lengths_at.astype(np.int64)
        text[lengths_at] = 0
        kept = np.ones(nbytes, np.bool_)
        for byte in range(1, 8):
            kept[lengths_at + byte] = False
        return text[kept], lengths_at - 7 * np.arange(len(lengths_at))

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"


Value: TypeAlias = "bool | int | float | str | NDArray[Any] | StringArray | list[Any]"
"""A metadata value: a scalar, a read-only 1-d array of numbers, strings, or a list of arrays."""


class Metadata(Mapping[str, Value]):
    """The key/value pairs of a file, in order.

    `require` and `optional` look up a key whose value must be of one kind: int (any width, not
    boolean), float (integers accepted; always finite), bool, str (a short name, except `_TEXTS`),
    StringArray, or np.ndarray (an array of numbers). Otherwise they raise ConfigError, naming the
    key.
    """

    __slots__ = ("_path", "_values")

    def __init__(self, values: Mapping[str, Value], path: str = "metadata") -> None:
        self._values = values
        self._path = path

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Metadata of {self._path!r}, {len(self)} keys>"

    def replaced(self, key: str, value: Value) -> Metadata:
        """The same with another value of ``key``."""
        return Metadata({**self._values, key: value}, self._path)

    def require(self, key: str, kind: type[_T]) -> _T:
        """The value of `key`; ConfigError if absent."""
        if key not in self._values:
            raise ConfigError(f"{self._path}: metadata key '{key}' is missing")
        return self._checked(key, kind)

    def optional(self, key: str, kind: type[_T], default: _D) -> _T | _D:
        """The value of `key`, or `default` if absent."""
        return self._checked(key, kind) if key in self._values else default

    def _checked(self, key: str, kind: type[_T]) -> _T:
        value: Any = self._values[key]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(
                f"{self._path}: metadata key '{key}' is {_describe(value)}, expected {_NAMES[kind]}"
            )
        checked: _T = value
        if isinstance(value, str) and key not in _TEXTS:
            where = f"{self._path}: metadata key '{key}'"
            NAME_LENGTH.check(len(value), where, ConfigError)  # messages repeat it
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self._path}: metadata key '{key}' is {value}, not a finite number")
        return checked


#: Keys whose strings may be long.
_TEXTS = frozenset({"tokenizer.chat_template", "tokenizer.huggingface.json"})
_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    str: "a string",
    StringArray: "an array of strings",
    np.ndarray: "an array of numbers",
}


def _describe(value: object) -> str:
    """Description of a value for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    if isinstance(value, list):
        return f"an array of {len(value)} arrays"
    return f"{type(value).__name__} {(value if isinstance(value, str) else str(value))[:40]!r}"
