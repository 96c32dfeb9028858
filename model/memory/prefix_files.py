"""Files of cached prefixes: pages and states of the first tokens of a sequence.

A file is of one model, cache type and layout, which its header names by digests, and of nothing
else: it is checked whole before anything of it reaches the device.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from urdir.model.errors import PrefixFileError
from urdir.model.files.memory_model import MemoryModel
from urdir.model.memory.prefix_copy import PrefixBytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from urdir.model.families.rope import RopeConfig
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.cache_shape import CacheShape
    from urdir.model.memory.recurrent_state import RecurrentShape

_MAGIC = b"urdir prefix 1\n\0"
_LENGTH = struct.Struct("<I")
#: Names of files; llama-server has no others either.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_MOST_HEADER = 4096
#: Metadata that no cached value depends on.
_NO_PART_OF_CACHES = ("general.", "tokenizer.", "quantize.", "split.")
#: Bytes of each tensor that the digest of a model takes.
_SAMPLED = 4096

Shapes = Callable[[int], Sequence[tuple[int, ...]]]


def model_digest(file: ModelFile) -> str:
    """A digest of a model: its metadata without names and vocabulary, and of each tensor the name,
    type, shape and first bytes; in a tensor of several adapters, of which the first is zeros, those
    of each adapter (`Switch`). Of a `MemoryModel` all bytes: it may differ anywhere."""
    found = blake2b(digest_size=16)
    for key, value in file.metadata.items():
        if not key.startswith(_NO_PART_OF_CACHES):
            held = value.tolist() if isinstance(value, np.ndarray) else value
            held = held if isinstance(held, int | float | str) else [*held]
            found.update(repr((key, held)).encode())
    for name, tensor in file.tensors.items():
        found.update(repr((name, tensor.type_name, tensor.shape, tensor.nbytes)).encode())
        parts = max(1, tensor.shape[0]) if ".lora_" in name else 1
        each = tensor.nbytes // parts
        for start in range(0, each * parts, max(1, each)):
            most = each if isinstance(file, MemoryModel) else min(each, _SAMPLED)
            sample = tensor.data[start : start + most]
            found.update(np.ascontiguousarray(sample).tobytes())
    return found.hexdigest()


def layout_digest(
    cache: CacheShape, states: RecurrentShape, ropes: Sequence[RopeConfig] = ()
) -> str:
    """A digest of what the pages of all layers hold, whatever their number, and of the rotations of
    keys: some depend on the longest context."""
    layers = []
    for index, layer in cache.layers.items():
        span = 0 if layer.window is None else layer.window.span
        arrays = [(of.kv_heads, of.head_dim, of.dtype) for of in layer.arrays.values()]
        layers.append((index, span, layer.layout.page_len, arrays))
    held = {index: dict(arrays) for index, arrays in states.layers.items()}
    text = repr((layers, held, sorted(map(repr, ropes))))
    return blake2b(text.encode(), digest_size=16).hexdigest()


class PrefixFiles:
    """The files of a folder, which exists, for one ``model`` (a function that makes its digest) and
    ``layout``; ``cache`` names the type of its elements."""

    def __init__(self, folder: Path, model: Callable[[], str], layout: str, cache: str) -> None:
        self._folder = folder
        self._model = model
        self._made: dict[str, str] = {}
        self._layout, self._cache = layout, cache

    def write(self, name: str, prefix: PrefixBytes) -> int:
        """Write a file, in place of another of that name; its bytes. Raises PrefixFileError."""
        tokens = np.asarray(prefix.tokens, "<u4").tobytes()
        digest = blake2b(tokens, digest_size=32)
        for array in prefix.arrays:
            digest.update(np.ascontiguousarray(array).data)
        header = {**self._wanted, "tokens": len(prefix.tokens), "content": digest.hexdigest()}
        text = json.dumps(header).encode()
        with self._at(name) as (folder, file):
            part = f".{file}.{secrets.token_hex(8)}.part"  # several may write the same
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            try:
                opened = os.open(part, flags, 0o600, dir_fd=folder)
                with open(opened, "wb") as out:
                    out.write(_MAGIC + _LENGTH.pack(len(text)) + text + tokens)
                    for array in prefix.arrays:
                        out.write(np.ascontiguousarray(array).data)
                    nbytes = out.tell()
                os.replace(part, file, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
        return nbytes

    def read(self, name: str, shapes: Shapes, most_tokens: int) -> tuple[PrefixBytes, int]:
        """The contents of a file, whose arrays for a number of tokens have certain ``shapes``, and
        its bytes. Raises PrefixFileError for one of something else, cut off or changed."""
        with self._at(name) as (folder, file):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK

            def opened(path: str, _: int) -> int:  # closed by `open` where that fails
                return os.open(path, flags, dir_fd=folder)

            with open(file, "rb", opener=opened) as source:
                return self._read(name, source, shapes, most_tokens)

    def _read(
        self, name: str, source: BinaryIO, shapes: Shapes, most_tokens: int
    ) -> tuple[PrefixBytes, int]:
        nbytes = os.fstat(source.fileno()).st_size
        header = _header(source)
        if header is None:
            raise PrefixFileError(f"{name!r} is not a file of a prefix, or of another version")
        for field, wanted in self._wanted.items():
            if header.get(field) != wanted:
                found = str(header.get(field))[:80]
                raise PrefixFileError(f"{name!r} is of another {field}: {found!r}, not {wanted!r}")
        count = header.get("tokens")
        if type(count) is not int or not 0 < count <= most_tokens:
            found = str(count)[:80]
            raise PrefixFileError(f"{name!r} has {found} tokens: 1 to {most_tokens:,} fit")
        sizes = [4 * count, *(int(np.prod(shape)) for shape in shapes(count))]
        if nbytes != source.tell() + sum(sizes):
            raise PrefixFileError(f"{name!r} is cut off, or has something else, too")
        digest, parts = blake2b(digest_size=32), []
        for size in sizes:
            part = np.fromfile(source, np.uint8, size)
            digest.update(part.data)
            parts.append(part)
        if digest.hexdigest() != header.get("content"):
            raise PrefixFileError(f"{name!r} was changed since it was written")
        tokens = tuple(int(token) for token in parts[0].view("<u4"))
        pairs = zip(parts[1:], shapes(count), strict=True)
        return PrefixBytes(tokens, [part.reshape(shape) for part, shape in pairs]), nbytes

    @property
    def _wanted(self) -> dict[str, str]:
        """What the header of a file says of the model and the cache."""
        if not self._made:
            self._made |= {"model": self._model(), "cache": self._cache, "layout": self._layout}
        return self._made

    @contextmanager
    def _at(self, name: str) -> Iterator[tuple[int, str]]:
        """The folder, open, and the name of a file in it. Raises PrefixFileError for a name that
        may be elsewhere, and what the system says."""
        if not _NAME.fullmatch(name):
            raise PrefixFileError(
                f"filename {name[:80]!r}: expected letters, digits, '.', '_' and '-', no folder"
            )
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                yield folder, name
            finally:
                os.close(folder)
        except OSError as error:
            raise PrefixFileError(f"{name!r} in the folder of prefixes: {error.strerror}") from None


def _header(source: BinaryIO) -> dict[str, object] | None:
    """The header of a file; None where it is something else."""
    start = source.read(len(_MAGIC) + _LENGTH.size)
    if len(start) < len(_MAGIC) + _LENGTH.size or not start.startswith(_MAGIC):
        return None
    (length,) = _LENGTH.unpack(start[len(_MAGIC) :])
    if length > _MOST_HEADER:
        return None
    try:
        header = json.loads(source.read(length))
    except (ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None
