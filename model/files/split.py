"""Split GGUF models, NAME-00001-of-0000N.gguf, as llama.cpp's gguf-split writes them.

Every part is a GGUF file with these keys (`llama.cpp/tools/gguf-split`); the first part also has
the model's metadata:

        split.no             number of the part, from 0
        split.count          number of parts
        split.tensors.count  number of tensors in all parts
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from urdir.model.errors import ConfigError, GgufError
from urdir.model.files.metadata import Metadata

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MOST_PARTS = 99_999  # five digits

_T_co = TypeVar("_T_co", covariant=True)


class Part(Protocol[_T_co]):
    """One file of a split model."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def metadata(self) -> Metadata:
        """Metadata of this part."""

    @property
    def tensors(self) -> Mapping[str, _T_co]:
        """Tensors of this part by name."""


def part_name(stem: str, number: int, count: int) -> str:
    """The file name of part ``number`` (from 0) of ``count``."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that ``name`` belongs to; [name] if it is not split."""
    match = _NAME.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [part_name(match["stem"], number, count) for number in range(count)]


def part_paths(path: Path, metadata: Metadata) -> list[Path]:
    """The files of the model that ``path``, with that metadata, belongs to, in order.

    [path] for a model in one file. Raises GgufError for a missing or misnamed part.
    """
    count = metadata.optional("split.count", int, 0)
    if count <= 1:
        return [path]
    number = metadata.optional("split.no", int, 0)
    if count > _MOST_PARTS or not 0 <= number < count:
        raise GgufError(f"{path}: split.no is {number} of split.count {count}: corrupt file")
    match = _NAME.fullmatch(path.name)
    if match is None or path.name != part_name(match["stem"], number, count):
        raise GgufError(
            f"{path}: part {number + 1} of a model split into {count} files (split.count); its "
            f"name must end in '{part_name('', number, count)}', so that the others are found"
        )
    paths = [path.with_name(part_name(match["stem"], i, count)) for i in range(count)]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GgufError(
            f"{path}: {missing[0]}{others} of the model's {count} parts is missing in "
            f"{path.parent.absolute()}"
        )
    return paths


def join(parts: Sequence[Part[_T_co]]) -> dict[str, _T_co]:
    """The tensors of all parts, in order; ``parts`` are the files of `part_paths`.

    Raises GgufError if the files are not parts of one model.
    """
    first = parts[0]
    tensors: dict[str, _T_co] = {}
    owners: dict[str, Path] = {}
    for number, part in enumerate(parts):
        _check_part(part, number, len(parts), first)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise GgufError(f"{part.path}: tensor '{name}' also occurs in {owners[name].name}")
            tensors[name], owners[name] = tensor, part.path
    expected = first.metadata.optional("split.tensors.count", int, len(tensors))
    if len(parts) > 1 and expected != len(tensors):
        raise GgufError(
            f"{first.path}: the parts hold {len(tensors)} tensors, split.tensors.count says "
            f"{expected}"
        )
    return tensors


def _check_part(part: Part[object], number: int, count: int, first: Part[object]) -> None:
    """Check that ``part`` has the number in its name and belongs to the model of ``first``."""
    if count == 1:
        return
    keys = {"split.no": number, "split.count": count}
    key = "split.tensors.count"
    if key in first.metadata:
        keys[key] = first.metadata.require(key, int)
    for key, expected in keys.items():
        try:
            found = part.metadata.require(key, int)
        except ConfigError as error:
            raise GgufError(str(error)) from None
        if found != expected:
            raise GgufError(f"{part.path}: {key} is {found}, expected {expected}")
    ours, theirs = (p.metadata.get("general.architecture") for p in (first, part))
    if theirs is not None and theirs != ours:
        raise GgufError(
            f"{part.path}: general.architecture is {theirs!r}, that of {first.path.name} {ours!r}"
        )
