"""A model's weights on the device: one copy, repacked once, in the layout the kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from urdir.model.families.config import Config, expected_tensors
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

_ROPE_TABLE = "rope table"


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
        """Values of a product."""
        return self.layout.rows

    @property
    def cols(self) -> int:
        """Values that a product takes."""
        return self.layout.cols


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer: matrices (out, in), norms (hidden,) f32; ``q_norm`` and ``k_norm``
    (head_dim,) f32 where queries and keys are normalised.
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
    """All weights of a model in one allocation, by tensor name and by role."""

    def __init__(self, gguf: ModelFile, config: Config, device: Device) -> None:
        self.config = config
        self.device = device
        self._arena: Arena = device.arena(weight_sizes(gguf, config), "weights")
        self._layouts = {t.name: _layout(t) for t in gguf.tensors.values() if len(t.shape) == 2}
        self.embedding = self._matrix("token_embd.weight")
        output = "token_embd" if config.tied else "output"
        self.output = self._matrix(f"{output}.weight", "output.bias")
        self.output_norm: Slice = self._arena["output_norm.weight"]
        self.rope_table: Slice = self._arena[_ROPE_TABLE]
        self.layers = tuple(self._layer(i) for i in range(config.n_layers))

    @classmethod
    def load(cls, gguf: ModelFile, config: Config, device: Device) -> Self:
        """Upload and repack every tensor of ``gguf``, which ``config`` was read from.

        A bounded staging buffer is used and freed; a progress bar goes to stderr. Raises
        DriverError when memory runs out or the device fails; nothing stays allocated then.
        """
        weights = cls(gguf, config, device)
        try:
            weights._upload(gguf)
        except BaseException:
            weights.close()
            raise
        return weights

    def _upload(self, gguf: ModelFile) -> None:
        self.rope_table.upload(_rope_table(gguf, self.config))
        total = sum(t.nbytes for t in gguf.tensors.values())
        with Uploader(self.device) as uploader, Progress("loading", total) as progress:
            for name, _ in expected_tensors(self.config):
                tensor = gguf.tensors[name]
                if name in self._layouts:
                    uploader.matrix(self._layouts[name], tensor.data, self._arena[name])
                elif name in self._arena:
                    uploader.vector(tensor.data, self._arena[name])
                progress.advance(tensor.nbytes)

    def _matrix(self, name: str, bias: str | None = None) -> Matrix:
        bias = bias or name.replace(".weight", ".bias")
        return Matrix(self._layouts[name], self._arena[name], self._arena.get(bias))

    def _layer(self, index: int) -> LayerWeights:
        at = f"blk.{index}."
        return LayerWeights(
            attn_norm=self._arena[at + "attn_norm.weight"],
            q=self._matrix(at + "attn_q.weight"),
            k=self._matrix(at + "attn_k.weight"),
            v=self._matrix(at + "attn_v.weight"),
            o=self._matrix(at + "attn_output.weight"),
            ffn_norm=self._arena[at + "ffn_norm.weight"],
            gate=self._matrix(at + "ffn_gate.weight"),
            up=self._matrix(at + "ffn_up.weight"),
            down=self._matrix(at + "ffn_down.weight"),
            q_norm=self._arena.get(at + "attn_q_norm.weight"),
            k_norm=self._arena.get(at + "attn_k_norm.weight"),
        )

    def norm_behind(self, index: int) -> Slice:
        """The weights (hidden,) of the norm behind layer ``index``."""
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
    for name, shape in expected_tensors(config):
        if name == "rope_freqs.weight":
            continue  # part of the RoPE table
        tensor = gguf.tensors[name]
        sizes[name] = _layout(tensor).nbytes if len(shape) == 2 else tensor.nbytes
    sizes[_ROPE_TABLE] = 4 * config.rope.dim
    return sizes


def _layout(tensor: Tensor) -> Layout:
    rows, cols = tensor.shape
    return Layout(format_of(tensor.type_id), rows, cols)


def _rope_table(
    gguf: ModelFile, config: Config
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    factors = None
    if config.has_rope_factors:
        factors = gguf.tensors["rope_freqs.weight"].data.view(np.float32)
    return turns_table(config.rope.frequencies(factors))
