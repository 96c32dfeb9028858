"""A model's description and weights from sizes and arrays instead of a model file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from urdir.model.errors import ConfigError
from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.check import check_tensors
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import LayerConfig
from urdir.model.families.parts import sequential
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import (
    Linear,
    Normalization,
    Stored,
    StoredMatrix,
    StoredVector,
    stored_in,
)
from urdir.model.families.synthetic import RepeatedBlocks
from urdir.model.files.memory_model import MemoryModel
from urdir.model.files.opened import Tensor
from urdir.model.files.tensor_types import type_number
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import RopeScaling, RopeStyle
from urdir.ptxgen.weights.formats import FORMATS

if TYPE_CHECKING:
    from urdir.driver.device import Device

Array = npt.NDArray[Any]


def describe(
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    context: int = 4096,
    rope: RopeConfig | None = None,
    rope_style: RopeStyle = "interleaved",
    qkv_bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    rms_eps: float = 1e-5,
) -> Config:
    """A decoder of equal layers: attention and SwiGLU, each after an RMSNorm.

    ``kv_heads`` defaults to ``heads``, ``head_dim`` to hidden / heads. ``rope`` defaults to whole
    heads of that style with a base of 10,000. Raises ConfigError for heads that do not divide.
    """
    kv_heads, head_dim = kv_heads or heads, head_dim or hidden // heads
    if heads % kv_heads:
        raise ConfigError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    norm = Norm("rms", rms_eps)
    rope = rope or RopeConfig(head_dim, rope_style, 10000.0, RopeScaling.none())

    def layer(index: int) -> LayerConfig:
        names = Names(f"blk.{index}.")
        q_norm, k_norm = (names.norm(f"attn_{n}_norm", norm, head_dim) for n in "qk")
        mixer = Attention(
            heads,
            kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            scale=1.0 / math.sqrt(head_dim),
            q=names.linear("attn_q", heads * head_dim, hidden, qkv_bias),
            k=names.linear("attn_k", kv_heads * head_dim, hidden, qkv_bias),
            v=names.linear("attn_v", kv_heads * head_dim, hidden, qkv_bias),
            o=names.linear("attn_output", hidden, heads * head_dim),
            rope=rope,
            qk_norm=QkNorm(q_norm, k_norm) if qk_norm else None,
        )
        network = Dense(
            up=names.linear("ffn_up", ffn, hidden),
            down=names.linear("ffn_down", hidden, ffn),
            gate=names.linear("ffn_gate", ffn, hidden),
            activation=Activation("silu"),
        )
        norms = names.norm("attn_norm", norm, hidden), names.norm("ffn_norm", norm, hidden)
        return sequential(mixer, network, norms)

    names = Names("")
    embedding = names.linear("token_embd", vocab, hidden)
    return Config(
        architecture="decoder",
        layers=tuple(map(layer, range(layers))),
        hidden=hidden,
        vocab_size=vocab,
        context_length=context,
        embedding=embedding.matrix,
        output=embedding if tied else names.linear("output", vocab, hidden),
        output_norm=names.norm("output_norm", norm, hidden),
    )


@dataclass(frozen=True, slots=True)
class Names:
    """References to tensors whose GGUF names begin with ``prefix``."""

    prefix: str

    def linear(self, name: str, rows: int, cols: int, bias: bool = False) -> Linear:
        """The matrix ``name``.weight (rows, cols), and ``name``.bias (rows,)."""
        vector = StoredVector.whole(f"{self.prefix}{name}.bias", rows) if bias else None
        return Linear(StoredMatrix.whole(f"{self.prefix}{name}.weight", rows, cols), vector)

    def norm(self, name: str, norm: Norm, width: int) -> Normalization:
        """``norm`` with the weights ``name``.weight (width,)."""
        return Normalization(norm, StoredVector.whole(f"{self.prefix}{name}.weight", width))


def make_weights(
    device: Device, config: Config, kind: str = "F32", arrays: Mapping[str, Array] | None = None
) -> Weights:
    """Weights on ``device``, matrices of GGUF type ``kind``.

    ``arrays`` are by GGUF tensor name ("blk.0.attn_q.weight"): f32 of the tensor's shape, which is
    quantised, or u8, the blocks of that type as a file has them. Matrices that are not given are
    random, vectors ones. Raises ConfigError and UnsupportedError, naming the tensor, for a shape or
    a name that the configuration does not have, and OutOfMemoryError.
    """
    file = MadeFile(config, kind, arrays or {})
    check_tensors(config, file)
    return Weights.load(file, config, device)


class MadeFile(MemoryModel):
    """What a GGUF file with these tensors would hold; see `make_weights`."""

    def __init__(self, config: Config, kind: str, arrays: Mapping[str, Array]) -> None:
        if kind not in FORMATS:
            raise ConfigError(f"weight type {kind!r} is none of {', '.join(FORMATS)}")
        given = {stored.name: stored for stored in stored_in(config)}
        tensors = {name: _tensor(of, kind, arrays.get(name)) for name, of in given.items()}
        for name in arrays.keys() - given.keys():
            data = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
            tensors[name] = Tensor(name, type_number("I8"), data.shape, 0, data.size, data)
        super().__init__({"general.architecture": config.architecture}, tensors, "arrays")


def _tensor(of: Stored, kind: str, array: Array | None) -> Tensor:
    is_matrix, shape = isinstance(of, StoredMatrix), of.shape
    fmt = FORMATS[kind if is_matrix else "F32"]
    if is_matrix and shape[-1] % fmt.block:
        raise ConfigError(
            f"tensor '{of.name}' {shape}: rows of {kind} are multiples of {fmt.block}"
        )
    nbytes = math.prod(shape) // fmt.block * fmt.nbytes
    data: Any
    if array is not None and array.dtype == np.uint8 and array.nbytes == nbytes:
        data = np.ascontiguousarray(array).reshape(-1)
    elif array is not None:
        shape, data = array.shape, _bytes(of.name, array, kind if is_matrix else "F32")
    elif is_matrix:
        data = RepeatedBlocks.of(fmt, 1 / math.sqrt(shape[-1])).sized(nbytes)
    else:
        data = np.ones(math.prod(shape), np.float32).view(np.uint8)
    return Tensor(of.name, fmt.ggml_type, shape, 0, len(data), data)


def _bytes(name: str, array: Array, kind: str) -> Array:
    """Values, (rows, cols) or (n,), as the bytes of a GGUF type."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    try:
        blocks = quantize(np.asarray(array, np.float32), GGMLQuantizationType[kind])
    except NotImplementedError:
        raise ConfigError(
            f"tensor '{name}': values are not quantised to {kind} here: give its blocks, u8"
        ) from None
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(-1)
