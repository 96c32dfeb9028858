"""Models in a folder of this machine: GGUF files, and folders with safetensors or one GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from urdir.model.errors import ModelError
from urdir.model.files.gguf import Gguf
from urdir.model.files.hub import FoundModel, part_names_in, whole_models

_MOST_FILES = 10_000  # of a folder; others are not looked at


def models_in(folder: Path) -> list[FoundModel]:
    """The models of a folder, by name; of two with one name the file. No adapters, no projectors of
    images, no hidden files. A file that is no model is listed too, unless it is an adapter: opening
    it says why. Raises ModelError if the folder cannot be read.
    """
    try:
        entries = _entries(folder)
    except OSError as error:
        raise ModelError(f"{folder}: {error.strerror}") from error
    found: dict[str, FoundModel] = {}
    for model in _files(folder, entries):
        found.setdefault(model.name, model)
    for entry in entries:
        with suppress(OSError):  # one that may not be read, or is gone
            if entry.is_dir() and (one := _folder_model(entry, _entries(entry))) is not None:
                found.setdefault(one.name, one)
    return sorted(found.values(), key=lambda model: model.name)


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, without hidden files and names that cannot be printed."""
    names = sorted(os.listdir(folder))
    shown = [name for name in names if not name.startswith(".") and name.isprintable()]
    return [folder / name for name in shown[:_MOST_FILES]]


def _files(folder: Path, entries: list[Path]) -> Iterator[FoundModel]:
    """The GGUF models among the files of a folder."""
    sizes = {path.name: status for path in entries if (status := _status(path)) is not None}
    for first in whole_models(sizes):
        parts = part_names_in(first)
        path = folder / first
        if not all(part in sizes for part in parts) or _is_adapter(path, sizes[first].st_mtime_ns):
            continue
        name = first.removesuffix(".gguf")
        if len(parts) > 1:
            name = name.rpartition("-of-")[0].rpartition("-")[0]
        yield FoundModel(
            name, path, sum(sizes[part].st_size for part in parts), sizes[first].st_mtime
        )


def _folder_model(folder: Path, entries: list[Path]) -> FoundModel | None:
    """The one model of a folder."""
    names = {path.name for path in entries}
    weights = [path for path in entries if path.suffix == ".safetensors"]
    if "adapter_config.json" in names:
        return None
    if weights and "config.json" in names:
        known = [status for path in weights if (status := _status(path)) is not None]
        size, changed = sum(s.st_size for s in known), max((s.st_mtime for s in known), default=0.0)
        return FoundModel(folder.name, folder, size, changed)
    inside = [*_files(folder, entries)]
    if len(inside) != 1:
        return None
    (model,) = inside
    return FoundModel(folder.name, model.path, model.nbytes, model.modified)


def _status(path: Path) -> os.stat_result | None:
    """Of a regular file, which may be gone by now."""
    try:
        return path.stat() if path.is_file() else None
    except OSError:
        return None


@lru_cache(maxsize=1024)
def _is_adapter(path: Path, changed: int) -> bool:
    """Whether a GGUF file is a LoRA adapter; ``changed`` is the time of its last change."""
    try:
        return Gguf(path).metadata.optional("general.type", str, "") == "adapter"
    except ModelError:
        return False
