"""Files of LoRA adapters: those that are given, and a folder's, read when a request names them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.engine.options import EngineOptions
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
        path = self.folder / f"{name}.gguf"
        if path.is_file():
            return path
        path = self.folder / name
        return path if (path / "adapter_config.json").is_file() else None

    def names(self) -> list[str]:
        """Names of all adapters in the folder, in order."""
        found = {path.name.removesuffix(".gguf") for path in self.folder.iterdir()}
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


def open_pool(options: EngineOptions, file: ModelFile, config: Config) -> AdapterPool | None:
    """That of an engine; None without one. Raises ModelError where the folder is not there."""
    if options.adapter_folder is None:
        return None
    folder = Path(options.adapter_folder)
    if not folder.is_dir():
        raise ModelError(f"adapter_folder {folder}: no such folder")
    return AdapterPool(folder, adapter_reader(file, config), options.max_host_adapters)


def open_adapters(
    options: EngineOptions, file: ModelFile, config: Config
) -> list[tuple[Adapter, float]]:
    """The adapters that are given, with their scales."""
    if not options.adapters:
        return []
    from urdir.model.files.adapter import open_adapter
    from urdir.model.layers.adaptable import is_interleaved

    turned = is_interleaved(config)
    return [
        (open_adapter(path, file, interleaved=turned), scale) for path, scale in options.adapters
    ]


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
