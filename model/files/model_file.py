"""Interface of a model file: read, synthetic, or in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self

from urdir.model.files.metadata import Metadata
from urdir.model.files.opened import Tensor

#: Matrices that multiply the same x, and the name under which they share an order of columns: the
#: vector ``<name>.order`` (cols,) says which column of x each column of the stored matrix is; of
#: experts (experts, cols).
SHARED_ORDERS = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn_qkv"),
    **dict.fromkeys(("ffn_gate", "ffn_up"), "ffn_gate_up"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps"),
}


def is_part_of_folder(path: Path) -> bool:
    """Whether it is a file of a folder of safetensors, which is opened as a whole."""
    return path.suffix in (".safetensors", ".json") and path.is_file()


class ModelFile(Protocol):
    """A ``Gguf``, ``SafetensorsModel``, ``SyntheticModel`` or ``MemoryModel``.

    Metadata and tensors have GGUF's names. A tensor's ``data`` may be made when read: a matrix
    needs only ``len`` and slices, a vector is an array.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """general.architecture."""

    def close(self) -> None:
        """Drop the tensors."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
