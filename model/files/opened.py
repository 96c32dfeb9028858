"""What an open GGUF file and an open folder have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from urdir.model.files.metadata import Metadata
from urdir.model.files.open_file import ByteSource
from urdir.model.files.tensor_types import tensor_type
from urdir.model.owner import Owner


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor: ``nbytes`` bytes of ggml type ``type_id`` (`TENSOR_TYPES`; 0 is F32).

    ``shape`` is in numpy's order: rows first, the contiguous dimension (ne[0]) last. ``offset`` is
    in bytes from the start of the file, 0 without one. ``data`` are the bytes, (nbytes,) u8: a
    slice of it reads the file, which raises GgufError if the file has changed.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    data: ByteSource

    @property
    def type_name(self) -> str:
        """The type as ggml spells it: "F32", "Q4_K"."""
        return tensor_type(self.type_id).name


class OpenedModel(Owner):
    """The contents of a model's files: `metadata`, and `tensors` by name.

    A context manager. Files stay open while one of their tensors exists, so closing early is safe.
    """

    path: Path
    nbytes: int
    metadata: Metadata
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """general.architecture; ConfigError if missing."""
        return self.metadata.require("general.architecture", str)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.path)!r}, {len(self.tensors)} tensors>"

    def close(self) -> None:
        """Drop the tensors and metadata; files are closed once no tensor of them exists."""
        self.tensors = {}
        self.metadata = Metadata({}, str(self.path))
