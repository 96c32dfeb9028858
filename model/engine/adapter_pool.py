"""Files of LoRA adapters: those that are given, and a folder's, read when a request names them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.files.low_rank import Adapter
    from urdir.model.files.model_file import ModelFile

#: Says whether files have changed: the time and size of each.
Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterPool:
    """The adapters of ``folder``: GGUF files by their stems, and folders of peft. ``read`` opens
    one, and up to ``most`` of them stay in host memory (None: all)."""

    folder: Path
    read: Callable[[Path], Adapter]
    most: int | None = None

    def find(self, name: str) -> Path | None:
        """Where the adapter of that name is; None without it, and for a name of another folder."""
        if not name or name != Path(name).name or name.startswith("."):
            return None
        file, folder = self.folder / f"{name}.gguf", self.folder / name
        with suppress(OSError):  # the name is too long
            if file.is_file():
                return file
            if (folder / "adapter_config.json").is_file():
                return folder
        return None

    def names(self) -> list[str]:
        """Names of all adapters in the folder, in order. Raises ModelError if it is gone."""
        try:
            found = {path.name.removesuffix(".gguf") for path in self.folder.iterdir()}
        except OSError as error:
            raise ModelError(f"adapter_folder {self.folder}: {error.strerror}") from None
        return sorted(name for name in found if self.find(name) is not None)

    @staticmethod
    def stamp(path: Path) -> Stamp:
        """Whether an adapter has changed; empty if it is gone."""
        try:
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            found = [file.stat() for file in files]
        except OSError:
            return ()
        return tuple((of.st_mtime_ns, of.st_size) for of in found)


def is_scaled(adapter: object, kind: type | UnionType) -> bool:
    """Whether an object is a pair of a ``kind`` of name and a scale."""
    if not isinstance(adapter, tuple | list) or len(adapter) != 2:
        return False
    return isinstance(adapter[0], kind) and isinstance(adapter[1], Real)


def open_pool(
    folder: str | os.PathLike[str] | None, most: int | None, file: ModelFile, config: Config
) -> AdapterPool | None:
    """That of a ``folder``; None without one. Raises ModelError where the folder is not there."""
    if folder is None:
        return None
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"adapter_folder {folder}: no such folder")
    return AdapterPool(folder, adapter_reader(file, config), most)


def open_adapters(
    given: Sequence[tuple[str | os.PathLike[str], float]], file: ModelFile, config: Config
) -> list[tuple[Adapter, float]]:
    """The adapters that are given, with their scales."""
    if not given:
        return []
    from urdir.model.files.adapter import open_adapter
    from urdir.model.layers.adaptable import is_interleaved

    turned = is_interleaved(config)
    return [(open_adapter(path, file, interleaved=turned), scale) for path, scale in given]


def adapter_reader(file: ModelFile, config: Config) -> Callable[[str | os.PathLike[str]], Adapter]:
    """What reads adapters of a model. It raises ModelError for one of another model."""
    from urdir.model.files.adapter import open_adapter
    from urdir.model.layers.adaptable import adaptable, check_adapter, is_interleaved

    turned, takes = is_interleaved(config), adaptable(config)

    def read(path: str | os.PathLike[str]) -> Adapter:
        adapter = open_adapter(path, file, interleaved=turned)
        check_adapter(adapter, config, takes)
        return adapter

    return read
