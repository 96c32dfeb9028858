"""Names of files of weights: what the bytes of matrices on the device depend on."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.files.split import part_paths
from urdir.model.memory.prefix_files import model_digest
from urdir.model.memory.upload import kernels_of

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile
    from urdir.ptxgen.weights.format import Format
    from urdir.ptxgen.weights.layout import Layout


def model_key(file: ModelFile) -> str:
    """A digest of a model: of the first bytes of each tensor, and of the sizes and times of its
    files, as another one may differ in other bytes alone."""
    stamps = [(of.st_size, of.st_mtime_ns) for of in map(Path.stat, _files(file))]
    return f"{model_digest(file)} {stamps}"


def matrices_key(model: str, matrices: Iterable[tuple[str, Layout, Format | None]]) -> str:
    """A digest of matrices of a model, by name, layout and the type of the floats that are
    quantised to it; and of the sources of the kernels that make their bytes."""
    found = blake2b(model.encode(), digest_size=16)
    for name, layout, floats in matrices:
        kernels = [kernel.key("sm_90") for kernel in kernels_of(layout, floats)]
        found.update(repr((name, layout.rows, layout.nbytes, kernels)).encode())
    return found.hexdigest()


def _files(file: ModelFile) -> list[Path]:
    """The files that a model is read from; none of a synthetic one."""
    if file.path.is_dir():
        return sorted(file.path.glob("*.safetensors"))
    return part_paths(file.path, file.metadata) if file.path.exists() else []
