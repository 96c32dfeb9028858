"""What a family reads of a model file: an architecture's metadata, and which tensors there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, TypeVar

from urdir.model.errors import ConfigError
from urdir.model.files.metadata import Metadata
from urdir.model.files.model_file import ModelFile

Shape = tuple[int, ...]

_T = TypeVar("_T")
_D = TypeVar("_D")


class Reader:
    """Metadata of ``architecture`` by key without its prefix; shapes of stored tensors by name.

    At most ``max_layers`` layers are described, whatever the metadata claims. Every error names
    the whole key.
    """

    def __init__(
        self,
        metadata: Metadata,
        architecture: str,
        stored: Mapping[str, Shape],
        max_layers: int,
    ) -> None:
        self.architecture = architecture
        self.stored = stored
        self._metadata = metadata
        self._max_layers = max_layers

    @classmethod
    def of(cls, file: ModelFile) -> Self:
        """The reader of a file. Raises ConfigError where it names no architecture.

        Every layer has tensors. A file that claims more layers than it has tensors is read with one
        layer more than tensors, and then refused: a claim of billions of layers costs nothing.
        """
        stored = {name: tensor.shape for name, tensor in file.tensors.items()}
        return cls(file.metadata, file.architecture, stored, len(stored) + 1)

    def key(self, name: str) -> str:
        """The whole metadata key."""
        return f"{self.architecture}.{name}"

    def optional(self, name: str, kind: type[_T], default: _D) -> _T | _D:
        """The value of a key, or ``default`` where it is absent; ConfigError for another type."""
        return self._metadata.optional(self.key(name), kind, default)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; ConfigError where it is neither there nor has a default."""
        return self._positive(name, int, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; ConfigError where it is neither there nor has a default."""
        return self._positive(name, float, default)

    def layer_count(self) -> int:
        """``block_count``, up to ``max_layers``."""
        return min(self.size("block_count"), self._max_layers)

    def _positive(self, name: str, kind: type[_Number], default: _Number | None) -> _Number:
        key = self.key(name)
        if default is None:
            value = self._metadata.require(key, kind)
        else:
            value = self._metadata.optional(key, kind, default)
        if value <= 0:
            raise ConfigError(f"metadata key '{key}' is {value}, expected a positive number")
        return value


_Number = TypeVar("_Number", int, float)
