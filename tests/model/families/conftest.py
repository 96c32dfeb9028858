"""Goldens with other numbers, tensors and layers."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import Metadata
from urdir.model.files.opened import Tensor

DATA = Path(__file__).parents[2] / "data"


@dataclass(frozen=True)
class Model:
    """What a file would hold."""

    path: Path
    architecture: str
    metadata: Metadata
    tensors: dict[str, Tensor]


#: Architectures without goldens, whose layers are those of other ones.
RENAMED = {
    "dream": "qwen2-dense",
    "llada": "llama-dense",
    "llada-moe": "qwen3moe-moe",
    "rnd1": "qwen3moe-moe",
}


@cache
def _golden(name: str) -> Model:
    if (like := RENAMED.get(name)) is not None:
        model = _golden(like)
        old, new = f"{model.architecture}.", f"{name}."
        keys = {key.replace(old, new, 1): value for key, value in model.metadata.items()}
        return Model(Path(name), name, Metadata(keys, name), model.tensors)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.gguf"
        kinds = ("families", "encoders", "encoder_decoders", "drafts")
        packed = (DATA / kind / f"{name}.gguf.xz" for kind in kinds)
        path.write_bytes(lzma.decompress(next(p for p in packed if p.exists()).read_bytes()))
        with Gguf(path) as file:
            return Model(Path(name), file.architecture, file.metadata, file.tensors)


def _changed(
    name: str,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
    layers: Sequence[int] | None = None,
) -> Model:
    """A golden with other values of its architecture's keys (None: without them), other F32 tensors
    (None: without them), and ``layers`` that are copies of its own."""
    model = _golden(name)
    metadata = dict(model.metadata)
    for key, value in ({"block_count": len(layers)} if layers else {}).items():
        metadata[f"{model.architecture}.{key}"] = value
    for key, value in (keys or {}).items():
        metadata[f"{model.architecture}.{key}"] = value
    stored = dict(model.tensors)
    if layers is not None:
        stored = {n: t for n, t in stored.items() if not n.startswith("blk.")}
        for layer, source in enumerate(layers):
            for n, t in model.tensors.items():
                if n.startswith(f"blk.{source}."):
                    own = n.replace(f"blk.{source}.", f"blk.{layer}.", 1)
                    stored[own] = replace(t, name=own)
    for n, values in (tensors or {}).items():
        stored.pop(n, None)
        if values is not None:
            stored[n] = _tensor(n, values)
    kept = {k: v for k, v in metadata.items() if v is not None}
    return Model(model.path, model.architecture, Metadata(kept, name), stored)


def _tensor(name: str, values: np.ndarray[Any, Any]) -> Tensor:
    data = np.ascontiguousarray(values, np.float32)
    return Tensor(name, 0, data.shape, 0, data.nbytes, data.reshape(-1).view(np.uint8))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Model]:
    """A golden by its name."""
    return _golden


@pytest.fixture(scope="session")
def changed() -> Callable[..., Model]:
    """See `_changed`."""
    return _changed


@pytest.fixture(scope="session")
def made() -> Callable[..., Model]:
    """A model of those keys and F32 tensors."""

    def make(
        architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]]
    ) -> Model:
        metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
        metadata["general.architecture"] = architecture
        stored = {name: _tensor(name, values) for name, values in tensors.items()}
        return Model(Path(architecture), architecture, Metadata(metadata, architecture), stored)

    return make
