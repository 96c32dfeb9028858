"""Synthetic models: real shapes with random weights, made block by block during upload.

They measure speed without a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import SettingsError
from urdir.model.families.description import Description
from urdir.model.families.reader import Reader
from urdir.model.families.recipe import MIXED, formats
from urdir.model.families.registry import describe
from urdir.model.families.shapes import SHAPES, Shape
from urdir.model.families.stored import StoredMatrix, stored_in
from urdir.model.files.metadata import Metadata
from urdir.model.files.opened import Tensor
from urdir.model.owner import Owner
from urdir.ptxgen.weights.formats import FORMATS, Bytes, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout

_POOL_BLOCKS = 4096  # distinct blocks per type, which tensors repeat
_POOL_BYTES = 4 << 20  # of repeated blocks, so that a piece of a tensor is few copies


TYPES = (*MIXED, *(name.lower() for name in FORMATS))


class SyntheticModel(Owner):
    """The contents of a GGUF file of that shape and type; replaces an open ``Gguf``.

    Vectors (norms, biases) are ones; routers are normal, so that tokens choose different experts.
    ``kind`` is one type for all matrices, "q4_k_m" or "mxfp4_moe" (llama.cpp's recipes), or None
    for the model's usual type. Raises SettingsError for an unknown shape or type.
    """

    def __init__(
        self, shape_name: str, kind: str | None = None, shape: Shape | None = None
    ) -> None:
        if shape is None and shape_name not in SHAPES:
            raise SettingsError(f"no shape {shape_name!r}: one of {', '.join(SHAPES)}")
        shape = shape or SHAPES[shape_name]
        kind = kind or shape.kind
        if kind not in TYPES:
            raise SettingsError(f"no weight type {kind!r}: one of {', '.join(TYPES)}")
        self.path = Path(f"{shape_name}-{kind}")
        self.architecture = shape.arch
        self.metadata = Metadata(shape.metadata(str(self.path)), str(self.path))
        blocks = shape.layers + shape.nextn
        reader = Reader(self.metadata, shape.arch, shape.stored(), blocks, nextn=True)
        config = self._described(reader)
        # parts of a tensor are separate references
        references = {of.name: of for of in stored_in(config) if of not in config.lent}
        types = formats(tuple(references.values()), shape, kind)
        pools = _Pools(0.7 / math.sqrt(shape.hidden))
        self.tensors: dict[str, Tensor] = {}
        for name, stored in references.items():
            fmt = types[name]
            nbytes = math.prod(stored.shape) // fmt.block * fmt.nbytes
            data: Any
            if not isinstance(stored, StoredMatrix):
                value = np.float32(-1.0 if name.endswith("ssm_a") else 1.0)  # states decay
                data = np.full(math.prod(stored.shape), value).view(np.uint8)
            elif name.endswith("ffn_gate_inp.weight"):
                data = pools.distinct(fmt, math.prod(stored.shape))
            else:
                data = pools.repeated(fmt, nbytes)
            self.tensors[name] = Tensor(name, fmt.ggml_type, stored.shape, 0, nbytes, data)

    def _described(self, reader: Reader) -> Description:
        return describe(reader)

    def close(self) -> None:
        """Do nothing: there is no file."""


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Bytes of a tensor that repeats a pool of random blocks; slices are made when read."""

    pool: Bytes
    nbytes: int = 0

    @classmethod
    def of(cls, fmt: Format, deviation: float) -> RepeatedBlocks:
        """A pool of weights with about that standard deviation."""
        rng = np.random.default_rng(0)
        columns = 256
        rows = _POOL_BLOCKS * fmt.block // columns or 1
        layout = Layout(fmt, rows, columns)
        count = rows * columns // fmt.block
        weights = layout.unpack(layout.pack(random_blocks(fmt, count, rng)))
        scale = deviation / float(weights.std())
        pool = random_blocks(fmt, count, np.random.default_rng(0), scale).reshape(-1)
        return cls(np.tile(pool, -(-_POOL_BYTES // len(pool))))

    def sized(self, nbytes: int) -> RepeatedBlocks:
        """The same pool for a tensor of ``nbytes`` bytes."""
        return RepeatedBlocks(self.pool, nbytes)

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Bytes:
        begin, end, _ = part.indices(self.nbytes)
        data = np.empty(end - begin, np.uint8)
        self.read_into(begin, data)
        return data

    def read_into(self, begin: int, into: Bytes) -> None:
        """Fill an array with the bytes from ``begin`` on."""
        at, done = begin % len(self.pool), 0
        while done < len(into):
            some = self.pool[at : at + len(into) - done]
            into[done : done + len(some)] = some
            at, done = 0, done + len(some)


class _Pools:
    """The random weights of a model: one array per type, or per size."""

    def __init__(self, deviation: float) -> None:
        self._deviation = deviation
        self._pools: dict[str, RepeatedBlocks] = {}
        self._distinct: dict[int, Bytes] = {}

    def repeated(self, fmt: Format, nbytes: int) -> RepeatedBlocks:
        """The data of a tensor of ``nbytes`` bytes, made of repeated blocks."""
        if fmt.name not in self._pools:
            self._pools[fmt.name] = RepeatedBlocks.of(fmt, self._deviation)
        return self._pools[fmt.name].sized(nbytes)

    def distinct(self, fmt: Format, values: int) -> Bytes:
        """Random values of an unquantised type, without repetition."""
        if values not in self._distinct:
            rng = np.random.default_rng(0)
            self._distinct[values] = random_blocks(fmt, values, rng, self._deviation).reshape(-1)
        return self._distinct[values]
