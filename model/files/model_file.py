"""Interface of a model file, read or synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from urdir.model.files.gguf import Tensor
from urdir.model.files.metadata import Metadata


class ModelFile(Protocol):
    """A ``Gguf``, ``SafetensorsModel`` or ``SyntheticModel``.

    Metadata and tensors have GGUF's names. A tensor's ``data`` may be made when read: a matrix
    needs only ``len`` and slices, a vector is an array.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """general.architecture."""
