"""The table of a model's tensors: the only place that knows their names.

Checking, loading, memory sizes and synthetic models are driven by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.description import Attention, Config, Dense
from urdir.model.families.reader import Shape
from urdir.model.files.model_file import ModelFile
from urdir.ptxgen.weights.formats import FORMATS

Kind = Literal["matrix", "vector", "rope factors"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a model has.

    A "matrix" (rows, cols) may be quantised and is repacked; its bias, if it has one, has its role
    with ``_bias`` appended. A "vector" is kept as it is. "rope factors" go into RoPE tables.
    """

    role: str
    layer: int | None
    shape: Shape  # rows first
    kind: Kind

    @property
    def name(self) -> str:
        """Its name in a GGUF file."""
        return tensor_name(self.role, self.layer)

    @property
    def types(self) -> Collection[str]:
        """GGUF types that it may have."""
        return FORMATS if self.kind == "matrix" else ("F32",)


#: GGUF names by role, without the layer and without ".weight" or ".bias".
_NAMES = {
    "embedding": "token_embd",
    "output_norm": "output_norm",
    "output": "output",
    "rope_factors": "rope_freqs",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def tensor_name(role: str, layer: int | None = None) -> str:
    """The GGUF name of the tensor of that role, in a layer or (None) outside the layers."""
    of = role.removesuffix("_bias")
    at = "" if layer is None else f"blk.{layer}."
    return f"{at}{_NAMES[of]}.{'weight' if of == role else 'bias'}"


def tensors(config: Config) -> Iterator[TensorSpec]:
    """Every tensor that a model of this configuration has, each once."""
    yield from _matrix("embedding", None, config.vocab_size, config.hidden)
    yield _vector("output_norm", None, config.hidden)
    if not config.tied:
        yield from _matrix("output", None, config.vocab_size, config.hidden)
    if config.output_bias:
        yield _vector("output_bias", None, config.vocab_size)
    for rope in config.ropes:
        if rope.has_factors:
            yield TensorSpec("rope_factors", None, (rope.dim // 2,), "rope factors")
    for index, layer in enumerate(config.layers):
        yield _vector("attn_norm", index, config.hidden)
        yield from _attention(layer.mixer, index, config.hidden)
        yield _vector("ffn_norm", index, config.hidden)
        yield from _dense(layer.ffn, index, config.hidden)


def check_tensors(config: Config, file: ModelFile) -> None:
    """Raise ConfigError for a tensor that is missing or has another shape, UnsupportedError for a
    type that is not supported there and for a tensor that is not in the table.
    """
    expected = set()
    for spec in tensors(config):
        expected.add(spec.name)
        _check(spec, file)
    # A tensor left out would change the answers silently.
    for name in file.tensors:
        if name not in expected:
            raise UnsupportedError(
                f"tensor '{name}' is no part of a '{config.architecture}' model as supported here"
            )


def _check(spec: TensorSpec, file: ModelFile) -> None:
    name, tensor = spec.name, file.tensors.get(spec.name)
    if tensor is None:
        raise ConfigError(f"tensor '{name}' {_text(spec.shape)} is missing")
    if tensor.shape != spec.shape:
        raise ConfigError(
            f"tensor '{name}' has shape {_text(tensor.shape)}, "
            f"the metadata asks for {_text(spec.shape)}"
        )
    if tensor.type_name not in spec.types:
        raise UnsupportedError(
            f"tensor '{name}' has type {tensor.type_name}; supported there: "
            f"{', '.join(sorted(spec.types))}"
        )


def _text(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _attention(mixer: Attention, layer: int, hidden: int) -> Iterator[TensorSpec]:
    bias = mixer.qkv_bias
    yield from _matrix("q", layer, mixer.query_width, hidden, bias=bias)
    yield from _matrix("k", layer, mixer.key_width, hidden, bias=bias)
    yield from _matrix("v", layer, mixer.value_width, hidden, bias=bias)
    if mixer.qk_norm:
        yield _vector("q_norm", layer, mixer.key_dim)
        yield _vector("k_norm", layer, mixer.key_dim)
    yield from _matrix("o", layer, hidden, mixer.output_width)


def _dense(ffn: Dense, layer: int, hidden: int) -> Iterator[TensorSpec]:
    yield from _matrix("gate", layer, ffn.width, hidden)
    yield from _matrix("up", layer, ffn.width, hidden)
    yield from _matrix("down", layer, hidden, ffn.width)


def _matrix(
    role: str, layer: int | None, rows: int, cols: int, *, bias: bool = False
) -> Iterator[TensorSpec]:
    yield TensorSpec(role, layer, (rows, cols), "matrix")
    if bias:
        yield _vector(f"{role}_bias", layer, rows)


def _vector(role: str, layer: int | None, width: int) -> TensorSpec:
    return TensorSpec(role, layer, (width,), "vector")
