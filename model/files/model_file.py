"""What the rest of the package needs of a model file, be it read or synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from urdir.model.files.gguf import Tensor
from urdir.model.files.metadata import Metadata


class ModelFile(Protocol):
    """A ``Gguf``, or a ``SyntheticModel`` in its place."""

    path: Path
    metadata: Metadata
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """general.architecture."""
