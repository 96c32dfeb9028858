"""What the rest of the package needs of a model file, be it read or synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from urdir.model.files.gguf import Tensor
from urdir.model.files.metadata import Metadata


class ModelFile(Protocol):
    """A ``Gguf``, or a ``SafetensorsModel`` or ``SyntheticModel`` in its place.

    Metadata and tensors are named as GGUF names them. A tensor's ``data`` may be made when it is
    read: of a matrix only ``len`` and slices are used, of a vector it is an array.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """general.architecture."""
