"""Tiny models of transformers' classes without their weights, which are a stream of random bits.

`tests/data/classes/NAME.npz` has ``config`` (config.json), ``shapes`` (of stored tensors by name,
JSON), ``tokens``, ``positions``, and the class's ``logits`` there. `tests/class_goldens.py` writes
them.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.files.quantised_folders import write_safetensors

FOLDER = Path(__file__).parents[2] / "data" / "classes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ClassGolden:
    """A golden; the fields are those of the file."""

    config: dict[str, Any]
    shapes: Shapes
    tokens: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]
    logits: np.ndarray[Any, Any]

    @classmethod
    def read(cls, name: str) -> ClassGolden:
        with np.load(FOLDER / f"{name}.npz") as file:
            config, shapes = (json.loads(str(file[of])) for of in ("config", "shapes"))
            shapes = {name: tuple(shape) for name, shape in shapes.items()}
            return cls(config, shapes, *(file[of] for of in ("tokens", "positions", "logits")))

    def write_folder(self, folder: Path) -> Path:
        """The folder that the class would write."""
        (folder / "config.json").write_text(json.dumps(self.config))
        write_safetensors(folder / "model.safetensors", stream_weights(self.shapes))
        return folder


def stream_weights(shapes: Shapes) -> dict[str, np.ndarray[Any, Any]]:
    """Weights by name, f32: matrices that keep the size of values, vectors near 1 or, of biases,
    near 0. numpy keeps the bits of a PCG64 the same."""
    return {name: _weights(name, shape) for name, shape in shapes.items()}


def _weights(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(max(1, math.prod(shape)))
    values = (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    if len(shape) > 1:
        return (values * np.float32(2 / shape[-1] ** 0.5)).reshape(shape)
    least = np.float32(1 if name.endswith(".weight") else 0)
    return (least + np.float32(0.3) * values).reshape(shape)
