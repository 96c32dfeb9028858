"""A model's weights on the device: one copy, repacked once, in the layout the kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from urdir.model.families.description import Config
from urdir.model.families.rope import RopeConfig
from urdir.model.families.tensors import tensor_name, tensors
from urdir.model.memory.upload import STAGING_BYTES, Uploader
from urdir.model.owner import Owner
from urdir.model.progress import Progress
from urdir.ptxgen.kernels.rotation import turns_table
from urdir.ptxgen.weights.formats import Format, format_of
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Arena, Slice
    from urdir.model.files.gguf import Tensor
    from urdir.model.files.model_file import ModelFile

__all__ = ["STAGING_BYTES", "LayerWeights", "Matrix", "Weights", "weight_sizes"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix (rows, cols) in its repacked layout; ``bias`` (rows,) f32 or None."""

    layout: Layout
    data: Slice
    bias: Slice | None = None

    @property
    def format(self) -> Format:
        """The type of its elements."""
        return self.layout.format

    @property
    def rows(self) -> int:
        """Values of the result."""
        return self.layout.rows

    @property
    def cols(self) -> int:
        """Values of the input."""
        return self.layout.cols


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer: matrices (out, in), norms (hidden,) f32; ``q_norm`` and ``k_norm``
    (key_dim,) f32 where queries and keys are normalised.
    """

    attn_norm: Slice
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    ffn_norm: Slice
    gate: Matrix
    up: Matrix
    down: Matrix
    q_norm: Slice | None
    k_norm: Slice | None


class Weights(Owner):
    """All weights of a model in one allocation, by role; ``rope_tables`` by what they rotate."""

    def __init__(self, gguf: ModelFile, config: Config, device: Device) -> None:
        self.config = config
        self._arena: Arena = device.arena(weight_sizes(gguf, config), "weights")
        self._layouts = {
            spec.name: _layout(gguf.tensors[spec.name])
            for spec in tensors(config)
            if spec.kind == "matrix"
        }
        self.embedding = self._matrix("embedding")
        bias = self._find("output_bias")
        self.output = replace(self.embedding, bias=bias) if config.tied else self._matrix("output")
        self.output_norm = self._vector("output_norm")
        self.rope_tables = {rope: self._arena[_table_name(rope)] for rope in config.ropes}
        self.layers = tuple(self._layer(i) for i in range(config.n_layers))

    @classmethod
    def load(cls, gguf: ModelFile, config: Config, device: Device) -> Self:
        """Upload and repack every tensor of ``gguf``, which ``config`` was read from.

        A bounded staging buffer is used and freed; a progress bar goes to stderr. Raises
        DriverError when memory runs out or the device fails; nothing stays allocated then.
        """
        weights = cls(gguf, config, device)
        try:
            weights._upload_rope_tables(gguf)
            weights._upload(gguf, device)
        except BaseException:
            weights.close()
            raise
        return weights

    def _upload(self, gguf: ModelFile, device: Device) -> None:
        total = sum(t.nbytes for t in gguf.tensors.values())
        with Uploader(device) as uploader, Progress("loading", total) as progress:
            for spec in tensors(self.config):
                tensor = gguf.tensors[spec.name]
                if spec.kind == "matrix":
                    layout = self._layouts[spec.name]
                    uploader.matrix(layout, tensor.data, self._arena[spec.name])
                elif spec.kind == "vector":
                    uploader.vector(tensor.data, self._arena[spec.name])
                progress.advance(tensor.nbytes)

    def _upload_rope_tables(self, gguf: ModelFile) -> None:
        for rope, table in self.rope_tables.items():
            factors = None
            if rope.has_factors:
                factors = gguf.tensors[tensor_name("rope_factors")].data.view(np.float32)
            table.upload(turns_table(rope.frequencies(factors)))

    def _matrix(self, role: str, layer: int | None = None) -> Matrix:
        name = tensor_name(role, layer)
        return Matrix(self._layouts[name], self._arena[name], self._find(f"{role}_bias", layer))

    def _vector(self, role: str, layer: int | None = None) -> Slice:
        return self._arena[tensor_name(role, layer)]

    def _find(self, role: str, layer: int | None = None) -> Slice | None:
        return self._arena.get(tensor_name(role, layer))

    def _layer(self, index: int) -> LayerWeights:
        return LayerWeights(
            attn_norm=self._vector("attn_norm", index),
            q=self._matrix("q", index),
            k=self._matrix("k", index),
            v=self._matrix("v", index),
            o=self._matrix("o", index),
            ffn_norm=self._vector("ffn_norm", index),
            gate=self._matrix("gate", index),
            up=self._matrix("up", index),
            down=self._matrix("down", index),
            q_norm=self._find("q_norm", index),
            k_norm=self._find("k_norm", index),
        )

    def norm_after(self, index: int) -> Slice:
        """The weights (hidden,) of the first norm after layer ``index``."""
        more = index + 1 < len(self.layers)
        return self.layers[index + 1].attn_norm if more else self.output_norm

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._arena.nbytes

    def close(self) -> None:
        """Free the weights; closing twice does nothing."""
        self._arena.close()


def weight_sizes(gguf: ModelFile, config: Config) -> dict[str, int]:
    """Bytes of everything ``Weights`` keeps on the device, by tensor name."""
    sizes = {}
    for spec in tensors(config):
        tensor = gguf.tensors[spec.name]
        if spec.kind == "matrix":
            sizes[spec.name] = _layout(tensor).nbytes
        elif spec.kind == "vector":
            sizes[spec.name] = tensor.nbytes
    return sizes | {_table_name(rope): 4 * rope.dim for rope in config.ropes}


def _layout(tensor: Tensor) -> Layout:
    rows, cols = tensor.shape
    return Layout(format_of(tensor.type_id), rows, cols)


def _table_name(rope: RopeConfig) -> str:
    return f"table of {rope}"
