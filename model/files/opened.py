"""What an open GGUF file and an open folder have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.files.metadata import Metadata
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.model.files.gguf import Tensor


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
